"""Checkpoint files: safetensors headers, and the check of every tensor against the model's shape.

Everything here works from headers: no tensor is read and no memory is taken before the whole
checkpoint is known to fit. Formats are recognised from names and dtypes.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from decant.engine.model_shape import ModelShape, parse_shape, read_config
from decant.protocol.errors import CheckpointError

ITEM_BYTES = {
    "BF16": 2, "F16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1, "F8_E8M0": 1, "F8_E5M2": 1,
    "I8": 1, "U8": 1, "I16": 2, "I32": 4, "I64": 8, "BOOL": 1,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000
HASH_SAMPLES = 256
PLAIN = ("BF16", "F32")


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: byte range [begin, end) of a file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> tuple[dict[str, TensorEntry], bytes]:
    """Entries of one safetensors file and its raw header. Raises: CheckpointError."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(f"{path.name} is not a complete safetensors file")
            raw = file.read(length)
        table = json.loads(raw)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    entries = {}
    for name, item in table.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = item["dtype"], tuple(int(n) for n in item["shape"])
            begin, end = (8 + length + int(n) for n in item["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path.name}: bad header of tensor {name}") from error
        count = 1
        for n in shape:
            count *= n
        if dtype not in ITEM_BYTES:
            raise CheckpointError(f"tensor {name} has an unknown dtype {dtype}")
        if not 8 + length <= begin <= end <= size or end - begin != count * ITEM_BYTES[dtype]:
            raise CheckpointError(f"{path.name}: tensor {name} lies outside the file (cut short?)")
        entries[name] = TensorEntry(name, path, dtype, shape, begin, end)
    return entries, raw


def samples(path: Path) -> bytes:
    """64 bytes at each of HASH_SAMPLES places spread over a file."""
    size = path.stat().st_size
    descriptor = os.open(path, os.O_RDONLY)
    try:
        places = [size * i // HASH_SAMPLES for i in range(HASH_SAMPLES)]
        return b"".join(os.pread(descriptor, 64, at) for at in places)
    finally:
        os.close(descriptor)


class Checkpoint:
    """A folder in the published format whose headers have been checked.

    Attributes: shape, entries (by name), model_hash (of config.json, all headers and samples of
    the data, so that two trainings of one shape differ).
    Raises: CheckpointError naming the tensor."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(f"the model folder {folder} does not exist")
        table = read_config(self.folder)
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        self.entries: dict[str, TensorEntry] = {}
        for path in self._files():
            entries, raw = read_header(path)
            digest.update(raw)
            digest.update(samples(path))
            for name, entry in entries.items():
                if name in self.entries:
                    raise CheckpointError(f"tensor {name} is in two files")
                self.entries[name] = entry
        self.model_hash = digest.hexdigest()[:32]
        if not any(name.startswith("mtp.") for name in self.entries):
            table = {**table, "num_nextn_predict_layers": 0}  # conversions drop the MTP layer
            if isinstance(table.get("compress_ratios"), list):
                table["compress_ratios"] = table["compress_ratios"][: table["num_hidden_layers"]]
        self.shape: ModelShape = parse_shape(table)
        check_tensors(self.shape, self.entries)
        self._maps: dict[Path, mmap.mmap] = {}

    def _files(self) -> list[Path]:
        index = self.folder / "model.safetensors.index.json"
        if index.exists():
            try:
                names = set(json.loads(index.read_text())["weight_map"].values())
            except (ValueError, KeyError, AttributeError) as error:
                raise CheckpointError(f"{index} is not a shard index") from error
            if any(os.path.basename(n) != n for n in names):
                raise CheckpointError(f"{index} names a file outside the model folder")
            files = sorted(self.folder / n for n in names)
        else:
            files = sorted(self.folder.glob("model*.safetensors"))
        if not files:
            raise CheckpointError(f"no model*.safetensors file in the model folder {self.folder}")
        for path in files:
            if not path.exists():
                raise CheckpointError(f"shard {path.name} is missing from {self.folder}")
        return files

    def read(self, name: str) -> memoryview:
        """The bytes of a tensor, mapped, not copied. Valid until ``close``."""
        entry = self.entries[name]
        if entry.file not in self._maps:
            with entry.file.open("rb") as file:
                self._maps[entry.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return memoryview(self._maps[entry.file])[entry.begin : entry.end]

    def close(self) -> None:
        """Drop the mappings; views of tensors that are still held keep theirs alive."""
        self._maps.clear()


@dataclass(frozen=True)
class Expected:
    """One tensor that the model needs. kind: plain (BF16 or F32), f32, i64, linear (may be FP8),
    expert (may be FP8, FP4 or NVFP4). shape is that of the values, not of packed bytes."""

    name: str
    kind: str
    shape: tuple[int, ...]


def _layer_tensors(shape: ModelShape, prefix: str, ratio: int, is_hash: bool) -> Iterator[Expected]:
    hidden, dim, inner = shape.hidden_size, shape.head_dim, shape.moe_intermediate_size
    streams, heads = shape.hc_mult, shape.num_attention_heads
    mix = 2 * streams + streams * streams
    for site in ("hc_attn", "hc_ffn"):
        yield Expected(f"{prefix}{site}_fn", "f32", (mix, streams * hidden))
        yield Expected(f"{prefix}{site}_base", "f32", (mix,))
        yield Expected(f"{prefix}{site}_scale", "f32", (3,))
    yield Expected(f"{prefix}attn_norm.weight", "plain", (hidden,))
    yield Expected(f"{prefix}ffn_norm.weight", "plain", (hidden,))
    attn = prefix + "attn."
    rank, width = shape.q_lora_rank, shape.o_groups * shape.o_lora_rank
    yield Expected(attn + "wq_a.weight", "linear", (rank, hidden))
    yield Expected(attn + "q_norm.weight", "plain", (rank,))
    yield Expected(attn + "wq_b.weight", "linear", (heads * dim, rank))
    yield Expected(attn + "wkv.weight", "linear", (dim, hidden))
    yield Expected(attn + "kv_norm.weight", "plain", (dim,))
    yield Expected(attn + "wo_a.weight", "linear", (width, heads * dim // shape.o_groups))
    yield Expected(attn + "wo_b.weight", "linear", (hidden, width))
    yield Expected(attn + "attn_sink", "f32", (heads,))
    if ratio:
        yield from _compressor_tensors(attn + "compressor.", hidden, dim, ratio)
    if ratio == 4:
        n, size = shape.index_n_heads, shape.index_head_dim
        yield Expected(attn + "indexer.wq_b.weight", "linear", (n * size, rank))
        yield Expected(attn + "indexer.weights_proj.weight", "plain", (n, hidden))
        yield from _compressor_tensors(attn + "indexer.compressor.", hidden, size, 4)
    ffn, num = prefix + "ffn.", shape.n_routed_experts
    yield Expected(ffn + "gate.weight", "plain", (num, hidden))
    if is_hash:
        yield Expected(ffn + "gate.tid2eid", "i64", (shape.vocab_size, shape.num_experts_per_tok))
    else:
        yield Expected(ffn + "gate.bias", "f32", (num,))
    owners = [(f"{ffn}experts.{e}.", "expert") for e in range(num)]
    for owner, kind in [*owners, (ffn + "shared_experts.", "linear")]:
        yield Expected(owner + "w1.weight", kind, (inner, hidden))
        yield Expected(owner + "w3.weight", kind, (inner, hidden))
        yield Expected(owner + "w2.weight", kind, (hidden, inner))


def _compressor_tensors(prefix: str, hidden: int, dim: int, ratio: int) -> Iterator[Expected]:
    out = 2 * dim if ratio == 4 else dim
    yield Expected(prefix + "wkv.weight", "plain", (out, hidden))
    yield Expected(prefix + "wgate.weight", "plain", (out, hidden))
    yield Expected(prefix + "ape", "f32", (ratio, out))
    yield Expected(prefix + "norm.weight", "plain", (dim,))


def _head_tensors(shape: ModelShape, prefix: str) -> Iterator[Expected]:
    yield Expected(prefix + "norm.weight", "plain", (shape.hidden_size,))
    streams = shape.hc_mult
    yield Expected(prefix + "hc_head_fn", "f32", (streams, streams * shape.hidden_size))
    yield Expected(prefix + "hc_head_base", "f32", (streams,))
    yield Expected(prefix + "hc_head_scale", "f32", (1,))


def expected_tensors(shape: ModelShape) -> Iterator[Expected]:
    """Every tensor of the model, in the order of the published files."""
    yield Expected("embed.weight", "plain", (shape.vocab_size, shape.hidden_size))
    for i, ratio in enumerate(shape.compress_ratios):
        yield from _layer_tensors(shape, f"layers.{i}.", ratio, i < shape.num_hash_layers)
    yield from _head_tensors(shape, "")
    yield Expected("head.weight", "plain", (shape.vocab_size, shape.hidden_size))
    if shape.has_mtp:
        hidden = shape.hidden_size
        for name in ("e_proj", "h_proj"):
            yield Expected(f"mtp.0.{name}.weight", "linear", (hidden, hidden))
        yield Expected("mtp.0.enorm.weight", "plain", (hidden,))
        yield Expected("mtp.0.hnorm.weight", "plain", (hidden,))
        yield from _layer_tensors(shape, "mtp.0.", 0, False)
        yield from _head_tensors(shape, "mtp.0.")


def _blocks(shape: tuple[int, ...], rows: int, columns: int) -> tuple[int, ...]:
    return (-(-shape[0] // rows), -(-shape[1] // columns))


def companions(want: Expected, dtype: str) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """Scale tensors that belong to a weight stored as ``dtype``: name -> (dtypes, shape).

    Raises: CheckpointError if the kind of tensor may not have that dtype."""
    stem, (rows, columns) = want.name.removesuffix(".weight"), want.shape
    if dtype in PLAIN:
        return {}
    if dtype == "F8_E4M3":
        return {stem + ".scale": (("F8_E8M0", "F32"), _blocks(want.shape, 128, 128))}
    if want.kind == "expert" and dtype == "I8":
        if columns % 32:
            raise CheckpointError(f"tensor {want.name}: FP4 needs groups of 32 along K")
        return {stem + ".scale": (("F8_E8M0",), (rows, columns // 32))}
    if want.kind == "expert" and dtype == "U8":
        return {
            stem + ".weight_scale": (("F8_E4M3",), (rows, columns // 16)),
            stem + ".weight_scale_2": (("F32",), ()),
            stem + ".input_scale": (("F32",), ()),
        }
    raise CheckpointError(f"tensor {want.name} has dtype {dtype}, which is not served there")


OPTIONAL = (".input_scale",)  # calibrated activation scales: not used, may be absent
ALLOWED = {"plain": PLAIN, "f32": ("F32",), "i64": ("I64",)}


def check_tensors(shape: ModelShape, entries: dict[str, TensorEntry]) -> None:
    """Every expected tensor is there with its shape and a served dtype, and nothing else is.

    Raises: CheckpointError naming the first tensor that is wrong."""
    known: set[str] = set()
    for want in expected_tensors(shape):
        entry = entries.get(want.name)
        if entry is None:
            raise CheckpointError(f"tensor {want.name} is missing from the checkpoint")
        known.add(want.name)
        allowed = ALLOWED.get(want.kind)
        if allowed is not None and entry.dtype not in allowed:
            raise CheckpointError(
                f"tensor {want.name} has dtype {entry.dtype}, expected {' or '.join(allowed)}"
            )
        packed = want.kind == "expert" and entry.dtype in ("I8", "U8")
        stored = (want.shape[0], want.shape[1] // 2) if packed else want.shape
        if entry.shape != stored:
            raise CheckpointError(
                f"tensor {want.name} has shape {list(entry.shape)}, expected {list(stored)}"
            )
        if allowed is None:
            for name, (dtypes, size) in companions(want, entry.dtype).items():
                _check_companion(name, dtypes, size, entries)
                known.add(name)
    for name in entries:
        if name not in known:
            what = "the MTP layer" if name.startswith("mtp.") else "the model"
            raise CheckpointError(f"tensor {name} is not part of {what} as decant knows it")


def _check_companion(
    name: str, dtypes: tuple[str, ...], size: tuple[int, ...], entries: dict[str, TensorEntry]
) -> None:
    scale = entries.get(name)
    if scale is None:
        if name.endswith(OPTIONAL):
            return
        raise CheckpointError(f"tensor {name} is missing from the checkpoint")
    if scale.dtype not in dtypes:
        raise CheckpointError(
            f"tensor {name} has dtype {scale.dtype}, expected {' or '.join(dtypes)}"
        )
    if scale.shape != size and not (size == () and scale.shape == (1,)):
        raise CheckpointError(f"tensor {name} has shape {list(scale.shape)}, expected {list(size)}")

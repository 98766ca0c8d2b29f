"""Every kernel configuration that is shipped, compiled for its architecture on a machine without a
GPU.

``python -P -m decant.kernels.shipped [GROUP] [--one-of-each]`` compiles them and prints one JSON
object a line: name, arch, shared memory, registers, spilled bytes, matrix instructions, and what is
wrong.
Results are kept under a hash of the sources, so a second run costs nothing.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from decant.kernels import (
    activations,
    compressor,
    fp4_moe,
    fp8_linear,
    gate,
    indexer,
    kv_store,
    mhc,
    page_copy,
    row_work,
    sampling,
    sparse_mla_decode,
    step_ends,
    wo_a,
)
from decant.kernels.config import ARCHS, SHARED_MEMORY_LIMIT, Config

I32, F32, BF16, F16, U8, FP8, I64 = "*i32", "*fp32", "*bf16", "*fp16", "*u8", "*fp8e4nv", "*i64"
MMA = r"wgmma\.mma_async|mma\.sync"


@dataclass(frozen=True)
class Shipped:
    """One configuration to compile. spill_limit: bytes a thread may keep in local memory."""

    name: str
    arch: str
    kernel: Any
    arguments: dict[str, Any]
    config: Config
    instruction: str = ""
    spill_limit: int = 0


@dataclass(frozen=True)
class Result:
    """What the compiler said about one configuration."""

    name: str
    arch: str
    shared: int
    registers: int
    spill_bytes: int
    instructions: int
    problem: str


def _moe(arch: str) -> Iterator[Shipped]:
    lists = dict.fromkeys(("pairs", "tile_expert", "tile_start", "tile_count", "num_tiles"), I32)
    for group in (32, 16):
        weights: dict[str, Any] = {"codes": U8, "scales": U8, "rows": F32, "GROUP": group}
        for bound, c in fp4_moe.CONFIGS[arch, "gate_up"]:
            arguments: dict[str, Any] = {
                "x": F16,
                "out": F16,
                "TOP_K": 6,
                "K": 4096,
                "N": 1024,
                "LIMIT": 10.0,
            }
            arguments |= weights | lists | {"BLOCK_N": c.block_n, "BLOCK_T": c.block_t}
            arguments |= {"UNROLL": fp4_moe.unroll(c, 4096, group)}
            name = f"moe gate_up group {group} <= {bound}"
            yield Shipped(name, arch, fp4_moe._gate_up_kernel, arguments, c, MMA)
        for bound, c in fp4_moe.CONFIGS[arch, "down"]:
            arguments = {"g": F16, "weights": F32, "out": F32, "K": 512, "N": 4096}
            arguments |= weights | lists | {"BLOCK_N": c.block_n, "BLOCK_T": c.block_t}
            arguments |= {"UNROLL": fp4_moe.unroll(c, 512, group)}
            name = f"moe down group {group} <= {bound}"
            yield Shipped(name, arch, fp4_moe._down_kernel, arguments, c, MMA, 8)
    arguments = {"partial": F32, "shared": BF16, "out": BF16, "N": 4096, "TOP_K": 6}
    arguments |= {"HAS_SHARED": True, "BLOCK_N": 1024}
    yield Shipped("moe combine", arch, fp4_moe._combine_kernel, arguments, Config())


def _attention(arch: str) -> Iterator[Shipped]:
    pointers = {"q": BF16, "slots": U8, "pages": U8, "sink": F32, "partial": F32, "partial_ml": F32}
    pointers |= dict.fromkeys(
        ("slot_of_row", "position_of_row", "page_table", "selected", "selected_count", "counter"),
        I32,
    )
    pointers |= {"out": BF16}
    numbers = ("slot_stride16", "window_offset16", "page_stride16", "part_offset16", "table_stride")
    for kind in (0, 1, 2):
        for bound, c in sparse_mla_decode.CONFIGS[arch, kind]:
            arguments: dict[str, Any] = pointers | dict.fromkeys(numbers, "i32")
            arguments |= {
                "H": 16,
                "RING": 131,
                "ROWS": 256,
                "RATIO": 128,
                "KIND": kind,
                "TOP_K": 512,
            }
            arguments |= {"SPLITS": c.splits, "BLOCK": c.block_n, "BLOCK_H": 16, "WINDOW_KEYS": 128}
            arguments |= {"DATA": 576, "SCALES": 8, "QK_SCALE": 0.0637}
            name = f"attention kind {kind} <= {bound}"
            yield Shipped(name, arch, sparse_mla_decode._attend_kernel, arguments, c, MMA)


def _linear(arch: str) -> Iterator[Shipped]:
    for n, k in ((8192, 1024), (1536, 4096), (4096, 2048)):
        for bound, c in fp8_linear.CONFIGS[arch]:
            apart = bound == 1 << 30  # prefill: activations come as codes
            arguments: dict[str, Any] = {"x": FP8 if apart else BF16, "weight": FP8, "scale": U8}
            arguments |= {"factors": F32, "partial": F32, "QUANTISED": apart}
            arguments |= {"counter": I32, "out": BF16, "tokens": "i32", "x_stride": "i32"}
            arguments |= {"N": n, "K": k, "SPLITS": fp8_linear.splits_for(c, n, k, arch)}
            arguments |= {"BLOCK_N": c.block_n, "BLOCK_T": c.block_t, "BLOCK_K": 128}
            instruction = r"wgmma.*e4m3" if arch == "sm_90" else r"mma\.sync.*e4m3"
            name = f"linear {n}x{k} <= {bound}"
            yield Shipped(name, arch, fp8_linear._linear_kernel, arguments, c, instruction)
    arguments = {"o": BF16, "rope": F32, "rotated": F16, "H": 16, "BLOCK_H": wo_a.ROTATE_HEADS}
    yield Shipped("wo_a rotate", arch, wo_a._rotate_kernel, arguments, Config())
    arguments = {"x": BF16, "codes": FP8, "factors": F32, "tokens": "i32", "x_stride": "i32"}
    arguments |= {"K": 1024, "BLOCK_T": fp8_linear.QUANTISE_ROWS, "BLOCK_K": 128}
    yield Shipped("linear quantise", arch, fp8_linear._quantise_kernel, arguments, Config())
    for bound, c in wo_a.CONFIGS[arch]:
        arguments = {
            "o": BF16,
            "rope": F32,
            "weight": FP8,
            "scale": U8,
            "partial": F32,
            "counter": I32,
        }
        arguments |= {"out": BF16, "tokens": "i32", "GROUPS": 2, "R": 1024, "K": 4096}
        arguments |= {"SPLITS": fp8_linear.splits_for(c, 2048, 4096, arch), "BLOCK_K": 128}
        arguments |= {"BLOCK_N": c.block_n, "BLOCK_T": c.block_t, "ROTATED": bound > 16}
        arguments |= {"o": F16} if bound > 16 else {}
        # the prefill tile keeps two words in local memory and is the fastest all the same
        yield Shipped(f"wo_a <= {bound}", arch, wo_a._wo_a_kernel, arguments, c, MMA, 16)


def _index(arch: str) -> Iterator[Shipped]:
    page = dict.fromkeys(("page_stride16", "part_offset16", "table_stride", "rows"), "i32")
    for _, c in indexer.LOGITS[arch]:
        arguments: dict[str, Any] = {"q": FP8, "weights": F32, "pages": U8, "row_start": I64}
        arguments |= (
            dict.fromkeys(("page_table", "slot_of_row", "entries", "tile_start"), I32) | page
        )
        arguments |= {"logits": F32, "R": 64, "ROWS": 256, "BLOCK": c.block_n, "HEADS": 64}
        yield Shipped("index logits", arch, indexer._logits_kernel, arguments, c, r"e4m3")
    for _, c in indexer.SELECT[arch]:
        arguments = {
            "logits": F32,
            "row_start": I64,
            "best_value": F32,
            "rows": "i32",
            "R": 64,
            "K": 512,
        }
        arguments |= dict.fromkeys(("entries", "chunk_start", "best_entry", "selected"), I32)
        arguments |= {"CHUNK": c.block_n}
        yield Shipped("index chunks", arch, indexer._chunk_kernel, arguments, c, spill_limit=128)
        arguments = {"best_value": F32, "K": 512, "CHUNK": c.block_n, "WAYS": 8}
        arguments |= dict.fromkeys(
            ("entries", "chunk_start", "best_entry", "selected", "selected_count"), I32
        )
        merge = Config(num_warps=16, num_stages=1)
        yield Shipped("index merge", arch, indexer._merge_kernel, arguments, merge)
    arguments = {"q": BF16, "head_weights": F32, "codes": FP8, "weights": F32, "FACTOR": 0.011}
    arguments |= {"rope": F32, "q_stride": "i32", "weights_stride": "i32", "ROTATE": True}
    arguments |= {"HEADS": 64, "BLOCK_H": 16}
    yield Shipped(
        "index hadamard", arch, indexer._hadamard_kernel, arguments, Config(num_warps=8), MMA
    )
    arguments = dict.fromkeys(("positions", "entries", "tile_start", "chunk_start"), I32)
    arguments |= {"row_start": I64, "rows": "i32", "R": 64, "RATIO": 4, "K": 512}
    arguments |= {"TILE": 128, "CHUNK": 8192}
    yield Shipped("index plan", arch, indexer._plan_kernel, arguments, Config())


def _small(arch: str) -> Iterator[Shipped]:
    for bound, c in mhc.CONFIGS[arch]:
        arguments: dict[str, Any] = {"x": BF16, "y": BF16, "post": F32, "comb": F32, "fn": F32}
        arguments |= {"streams": BF16, "partial": F32, "tokens": "i32", "D": 4096, "DOTS": 24}
        arguments |= {
            "SPLITS": c.splits,
            "COMBINE": True,
            "BLOCK_T": c.block_t,
            "BLOCK_D": c.block_k,
        }
        instruction = MMA if c.block_t >= 16 else ""
        yield Shipped(
            f"mhc combine <= {bound}", arch, mhc._combine_kernel, arguments, c, instruction
        )
        arguments = {"streams": BF16, "partial": F32, "base": F32, "scale": F32, "norm": BF16}
        arguments |= {
            "post": F32,
            "comb": F32,
            "out": BF16,
            "out16": F16,
            "tokens": "i32",
            "D": 4096,
        }
        arguments |= {
            "SPLITS": c.splits,
            "HEAD": False,
            "WITH_FP16": True,
            "ROUNDS": 20,
            "EPS": 1e-6,
        }
        name = f"mhc collapse <= {bound}"
        yield Shipped(name, arch, mhc._collapse_kernel, arguments, Config(num_warps=8), "", 16)
    arguments = {"x": BF16, "weight": BF16, "partial": F32, "tokens": "i32", "D": 4096, "E": 256}
    arguments |= {"SPLITS": gate.SPLIT_K, "BLOCK_T": 16, "BLOCK_E": 16, "BLOCK_K": 128}
    yield Shipped("gate logits", arch, gate._logits_kernel, arguments, Config(num_stages=3), MMA)
    for hashed in (False, True):
        arguments = {"partial": F32, "bias": F32, "weights": F32, "tokens": "i32", "SCALE": 1.5}
        arguments |= dict.fromkeys(("table", "token_ids", "experts"), I32)
        arguments |= {"E": 256, "TOP_K": 6, "SPLITS": gate.SPLIT_K, "HASHED": hashed}
        name = f"gate choose hashed {hashed}"
        yield Shipped(name, arch, gate._choose_kernel, arguments, Config(num_warps=1))
    arguments = dict.fromkeys(
        ("experts", "pairs", "tile_expert", "tile_start", "tile_count", "num_tiles"), I32
    )
    arguments |= {"num_pairs": "i32", "E": 256, "BLOCK_P": 16, "CHUNK": 512, "TILE": 16}
    yield Shipped("gate list", arch, gate._list_kernel, arguments, Config())
    arguments = {"x": BF16, "weight": BF16, "codes": FP8, "factors": F32, "tokens": "i32"}
    arguments |= {"x_stride": "i32", "K": 1024, "GROUPS": 8, "EPS": 1e-6}
    yield Shipped("norm codes", arch, activations._norm_codes_kernel, arguments, Config())
    arguments = {"x": BF16, "codes": FP8, "factors": F32, "tokens": "i32", "x_stride": "i32"}
    arguments |= {"K": 512, "LIMIT": 10.0}
    one = Config(num_warps=1)
    yield Shipped("swiglu codes", arch, activations._swiglu_codes_kernel, arguments, one)
    arguments = {"source": U8, "target": U8, "source_pages": I32, "target_pages": I32}
    arguments |= dict.fromkeys(("pieces", "source_stride", "target_stride"), "i32")
    arguments |= {"WORDS": page_copy.WORDS}
    wide = r"ld\.global\.\S*v4"
    yield Shipped("page copy", arch, page_copy._copy_kernel, arguments, Config(), wide)
    arguments = {"positions": I32, "frequencies": F32, "out": F32, "shift": "i32"}
    yield Shipped("rope rows", arch, kv_store._rope_kernel, arguments, Config(num_warps=1), "", 64)
    arguments = {"q": BF16, "out": BF16, "k": BF16, "k_norm": BF16, "rope": F32, "extents": U8}
    arguments |= {"out_stride": "i32", "slot_of_row": I32, "position_of_row": I32}
    arguments |= dict.fromkeys(("stride16", "offset16", "q_stride", "k_stride"), "i32")
    arguments |= {"H": 16, "BLOCK_H": 4, "RING": 131, "DATA": 576, "SCALES": 8, "EPS": 1e-6}
    yield Shipped("norm rope store", arch, kv_store._norm_rope_store_kernel, arguments, Config())
    for ratio, index in ((4, False), (4, True), (128, False)):
        for write, emit in ((True, True), (False, True), (True, False)):
            arguments = {"projected": F32, "ape": F32, "norm": BF16, "rope": F32, "extents": U8}
            arguments |= {"pages": U8}
            arguments |= dict.fromkeys(("slot_of_row", "position_of_row", "page_table"), I32)
            arguments |= dict.fromkeys(("rows", "p_stride", "stride16", "state_offset16"), "i32")
            arguments |= dict.fromkeys(("page_stride16", "part_offset16", "table_stride"), "i32")
            arguments |= {"WIDTH": 128 if index else 512, "RATIO": ratio, "EPS": 1e-6}
            arguments |= {"RING": 16 if ratio == 4 else 256, "ROWS": 1024 // ratio, "INDEX": index}
            arguments |= {"OVERLAP": ratio == 4, "WRITE": write, "EMIT": emit}
            arguments |= {"POSITIONS": 8 if ratio == 4 else 16, "DATA": 128 if index else 576}
            arguments |= {"SCALES": 4 if index else 8}
            name = f"compress {ratio} index {index} write {write} emit {emit}"
            config = Config(num_warps=4 if index else 8)
            yield Shipped(name, arch, compressor._compress_kernel, arguments, config)
    arguments = {"tokens": I32, "positions": I32, "embedding": BF16, "streams": BF16}
    arguments |= dict.fromkeys(("plain", "compressed", "ropes"), F32) | {"rows": "i32", "D": 4096}
    arguments |= {"BLOCK": step_ends.BLOCK, "SHIFT_4": -3, "SHIFT_128": -127}
    yield Shipped("step begin", arch, step_ends._begin_kernel, arguments, Config(), "", 64)
    arguments = {"streams": BF16, "extents": U8, "SIZE": 16384, "RECENT": 8, "PER_SEQUENCE": 4}
    arguments |= dict.fromkeys(("slot_of_row", "position_of_row"), I32)
    arguments |= dict.fromkeys(("stride16", "last16", "recent16", "rows"), "i32")
    arguments |= {"BLOCK": 4 * step_ends.BLOCK}
    yield Shipped("step keep", arch, step_ends._keep_kernel, arguments, Config())
    for ratio in (0, 4, 128):
        arguments = {"q": BF16, "out": BF16, "k": BF16, "k_norm": BF16, "psi": BF16, "codes": FP8}
        arguments |= {"out_stride": "i32", "psi_stride": "i32"}
        arguments |= dict.fromkeys(("slot_of_row", "position_of_row", "page_table"), I32)
        arguments |= dict.fromkeys(("extents", "pages"), U8)
        arguments |= dict.fromkeys(("rope", "entry_rope", "projected", "ape", "i_projected"), F32)
        arguments |= {"i_ape": F32, "norm": BF16, "i_norm": BF16, "omega": F32, "weights": F32}
        arguments |= dict.fromkeys(("rows", "stride16", "page_stride16", "table_stride"), "i32")
        arguments |= dict.fromkeys(("q_stride", "k_stride", "p_stride", "omega_stride"), "i32")
        arguments |= dict.fromkeys(("window_offset16", "state_offset16", "part_offset16"), "i32")
        arguments |= dict.fromkeys(("i_state_offset16", "i_part_offset16"), "i32")
        arguments |= {"H": 16, "BLOCK_H": row_work.HEADS_A_PART, "WINDOW_RING": 131}
        arguments |= {"RATIO": ratio, "RING": 16 if ratio == 4 else 256}
        arguments |= {"ROWS": 1024 // (ratio or 4)}
        arguments |= {"HAS_INDEX": ratio == 4, "I_RING": 16, "I_ROWS": 256, "FACTOR": 0.011}
        arguments |= {"HAS_QUERIES": ratio == 4, "INDEX_HEADS": 64, "DATA": 576, "SCALES": 8}
        arguments |= {"BLOCK_I": row_work.INDEX_HEADS_A_PART, "EPS": 1e-6}
        eight = Config(num_warps=8)
        yield Shipped(f"row work {ratio}", arch, row_work._row_kernel, arguments, eight)
    arguments = {"logits": F32, "seeds": I64, "counts": "*i16", "seen": "*i8"}
    arguments |= dict.fromkeys(
        ("allowed", "slot_of_row", "choices", "positions", "best_token"), I32
    )
    arguments |= dict.fromkeys(("finite",), I32)
    arguments |= dict.fromkeys(("temperature", "repetition", "presence", "frequency"), F32)
    arguments |= dict.fromkeys(("processed", "perturbed", "best_value", "greatest"), F32)
    arguments |= dict.fromkeys(("V", "logits_stride", "counts_stride"), "i32")
    arguments |= {"PARTS": sampling.PARTS, "BLOCK": 512, "HAS_MASK": True, "HAS_PENALTY": True}
    arguments |= {"GREEDY": 1e-5}
    yield Shipped("sampling process", arch, sampling._process_kernel, arguments, Config())
    arguments = dict.fromkeys(("processed", "perturbed", "best_value", "greatest"), F32)
    arguments |= dict.fromkeys(("temperature", "top_p", "min_p"), F32)
    arguments |= dict.fromkeys(("best_token", "finite", "top_k", "tokens"), I32) | {"V": "i32"}
    arguments |= {"PARTS": sampling.PARTS, "BLOCK": 4096, "GREEDY": 1e-5, "TRIES": sampling.TRIES}
    yield Shipped("sampling draw", arch, sampling._draw_kernel, arguments, Config(num_warps=16))
    arguments = dict.fromkeys(("drawn", "drafts", "valid_drafts", "accepted"), I32)
    arguments |= {"ROWS": 4, "PADDED": 4}
    yield Shipped("sampling accept", arch, sampling._accept_kernel, arguments, Config(num_warps=1))


GROUPS = {
    "moe": _moe,
    "attention": _attention,
    "linear": _linear,
    "index": _index,
    "small": _small,
}


def shipped(arch: str, group: str | None = None) -> Iterator[Shipped]:
    """All configurations of an architecture, or those of one group."""
    for name, configurations in GROUPS.items():
        if group in (None, name):
            yield from configurations(arch)


def one_of_each(items: Iterable[Shipped]) -> list[Shipped]:
    """One configuration of every kernel: the second of its table (small decode batches), if there
    is one.
    """
    first: dict[str, list[Shipped]] = {}
    for item in items:
        first.setdefault(item.kernel.__name__, []).append(item)
    return [found[min(1, len(found) - 1)] for found in first.values()]


def check(item: Shipped) -> Result:
    """Compile one configuration and compare it with its limits."""
    from decant.kernels.aot import compile_kernel

    config = item.config
    try:
        built = compile_kernel(
            item.kernel, item.arguments, item.arch, config.num_warps, config.num_stages
        )
    except Exception as error:
        text = f"{type(error).__name__}: {str(error)[-300:]}"
        return Result(item.name, item.arch, 0, 0, 0, 0, text)
    count = built.count(item.instruction) if item.instruction else 0
    problems = []
    if built.shared > SHARED_MEMORY_LIMIT[item.arch]:
        problems.append(f"shared memory {built.shared} > {SHARED_MEMORY_LIMIT[item.arch]}")
    if built.spill_bytes > item.spill_limit:
        problems.append(f"{built.spill_bytes} bytes of local memory > {item.spill_limit}")
    if item.instruction and not count:
        problems.append(f"no instruction {item.instruction} in the PTX")
    return Result(
        item.name,
        item.arch,
        built.shared,
        built.registers,
        built.spill_bytes,
        count,
        "; ".join(problems),
    )


def source_hash() -> str:
    """Hash of everything that the results depend on: the kernels' sources and Triton's version."""
    import triton

    digest = hashlib.sha256(triton.__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.name not in ("bench.py", "cases.py"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def main(argv: list[str]) -> int:
    """Compile (or read the kept results) and print. Exit status 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="decant.kernels.shipped", description=main.__doc__)
    parser.add_argument("group", nargs="?", choices=list(GROUPS), help="all groups if left out")
    parser.add_argument("--one-of-each", action="store_true", help="one configuration a kernel")
    arguments = parser.parse_args(argv)
    folder = Path(os.environ.get("DECANT_CACHE", Path.home() / ".cache" / "decant"))
    what = f"{arguments.group or 'all'}{'-some' if arguments.one_of_each else ''}"
    kept = folder / f"kernels-{what}-{source_hash()}.jsonl"
    if kept.exists():
        lines = kept.read_text().splitlines()
    else:
        lines = []
        for arch in ARCHS:
            items = list(shipped(arch, arguments.group))
            chosen = one_of_each(items) if arguments.one_of_each else items
            lines += [json.dumps(asdict(check(item))) for item in chosen]
        folder.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_text("\n".join(lines) + "\n")
        partial.replace(kept)
    print("\n".join(lines))
    return int(any(json.loads(line)["problem"] for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

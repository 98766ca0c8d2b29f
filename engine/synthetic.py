"""Random checkpoints in the published format and real shapes, for speed and memory without the real
weights. Deterministic by seed. Nothing about engines.

Values are drawn so that activations stay finite through many layers: weights around
K ^ -1/2, norms near 1, biases and sinks small.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from decant.engine.checkpoint import Expected, expected_tensors
from decant.engine.model_shape import parse_shape
from decant.protocol.errors import ConfigError

# The published config.json of DeepSeek-V4-Flash.
REAL: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4",
    "vocab_size": 129280, "hidden_size": 4096, "num_hidden_layers": 43,
    "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64,
    "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128,
    "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 6, "moe_intermediate_size": 2048,
    "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True,
    "routed_scaling_factor": 1.5, "num_hash_layers": 3, "swiglu_limit": 10.0,
    "hidden_act": "silu", "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn", "factor": 16, "original_max_position_embeddings": 65536,
        "beta_fast": 32, "beta_slow": 1,
    },
    "max_position_embeddings": 1048576, "num_nextn_predict_layers": 1, "bos_token_id": 0,
    "eos_token_id": 1, "tie_word_embeddings": False, "attention_bias": False,
    "torch_dtype": "bfloat16", "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128], "activation_scheme": "dynamic",
    },
}  # fmt: skip
# Few and narrow, but with every row width that the page format and the kernels fix.
TINY: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "num_attention_heads": 8, "q_lora_rank": 128,
    "o_groups": 1, "o_lora_rank": 128, "index_n_heads": 64, "n_routed_experts": 16,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "max_position_embeddings": 16384,
    "num_hash_layers": 1,
}  # fmt: skip
WIDTHS: dict[str, dict[str, Any]] = {"real": REAL, "tiny": {**REAL, **TINY}}


def ratios(layers: int) -> list[int]:
    """The published schedule cut to ``layers``, and the MTP layer's 0."""
    return [0, 0, *(4 if i % 2 == 0 else 128 for i in range(2, 43))][:layers] + [0]


def config_table(layers: int, width: str) -> dict[str, Any]:
    """config.json. Raises: ConfigError."""
    if width not in WIDTHS:
        raise ConfigError(f"width {width!r} is none of {', '.join(WIDTHS)}")
    if not 1 <= layers <= 43:
        raise ConfigError(f"layers {layers} is not between 1 and 43")
    table = {**WIDTHS[width], "num_hidden_layers": layers, "compress_ratios": ratios(layers)}
    table["num_hash_layers"] = min(layers, table["num_hash_layers"])
    return table


def _bf16(values: NDArray[np.float32]) -> bytes:
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def _scale_byte(columns: int, spread: float) -> int:
    """E8M0 byte for weights of about columns ^ -1/2 out of codes of size ``spread``."""
    return 127 + round(math.log2(columns**-0.5 / spread))


class Writer:
    """Tensors of one checkpoint, generated one at a time."""

    def __init__(self, seed: int, vocab_experts: int) -> None:
        self._random = np.random.default_rng(seed)
        self._experts = vocab_experts

    def parts(self, want: Expected) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
        """(name, dtype, stored shape, bytes) of a tensor and of its scales."""
        random, name, shape = self._random, want.name, want.shape
        stem = name.removesuffix(".weight")
        count = math.prod(shape)
        if want.kind == "i64":
            choices = np.argsort(random.random((shape[0], self._experts)), axis=1)[:, : shape[1]]
            yield name, "I64", shape, choices.astype(np.int64).tobytes()
        elif want.kind == "expert":
            rows, columns = shape
            packed = random.bytes(count // 2)
            scale = bytes([_scale_byte(columns, 2.7)])
            yield name, "I8", (rows, columns // 2), packed
            yield stem + ".scale", "F8_E8M0", (rows, columns // 32), scale * (count // 32)
        elif want.kind == "linear":
            rows, columns = shape
            # signs and codes of 2^-3 to 2^3: no NaN, no wide range
            codes = random.integers(32, 88, count, np.uint8) | (
                random.integers(0, 2, count, np.uint8) << 7
            )
            blocks = (-(-rows // 128), -(-columns // 128))
            scale = bytes([_scale_byte(columns, 3.0)])
            yield name, "F8_E4M3", shape, codes.tobytes()
            yield stem + ".scale", "F8_E8M0", blocks, scale * math.prod(blocks)
        else:
            values = random.standard_normal(count, np.float32)
            if "norm" in name:
                values = 1 + 0.05 * values
            elif len(shape) == 2 and not name.endswith((".ape", "_fn")):
                values *= 1.0 if name == "embed.weight" else shape[1] ** -0.5
            elif name.endswith("_fn"):
                values *= shape[1] ** -0.5
            elif name.endswith("_scale"):
                values = np.ones_like(values)
            else:
                values *= 0.1
            if want.kind == "f32":
                yield name, "F32", shape, values.tobytes()
            else:
                yield name, "BF16", shape, _bf16(values)


def make_checkpoint(folder: Path, layers: int, width: str, seed: int) -> int:
    """Write config.json and one safetensors file a layer; returns the bytes written.

    Raises: ConfigError if the folder exists and is not empty, or the arguments are wrong."""
    table = config_table(layers, width)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    shape = parse_shape(table)
    groups: dict[str, list[Expected]] = {}
    for want in expected_tensors(shape):
        words = want.name.split(".")
        group = ".".join(words[:2]) if words[0] in ("layers", "mtp") else "rest"
        groups.setdefault(group, []).append(want)
    weight_map, total = {}, 0
    writer = Writer(seed, shape.n_routed_experts)
    for number, wanted in enumerate(groups.values(), 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        data = folder / (file + ".data")
        header: dict[str, Any] = {}
        at = 0
        with data.open("wb") as out:
            for want in wanted:
                for name, dtype, stored, raw in writer.parts(want):
                    header[name] = {
                        "dtype": dtype, "shape": stored, "data_offsets": [at, at + len(raw)],
                    }  # fmt: skip
                    at += len(raw)
                    out.write(raw)
                    weight_map[name] = file
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as out, data.open("rb") as source:
            out.write(len(text).to_bytes(8, "little") + text)
            while piece := source.read(1 << 24):
                out.write(piece)
        data.unlink()
        total += at
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(table, indent=2))
    return total

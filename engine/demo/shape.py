"""The demo model's shape: its configuration, the tensors of its checkpoint and the check against
TP4.

Owns: the published configuration fields, the list of tensors (name, shape, storage) that follows
from them, and the rules that let four ranks and the GPU kernels run the same file. Knows nothing
about torch.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

VOCABULARY = 2560
STREAMS = 4
EPS = 1e-6
TP_RANKS = 4
FP8_BLOCK = 128
FP4_GROUP = 32
MAX_BYTES = 24_000_000
"""Bound of the shipped weights on disk."""

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_groups": 4,
    "o_lora_rank": 128,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4, 0, 4, 0],
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "hc_mult": STREAMS,
    "hc_sinkhorn_iters": 20,
    "hc_eps": EPS,
    "rms_norm_eps": EPS,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 16384,
    "num_nextn_predict_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}

QUANTISED: dict[str, Any] = {
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "activation_scheme": "dynamic",
    },
}
"""Fields that join `CONFIG` in the config.json of a quantised folder."""


class Tensor(NamedTuple):
    """One logical tensor of the checkpoint; `shape` counts values, not packed bytes."""

    name: str
    shape: tuple[int, ...]
    storage: str  # "bf16", "f32", "i64", "fp8" (with a scale per 128x128) or "fp4" (per 32 of K)

    @property
    def num_bytes(self) -> int:
        """Bytes on disk, scales included."""
        n = math.prod(self.shape)
        if self.storage == "fp8":
            rows, cols = self.shape
            return n + math.ceil(rows / FP8_BLOCK) * math.ceil(cols / FP8_BLOCK)
        if self.storage == "fp4":
            return n // 2 + n // FP4_GROUP
        return n * {"bf16": 2, "f32": 4, "i64": 8}[self.storage]


def _site(prefix: str, name: str, rows: int, hidden: int) -> Iterator[Tensor]:
    yield Tensor(f"{prefix}hc_{name}_fn", (rows, STREAMS * hidden), "f32")
    yield Tensor(f"{prefix}hc_{name}_base", (rows,), "f32")
    yield Tensor(f"{prefix}hc_{name}_scale", (3 if rows > STREAMS else 1,), "f32")


def _compressor(prefix: str, hidden: int, width: int, ratio: int) -> Iterator[Tensor]:
    out = 2 * width if ratio == 4 else width
    yield Tensor(prefix + "wkv.weight", (out, hidden), "bf16")
    yield Tensor(prefix + "wgate.weight", (out, hidden), "bf16")
    yield Tensor(prefix + "ape", (ratio, out), "f32")
    yield Tensor(prefix + "norm.weight", (width,), "bf16")


def _layer(c: dict[str, Any], prefix: str, ratio: int, hashed: bool) -> Iterator[Tensor]:
    hidden, heads, width = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
    rank, groups, out = c["q_lora_rank"], c["o_groups"], c["o_lora_rank"]
    inner, experts = c["moe_intermediate_size"], c["n_routed_experts"]
    for norm in ("attn_norm", "ffn_norm"):
        yield Tensor(f"{prefix}{norm}.weight", (hidden,), "bf16")
    for site in ("attn", "ffn"):
        yield from _site(prefix, site, 2 * STREAMS + STREAMS * STREAMS, hidden)
    attn = prefix + "attn."
    yield Tensor(attn + "wq_a.weight", (rank, hidden), "fp8")
    yield Tensor(attn + "q_norm.weight", (rank,), "bf16")
    yield Tensor(attn + "wq_b.weight", (heads * width, rank), "fp8")
    yield Tensor(attn + "wkv.weight", (width, hidden), "fp8")
    yield Tensor(attn + "kv_norm.weight", (width,), "bf16")
    yield Tensor(attn + "wo_a.weight", (groups * out, heads * width // groups), "fp8")
    yield Tensor(attn + "wo_b.weight", (hidden, groups * out), "fp8")
    yield Tensor(attn + "attn_sink", (heads,), "f32")
    if ratio:
        yield from _compressor(attn + "compressor.", hidden, width, ratio)
    if ratio == 4:
        rows = c["index_n_heads"]
        yield Tensor(attn + "indexer.wq_b.weight", (rows * c["index_head_dim"], rank), "fp8")
        yield Tensor(attn + "indexer.weights_proj.weight", (rows, hidden), "bf16")
        yield from _compressor(attn + "indexer.compressor.", hidden, c["index_head_dim"], 4)
    ffn = prefix + "ffn."
    yield Tensor(ffn + "gate.weight", (experts, hidden), "bf16")
    if hashed:
        yield Tensor(ffn + "gate.tid2eid", (c["vocab_size"], c["num_experts_per_tok"]), "i64")
    else:
        yield Tensor(ffn + "gate.bias", (experts,), "f32")
    for owner in [f"experts.{e}" for e in range(experts)] + ["shared_experts"]:
        kind = "fp8" if owner == "shared_experts" else "fp4"
        yield Tensor(f"{ffn}{owner}.w1.weight", (inner, hidden), kind)
        yield Tensor(f"{ffn}{owner}.w2.weight", (hidden, inner), kind)
        yield Tensor(f"{ffn}{owner}.w3.weight", (inner, hidden), kind)


def tensors(c: dict[str, Any]) -> Iterator[Tensor]:
    """Every tensor of the published checkpoint of configuration `c`, scales left out.

    Source: the published tensor inventory of DeepSeek-V4-Flash."""
    hidden, ratios = c["hidden_size"], c["compress_ratios"]
    yield Tensor("embed.weight", (c["vocab_size"], hidden), "bf16")
    for i in range(c["num_hidden_layers"]):
        yield from _layer(c, f"layers.{i}.", ratios[i], i < c["num_hash_layers"])
    for i in range(c["num_nextn_predict_layers"]):
        prefix = f"mtp.{i}."
        for norm in ("enorm", "hnorm", "norm"):
            yield Tensor(f"{prefix}{norm}.weight", (hidden,), "bf16")
        for proj in ("e_proj", "h_proj"):
            yield Tensor(f"{prefix}{proj}.weight", (hidden, hidden), "fp8")
        yield from _site(prefix, "head", STREAMS, hidden)
        yield from _layer(c, prefix, ratios[c["num_hidden_layers"] + i], False)
    yield Tensor("norm.weight", (hidden,), "bf16")
    yield from _site("", "head", STREAMS, hidden)
    yield Tensor("head.weight", (c["vocab_size"], hidden), "bf16")


def num_bytes(c: dict[str, Any]) -> int:
    """Bytes of all tensors in the quantised format (file headers left out)."""
    return sum(t.num_bytes for t in tensors(c))


def shape_faults(c: dict[str, Any], ranks: int = TP_RANKS) -> list[str]:
    """What keeps configuration `c` from running on `ranks` tensor-parallel ranks and the GPU
    kernels.

    Returns one sentence per fault; an empty list means that the shape fits. Split at TP: heads,
    whole output groups, the inner width of every expert, vocabulary rows; every FP8 dimension of a
    rank must be a multiple of 128 and every FP4 K of a rank a multiple of 32."""
    faults: list[str] = []

    def need(ok: bool, sentence: str) -> None:
        if not ok:
            faults.append(sentence)

    for field, value in (
        ("head_dim", 512),
        ("qk_rope_head_dim", 64),
        ("index_head_dim", 128),
        ("sliding_window", 128),
        ("hc_mult", STREAMS),
        ("num_key_value_heads", 1),
    ):
        need(c[field] == value, f"{field} is {c[field]}, the kernels are built for {value}")
    need(set(c["compress_ratios"]) == {0, 4, 128}, "compress_ratios must hold 0, 4 and 128")
    need(
        len(c["compress_ratios"]) == c["num_hidden_layers"] + c["num_nextn_predict_layers"],
        "compress_ratios needs one entry per layer and one for MTP",
    )
    need(c["compress_ratios"][-1] == 0, "the MTP layer has ratio 0")
    for field in ("num_attention_heads", "o_groups", "vocab_size"):
        need(c[field] % ranks == 0, f"{field} {c[field]} does not divide over {ranks} ranks")
    need(c["num_attention_heads"] % c["o_groups"] == 0, "heads do not divide into o_groups")
    need(c["o_groups"] >= ranks, "a rank needs at least one whole output group")
    if faults:
        return faults
    for t in tensors(c):
        if t.storage not in ("fp8", "fp4"):
            continue
        rows, cols = t.shape
        if ".experts." in t.name or ".shared_experts." in t.name:
            rows, cols = (rows, cols // ranks) if ".w2." in t.name else (rows // ranks, cols)
        elif t.name.endswith((".attn.wq_b.weight", ".attn.wo_a.weight")):
            rows //= ranks
        elif t.name.endswith(".attn.wo_b.weight"):
            cols //= ranks
        if t.storage == "fp8":
            need(
                rows % FP8_BLOCK == 0 and cols % FP8_BLOCK == 0,
                f"{t.name}: [{rows}, {cols}] a rank is not a multiple of {FP8_BLOCK}",
            )
        else:
            need(
                cols % FP4_GROUP == 0, f"{t.name}: K {cols} a rank is not a multiple of {FP4_GROUP}"
            )
    need(num_bytes(c) <= MAX_BYTES, f"{num_bytes(c)} bytes are more than {MAX_BYTES}")
    return faults


def check_shape(c: dict[str, Any], ranks: int = TP_RANKS) -> None:
    """Raises ValueError with every fault of `shape_faults`."""
    faults = shape_faults(c, ranks)
    if faults:
        raise ValueError("; ".join(faults))

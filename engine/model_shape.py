"""One description of the model: the constants of config.json, checked once. Nothing about files,
memory or devices.

Names are those of the published config.json. What decant does not serve (the 0731 drafter, V4.1,
other architectures) is refused here with one sentence.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decant.protocol.errors import CheckpointError

RATIOS = (0, 4, 128)  # window only, CSA, HCA
NUM_SHARDS = 4  # row-parallel linears add this many K-shards in order, at every TP size
WINDOW_SLACK = 16  # ring rows beyond the window: rollback of drafts, and shared keys of 16 queries


@dataclass(frozen=True)
class Yarn:
    """Long-context scaling of the compressed layers' rotary frequencies."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class ModelShape:
    """Everything that the engine needs to know of a DeepSeek-V4 model."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]  # one per trunk layer
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    num_hash_layers: int
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn | None
    max_position_embeddings: int
    num_nextn_predict_layers: int
    bos_token_id: int
    eos_token_id: int

    @property
    def window_rows(self) -> int:
        """Rows of a window ring. Position p lives in row p % window_rows, which is also its column
        in the softmax, so this number belongs to the model and not to a deployment."""
        return -(-(self.sliding_window + WINDOW_SLACK) // 16) * 16

    @property
    def has_mtp(self) -> bool:
        return self.num_nextn_predict_layers == 1

    def layers_with(self, ratio: int) -> list[int]:
        return [i for i, r in enumerate(self.compress_ratios) if r == ratio]

    def check_tp(self, tp: int, quantise: bool = False) -> None:
        """Raises: CheckpointError if the model cannot be split over ``tp`` ranks."""
        for name, value in (
            ("num_attention_heads", self.num_attention_heads),
            ("o_groups", self.o_groups),
            ("moe_intermediate_size", self.moe_intermediate_size),
            ("vocab_size", self.vocab_size),
        ):
            if value % tp:
                raise CheckpointError(f"{name} {value} cannot be split over {tp} ranks")
        for name, value in (
            ("o_groups x o_lora_rank", self.o_groups * self.o_lora_rank),
            ("moe_intermediate_size", self.moe_intermediate_size),
        ):
            if num_shards(value) % tp:
                raise CheckpointError(f"{name} {value} has too few shards for {tp} ranks")
            if quantise and tp > 1 and (value // tp) % 128:
                raise CheckpointError(
                    f"quantise_activations needs {name} / tp to be a multiple of 128"
                )
        if quantise:
            for name, value in (
                ("hidden_size", self.hidden_size),
                ("q_lora_rank", self.q_lora_rank),
                ("moe_intermediate_size", self.moe_intermediate_size),
                ("o_groups x o_lora_rank", self.o_groups * self.o_lora_rank),
            ):
                if value % 128:
                    raise CheckpointError(f"quantise_activations needs {name} % 128 == 0: {value}")
            if (self.head_dim - self.qk_rope_head_dim) % 64:
                raise CheckpointError("quantise_activations needs groups of 64 plain channels")


def num_shards(width: int) -> int:
    """How many K-shards a row-parallel linear of this input width has."""
    return math.gcd(NUM_SHARDS, width)


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a checkpoint folder. Raises: CheckpointError."""
    path = Path(folder) / "config.json"
    try:
        table = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"no config.json in the model folder {folder}: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return table


def _whole(table: dict[str, Any], name: str, low: int = 1) -> int:
    value = table.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise CheckpointError(f"config.json: {name} is {value!r}, expected an integer >= {low}")
    return value


def _real(table: dict[str, Any], name: str) -> float:
    value = table.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(f"config.json: {name} is {value!r}, expected a positive number")
    return float(value)


def _refuse_other_members(table: dict[str, Any]) -> None:
    """Section 1.4: which member of the family is this?"""
    kind = table.get("model_type")
    if kind == "deepseek_v41":
        raise CheckpointError("this is DeepSeek-V4.1, which decant does not serve")
    if kind != "deepseek_v4":
        raise CheckpointError(f"model_type is {kind!r}; decant serves deepseek_v4 only")
    for name in table:
        if name.startswith("dspark_"):
            raise CheckpointError(
                f"{name} in config.json: this is V4-Flash-0731 with the DSpark drafter, "
                "which decant does not serve"
            )
    fixed = {
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    for name, value in fixed.items():
        if table.get(name, value) != value:
            raise CheckpointError(f"config.json: {name} is {table[name]!r}, not {value!r}")
    quantization = table.get("quantization_config") or {}
    if quantization.get("quant_method", "fp8") != "fp8":
        raise CheckpointError(
            f"quant_method {quantization['quant_method']!r} is not served: only fp8 (with FP4 or "
            "NVFP4 experts) and unquantised checkpoints are"
        )


def _yarn(table: dict[str, Any]) -> Yarn | None:
    scaling = table.get("rope_scaling")
    if scaling is None:
        return None
    kind = scaling.get("type", scaling.get("rope_type"))
    if kind != "yarn":
        raise CheckpointError(f"config.json: rope_scaling type {kind!r} is not yarn")
    return Yarn(
        _real(scaling, "factor"),
        _whole(scaling, "original_max_position_embeddings"),
        _real(scaling, "beta_fast"),
        _real(scaling, "beta_slow"),
    )


def parse_shape(table: dict[str, Any]) -> ModelShape:
    """The shape from config.json's fields. Raises: CheckpointError."""
    _refuse_other_members(table)
    layers = _whole(table, "num_hidden_layers")
    nextn = _whole({"num_nextn_predict_layers": 0, **table}, "num_nextn_predict_layers", 0)
    if nextn > 1:
        raise CheckpointError(f"num_nextn_predict_layers is {nextn}; decant serves 0 or 1")
    ratios = table.get("compress_ratios")
    if not isinstance(ratios, list) or len(ratios) not in (layers, layers + nextn):
        count = len(ratios) if isinstance(ratios, list) else "no"
        raise CheckpointError(
            f"config.json: {count} compress_ratios for {layers} layers and {nextn} MTP layer; "
            "46 of them would be V4-Flash-0731, which decant does not serve"
        )
    for i, ratio in enumerate(ratios):
        if ratio not in RATIOS:
            raise CheckpointError(f"config.json: compress_ratios[{i}] is {ratio!r}, not 0, 4, 128")
    if len(ratios) > layers and ratios[layers] != 0:
        raise CheckpointError("config.json: the MTP layer's compress ratio is not 0")
    eos = table.get("eos_token_id", 1)
    shape = ModelShape(
        vocab_size=_whole(table, "vocab_size"),
        hidden_size=_whole(table, "hidden_size"),
        num_hidden_layers=layers,
        num_attention_heads=_whole(table, "num_attention_heads"),
        head_dim=_whole(table, "head_dim"),
        qk_rope_head_dim=_whole(table, "qk_rope_head_dim"),
        q_lora_rank=_whole(table, "q_lora_rank"),
        o_groups=_whole(table, "o_groups"),
        o_lora_rank=_whole(table, "o_lora_rank"),
        sliding_window=_whole(table, "sliding_window"),
        compress_ratios=tuple(ratios[:layers]),
        index_n_heads=_whole(table, "index_n_heads"),
        index_head_dim=_whole(table, "index_head_dim"),
        index_topk=_whole(table, "index_topk"),
        n_routed_experts=_whole(table, "n_routed_experts"),
        num_experts_per_tok=_whole(table, "num_experts_per_tok"),
        moe_intermediate_size=_whole(table, "moe_intermediate_size"),
        routed_scaling_factor=_real(table, "routed_scaling_factor"),
        num_hash_layers=_whole(table, "num_hash_layers", 0),
        swiglu_limit=_real(table, "swiglu_limit"),
        hc_mult=_whole(table, "hc_mult"),
        hc_sinkhorn_iters=_whole(table, "hc_sinkhorn_iters"),
        hc_eps=_real(table, "hc_eps"),
        rms_norm_eps=_real(table, "rms_norm_eps"),
        rope_theta=_real(table, "rope_theta"),
        compress_rope_theta=_real(table, "compress_rope_theta"),
        yarn=_yarn(table),
        max_position_embeddings=_whole(table, "max_position_embeddings"),
        num_nextn_predict_layers=nextn,
        bos_token_id=_whole({"bos_token_id": 0, **table}, "bos_token_id", 0),
        eos_token_id=eos[0] if isinstance(eos, list) and eos else int(eos),
    )
    _check_consistent(shape)
    return shape


def _check_consistent(shape: ModelShape) -> None:
    rules = (
        (shape.num_attention_heads % shape.o_groups == 0, "o_groups does not divide the heads"),
        (shape.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim is odd"),
        (shape.qk_rope_head_dim < shape.head_dim, "qk_rope_head_dim is not below head_dim"),
        (
            4 not in shape.compress_ratios
            or shape.index_head_dim >= shape.qk_rope_head_dim
            and shape.index_head_dim & (shape.index_head_dim - 1) == 0,
            "index_head_dim is not a power of two of at least qk_rope_head_dim",
        ),
        (
            shape.num_experts_per_tok <= shape.n_routed_experts,
            "num_experts_per_tok exceeds n_routed_experts",
        ),
        (shape.num_hash_layers <= shape.num_hidden_layers, "num_hash_layers exceeds the layers"),
        (shape.hc_mult == 4, "hc_mult is not 4"),
    )
    for ok, text in rules:
        if not ok:
            raise CheckpointError(f"config.json: {text}")

"""The trunk against Hugging Face transformers' deepseek_v4 on random tiny models in the published
names: whole prefill and decode. (It has no MTP layer and no quantisation.)"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from decant.engine.checkpoint import expected_tensors
from decant.engine.interface import PrefillChunk, SlotRows, StepPlan
from decant.engine.model_shape import parse_shape

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

BOUND = 1e-4  # logits, float32 on both sides


def random_config(seed: int) -> dict[str, Any]:
    """Ratios 0, 4 and 128 in random order; index_topk above the number of entries, because ties
    among equal scores are broken differently."""
    r = np.random.default_rng(seed)
    groups = int(r.choice([1, 2, 4]))
    ratios = [int(x) for x in r.permutation([0, 4, 128, 4])]
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": 160,
        "hidden_size": int(r.choice([64, 96])),
        "moe_intermediate_size": int(r.choice([32, 48])),
        "num_hidden_layers": len(ratios),
        "num_attention_heads": groups * int(r.choice([1, 2, 4])),
        "num_key_value_heads": 1,
        "head_dim": int(r.choice([64, 128])),
        "qk_rope_head_dim": int(r.choice([16, 32])),
        "q_lora_rank": int(r.choice([32, 64])),
        "o_groups": groups,
        "o_lora_rank": int(r.choice([32, 64])),
        "sliding_window": int(r.choice([8, 16, 33])),
        "compress_ratios": [*ratios, 0],
        "index_n_heads": int(r.choice([2, 4])),
        "index_head_dim": 32,
        "index_topk": 128,
        "n_routed_experts": int(r.choice([6, 8])),
        "n_shared_experts": 1,
        "num_experts_per_tok": int(r.choice([2, 3])),
        "num_hash_layers": int(r.choice([1, 2])),
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": float(r.choice([1.5, 2.5])),
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "max_position_embeddings": 1024,
        "num_nextn_predict_layers": 1,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "float32",
    }


def write_model(folder: Path, seed: int) -> None:
    """A random model in the published names, float32; every parameter matters."""
    config = random_config(seed)
    shape = parse_shape(config)
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    for want in expected_tensors(shape):
        if want.kind == "i64":
            rows = [
                torch.randperm(shape.n_routed_experts, generator=g)[: want.shape[1]]
                for _ in range(want.shape[0])
            ]
            tensors[want.name] = torch.stack(rows)
            continue
        x = torch.randn(want.shape, generator=g)
        if len(want.shape) == 2 and not want.name.endswith(("ape", "embed.weight")):
            x *= (2.0 if ".experts." in want.name else 1.0) * want.shape[1] ** -0.5
        elif want.name.endswith(("norm.weight", "_scale")):
            x = 1 + 0.2 * x
        tensors[want.name] = x
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_same_logits(seed: int, tmp_path: Path, make_engine) -> None:  # type: ignore[no-untyped-def]
    write_model(tmp_path, seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    engine = make_engine(tmp_path, slots=1, pages=3)
    ids = np.random.default_rng(seed).integers(0, engine.vocab_size, 290).astype(np.int32)
    with torch.no_grad():
        wanted = model(torch.from_numpy(ids)[None].long()).logits[0].numpy()
    begin, worst = 270, 0.0
    for at in range(0, begin, 90):
        chunk = PrefillChunk(0, at, ids[at : at + 90], (0, 1, 2))
        engine.step(StepPlan(0, (), chunk))
        gap = np.abs(engine.head([0])[0] - wanted[at + 89]).max()
        worst = max(worst, float(gap))
    for at in range(begin, len(ids), 4):
        rows = SlotRows(0, at, tuple(int(t) for t in ids[at : at + 4]), (0, 1, 2))
        logits = engine.step(StepPlan(0, (rows,))).logits
        worst = max(worst, float(np.abs(logits - wanted[at : at + 4]).max()))
    assert worst < BOUND
    assert wanted.std() > 0.1

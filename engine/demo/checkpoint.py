"""Checkpoint folders of the demo model: published names, plain or quantised, one or more shards.

Two kinds of folder: *plain* (BF16 matrices, what training resumes from) and *quantised* (the
published format: what ships). Both carry config.json.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from decant.engine.demo import quantise
from decant.engine.demo.network import Model
from decant.engine.demo.shape import QUANTISED, tensors

STACKED = ("w1", "w2", "w3")
FP32_LEAVES = ("ape", "attn_sink", "bias")
FP8_LEAVES = ("wq_a", "wq_b", "wo_a", "wo_b", "e_proj", "h_proj")


def published(model: nn.Module) -> dict[str, Tensor]:
    """State of `model` on the CPU in published names, one tensor per expert, fp32 as trained."""
    out: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        v = value.detach().cpu()
        leaf = name.rsplit(".", 1)[-1]
        if leaf in STACKED:
            base = name[:-3]
            for e in range(v.shape[0] - 1):
                out[f"{base}.experts.{e}.{leaf}.weight"] = v[e].clone()
            out[f"{base}.shared_experts.{leaf}.weight"] = v[-1].clone()
        else:
            out[name] = v.contiguous()
    return out


def load_published(model: Model, state: dict[str, Tensor]) -> Model:
    """Fills `model` from tensors in published names; KeyError if one is missing."""
    filled: dict[str, Tensor] = {}
    for name, v in model.state_dict().items():
        leaf = name.rsplit(".", 1)[-1]
        if leaf in STACKED:
            base = name[:-3]
            parts = [state[f"{base}.experts.{e}.{leaf}.weight"] for e in range(v.shape[0] - 1)]
            parts.append(state[f"{base}.shared_experts.{leaf}.weight"])
            filled[name] = torch.stack([p.float() for p in parts])
        else:
            filled[name] = state[name]
    model.load_state_dict(filled)
    return model


def plain(state: dict[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Matrices and norms in `dtype`, fp32 where the published checkpoint has fp32."""
    out = {}
    for name, v in state.items():
        leaf = name.rsplit(".", 1)[-1]
        keep = not v.dtype.is_floating_point or leaf in FP32_LEAVES or leaf.startswith("hc_")
        out[name] = v if keep else v.to(dtype)
    return out


def quantised(config: dict[str, Any], state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The published quantised format of `state` (published names).

    Raises: ValueError where names or shapes differ from what `config` asks for."""
    out: dict[str, Tensor] = {}
    expected = {t.name: t for t in tensors(config)}
    if state.keys() != expected.keys():
        odd = sorted(state.keys() ^ expected.keys())
        raise ValueError(f"tensors that are missing or not expected: {odd[:5]}")
    for name, t in expected.items():
        v = state[name]
        if tuple(v.shape) != t.shape:
            raise ValueError(f"{name}: shape {tuple(v.shape)}, expected {t.shape}")
        scale = name.removesuffix(".weight") + ".scale"
        if t.storage == "fp8":
            out[name], out[scale] = quantise.pack_fp8(v)
        elif t.storage == "fp4":
            out[name], out[scale] = quantise.pack_fp4(v)
        else:
            kind = {"bf16": torch.bfloat16, "f32": torch.float32, "i64": torch.int64}[t.storage]
            out[name] = v.to(kind).contiguous()
    return out


def dequantised(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values of a quantised or plain checkpoint, scales folded in."""
    out = {}
    for name, v in state.items():
        if name.endswith(".scale"):
            continue
        scale = state.get(name.removesuffix(".weight") + ".scale")
        if scale is None:
            out[name] = v
        elif v.dtype == torch.int8:
            out[name] = quantise.unpack_fp4(v, scale)
        else:
            out[name] = quantise.unpack_fp8(v, scale)
    return out


@torch.no_grad()
def rounded(name: str, v: Tensor) -> Tensor | None:
    """The value that parameter `name` of a `Model` (experts stacked; any leading dimensions) has in
    the quantised file, or None where the file keeps it as it is but for BF16."""
    leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if leaf in STACKED:
        routed, shared = v[..., :-1, :, :], v[..., -1:, :, :]
        return torch.cat([quantise.fake_fp4(routed), quantise.fake_fp8(shared)], -3)
    if leaf in FP8_LEAVES or (leaf == "wkv" and "compressor" not in name):
        return quantise.fake_fp8(v)
    return None


def read_state(path: Path) -> dict[str, Tensor]:
    """All safetensors shards of a folder, values in published names (dequantised where needed)."""
    state: dict[str, Tensor] = {}
    for f in sorted(path.glob("model*.safetensors")):
        state.update(load_file(f))
    if not state:
        raise FileNotFoundError(f"no model*.safetensors in {path}")
    return dequantised(state)


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a folder."""
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    return config


def load(path: Path) -> Model:
    """The model of a folder, quantised or plain, on the CPU."""
    return load_published(Model(read_config(path)), read_state(path))


def write(path: Path, config: dict[str, Any], state: dict[str, Tensor], limit: int) -> None:
    """config.json and model shards of at most `limit` bytes each, named as published checkpoints
    are."""
    path.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, v in state.items():
        n = v.numel() * v.element_size()
        if size + n > limit and parts[-1]:
            parts.append({})
            size = 0
        parts[-1][name] = v
        size += n
    for old in path.glob("model*.safetensors*"):
        old.unlink()
    weight_map = {}
    for i, part in enumerate(parts):
        name = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        name = name if len(parts) > 1 else "model.safetensors"
        save_file(part, path / name, metadata={"format": "pt"})
        (path / name).chmod(0o644)
        weight_map.update(dict.fromkeys(part, name))
    if len(parts) > 1:
        total = sum(v.numel() * v.element_size() for v in state.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def write_plain(path: Path, model: Model, limit: int = 15 << 20) -> None:
    """The resumable folder of a model."""
    write(path, vars(model.c), plain(published(model)), limit)


def write_quantised(path: Path, config: dict[str, Any], state: dict[str, Tensor]) -> None:
    """The shipped folder's config.json and weights (one file)."""
    base = {k: v for k, v in config.items() if k not in QUANTISED}
    write(path, {**base, **QUANTISED}, quantised(base, state), 1 << 40)

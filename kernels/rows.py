"""Key rows in plain torch: quantise, write into a part, read back. The reference for every kernel
that touches pages.
"""

import torch

from decant.kernels.layout import (
    DATA_BYTES,
    KEY_CHANNELS,
    NOPE_CHANNELS,
    SCALE_GROUP,
    Part,
)


def quantise_keys_ref(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """keys [n, 512] -> data uint8 [n, 576] and scales uint8 [n, 8] (E8M0; groups of 64; the eighth
    byte is 0).

    Scale 2^ceil(log2(max(amax, 1e-4) / 448)); values divided, clamped to +-448, rounded to nearest
    even.
    """
    nope = keys[:, :NOPE_CHANNELS].float().unflatten(-1, (-1, SCALE_GROUP))
    amax = nope.abs().amax(-1).clamp_min(1e-4)
    mantissa, exponent = torch.frexp(amax * (1.0 / 448.0))
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    scaled = torch.ldexp(nope, -exponent[..., None]).clamp(-448.0, 448.0)
    codes = scaled.to(torch.float8_e4m3fn).flatten(-2).view(torch.uint8)
    rope = keys[:, NOPE_CHANNELS:].to(torch.bfloat16).contiguous().view(torch.uint8)
    scales = torch.zeros(keys.shape[0], 8, dtype=torch.uint8, device=keys.device)
    scales[:, :7] = (exponent + 127).to(torch.uint8)
    return torch.cat((codes, rope), dim=-1), scales


def dequantise_keys_ref(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """data uint8 [n, 576], scales uint8 [n, 8] -> fp32 [n, 512]."""
    codes = data[:, :NOPE_CHANNELS].contiguous().view(torch.float8_e4m3fn).float()
    factor = torch.exp2(scales[:, :7].float() - 127.0)
    nope = (codes.unflatten(-1, (-1, SCALE_GROUP)) * factor[..., None]).flatten(-2)
    rope = data[:, NOPE_CHANNELS:].contiguous().view(torch.bfloat16).float()
    return torch.cat((nope, rope), dim=-1)


def write_rows(
    extent: torch.Tensor, part: Part, row: int, data: torch.Tensor, scale: torch.Tensor
) -> None:
    """Write one row (data bytes and scale bytes, uint8) into ``part`` of one page or slot extent
    (uint8 [stride]).
    """
    start = part.offset + row * part.data_bytes
    extent[start : start + part.data_bytes] = data
    start = part.scale_offset + row * part.scale_bytes
    extent[start : start + part.scale_bytes] = scale


def read_rows(extent: torch.Tensor, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows of a part: (data uint8 [rows, data bytes], scales uint8 [rows, scale bytes])."""
    data = extent[part.offset : part.scale_offset].view(part.rows, part.data_bytes)
    end = part.scale_offset + part.rows * part.scale_bytes
    return data, extent[part.scale_offset : end].view(part.rows, part.scale_bytes)


def random_keys(n: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Keys of realistic size, each 64-channel group with its own magnitude. fp32 [n, 512]."""
    keys = torch.randn(n, KEY_CHANNELS, generator=generator)
    magnitude = torch.exp2(torch.randint(-3, 3, (n, 8), generator=generator).float())
    return keys * magnitude.repeat_interleave(64, -1)


def poison(extents: torch.Tensor) -> None:
    """Fill uint8 extents with 0xFF: NaN as e4m3, bf16, E8M0 and fp32."""
    extents.fill_(0xFF)


__all__ = [
    "DATA_BYTES",
    "dequantise_keys_ref",
    "poison",
    "quantise_keys_ref",
    "random_keys",
    "read_rows",
    "write_rows",
]

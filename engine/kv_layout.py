"""Layout of the paged hybrid KV: what lies where in a page and in a slot. Plain Python, no torch.

A page covers ``page_tokens`` positions of one sequence for all layers (page-major, one contiguous
extent). A slot holds what does not grow: window rings, compressor state rings, the MTP window ring
and the streams of the last position. Ring rows are addressed by absolute position, so forgetting
rejected drafts is only a smaller length. On the CPU every row is float32.

Every part can be seen as a matrix of its own row width over the whole pool, because page and slot
strides are multiples of all row widths: row r of page p is row ``p * (page_stride / width) + r`` of
the matrix that starts at the part's offset.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass

from decant.engine.model_shape import ModelShape
from decant.protocol.errors import ConfigError

ALIGN_BYTES = 2304  # parts and page stride: a multiple of 576 and 256
CSA_STATE_ROWS = 16
HCA_STATE_ROWS = 256
MAX_STRIDE_BYTES = 1 << 31


@dataclass(frozen=True)
class Part:
    """Rows of one kind and layer within a page or slot. offset and width in float32 elements."""

    name: str
    layer: int  # -1: not of a trunk layer
    rows: int
    width: int
    offset: int


@dataclass(frozen=True)
class LiveRows:
    """Rows that hold data: positions (or entries) first .. first + count - 1 of a part; row number
    = position modulo ``part.rows``."""

    part: Part
    first: int
    count: int


class KVLayout:
    """Parts, strides and live rows for one model and page size.

    Attributes: page_parts, slot_parts (by (name, layer)), page_stride, slot_stride (float32
    elements), hash. Raises: ConfigError."""

    def __init__(self, shape: ModelShape, page_tokens: int) -> None:
        if page_tokens <= 0 or page_tokens % 128:
            raise ConfigError(f"page_tokens {page_tokens} is not a multiple of 128")
        self.shape, self.page_tokens = shape, page_tokens
        dim, index = shape.head_dim, shape.index_head_dim
        page: list[tuple[str, int, int, int]] = []
        slot: list[tuple[str, int, int, int]] = []
        for layer, ratio in enumerate(shape.compress_ratios):
            slot.append(("window", layer, shape.window_rows, dim))
            if ratio == 4:
                page.append(("csa", layer, page_tokens // 4, dim))
                page.append(("index", layer, page_tokens // 4, index))
                slot.append(("csa_state", layer, CSA_STATE_ROWS, 4 * dim))  # c (2 dim), s (2 dim)
                slot.append(("index_state", layer, CSA_STATE_ROWS, 4 * index))
            elif ratio == 128:
                page.append(("hca", layer, page_tokens // 128, dim))
                slot.append(("hca_state", layer, HCA_STATE_ROWS, 2 * dim))  # c, s
        if shape.has_mtp:
            slot.append(("mtp_window", -1, shape.window_rows, dim))
        slot.append(("streams", -1, 1, shape.hc_mult * shape.hidden_size))
        self.page_parts, self.page_stride = _place(page, ALIGN_BYTES // 4)
        self.slot_parts, self.slot_stride = _place(slot, 1)
        for what, stride in (("page", self.page_stride), ("slot", self.slot_stride)):
            if stride * 4 > MAX_STRIDE_BYTES:
                raise ConfigError(f"a {what} would take {stride * 4} bytes")
        described = [
            "float32",
            page_tokens,
            shape.sliding_window,
            self.page_stride,
            self.slot_stride,
            [vars(p) for p in (*self.page_parts.values(), *self.slot_parts.values())],
        ]
        self.hash = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]

    @property
    def page_bytes(self) -> int:
        return self.page_stride * 4

    @property
    def slot_bytes(self) -> int:
        return self.slot_stride * 4

    def live_in_page(self, num_tokens: int) -> list[LiveRows]:
        """Entries of complete windows in a page whose first ``num_tokens`` positions are live."""
        num_tokens = min(num_tokens, self.page_tokens)
        ratio = {"csa": 4, "index": 4, "hca": 128}
        return [LiveRows(p, 0, num_tokens // ratio[p.name]) for p in self.page_parts.values()]

    def live_in_slot(self, num_tokens: int) -> list[LiveRows]:
        """What a sequence of ``num_tokens`` processed tokens needs.

        The MTP key of the last position is not in it: it waits for the next token."""
        total, window = num_tokens, self.shape.sliding_window
        csa = max(0, total - total % 4 - 4)
        first = {
            "window": max(0, total - window),
            "csa_state": csa,
            "index_state": csa,
            "hca_state": total - total % 128,
            "mtp_window": max(0, total - 1 - window),
            "streams": 0,
        }
        live = []
        for part in self.slot_parts.values():
            if part.name == "streams":
                count = min(total, 1)
            elif part.name == "mtp_window":
                count = max(0, total - 1) - first["mtp_window"]
            else:
                count = total - first[part.name]
            live.append(LiveRows(part, first[part.name], count))
        return live


def _place(
    rows: list[tuple[str, int, int, int]], align: int
) -> tuple[dict[tuple[str, int], Part], int]:
    parts, offset, stride_unit = {}, 0, align
    for name, layer, count, width in rows:
        parts[name, layer] = Part(name, layer, count, width, offset)
        offset += -(-count * width // align) * align
        stride_unit = math.lcm(stride_unit, width)
    return parts, max(1, -(-offset // stride_unit)) * stride_unit

"""What lies where in a page and a slot of the GPU pool: the byte layout of ``kernels/layout.py``
plus residual streams: of the last position, and of the last few in a ring by position, from
which draft ranks read those of the verified rows. Plain Python and numpy, no torch.

Key rows are FP8 (584 bytes), compressor states float32, streams bf16. Ring rows are addressed by
absolute position, as on the CPU. Copies move whole extents (source and target have the same
layout); which rows are *live*, and so enter the checksums, depends on the number of tokens.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decant.engine.model_shape import ModelShape
from decant.kernels import layout as bytes_of
from decant.kernels.layout import Part, page_layout, slot_layout
from decant.protocol.errors import ConfigError

Bools = NDArray[np.bool_]
RECENT_ROWS = 8  # positions whose streams a slot keeps; 1 + max_drafts at least


@dataclass(frozen=True)
class RowGroup:
    """Rows of one part in an extent, numbered from ``first`` among the extent's rows."""

    name: str
    part: Part
    first: int


def check_shape(shape: ModelShape) -> None:
    """Raises: ConfigError unless the model has the row widths that the page format fixes."""
    fixed = {
        "head_dim": (shape.head_dim, bytes_of.KEY_CHANNELS),
        "qk_rope_head_dim": (shape.qk_rope_head_dim, bytes_of.ROPE_CHANNELS),
        "sliding_window": (shape.sliding_window, bytes_of.WINDOW),
    }
    if 4 in shape.compress_ratios:
        fixed["index_head_dim"] = (shape.index_head_dim, bytes_of.INDEX_CHANNELS)
    for name, (value, wanted) in fixed.items():
        if value != wanted:
            raise ConfigError(f"the GPU engine needs {name} {wanted}, the model has {value}")
    if shape.hidden_size % 128:
        raise ConfigError(f"hidden_size {shape.hidden_size} is not a multiple of 128")


class GpuLayout:
    """Parts, strides and live rows for one model, page size and number of drafts.

    Attributes: pages, slots (kernels/layout.py); streams, recent: Parts of a slot; page_bytes,
    slot_bytes; hash. Raises: ConfigError."""

    def __init__(self, shape: ModelShape, page_tokens: int, max_drafts: int) -> None:
        check_shape(shape)
        self.shape, self.page_tokens, self.max_drafts = shape, page_tokens, max_drafts
        try:
            self.pages = page_layout(shape.compress_ratios, page_tokens)
            self.slots = slot_layout(shape.compress_ratios, max_drafts, shape.has_mtp)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.streams = Part(self.slots.stride, 1, shape.hc_mult * shape.hidden_size * 2, 0)
        if max_drafts >= RECENT_ROWS:
            raise ConfigError(f"max_drafts {max_drafts} is not below {RECENT_ROWS}")
        after = self.slots.stride + self.streams.size
        self.recent = Part(after, RECENT_ROWS, self.streams.data_bytes, 0)
        self.page_bytes = self.pages.stride
        self.slot_bytes = after + self.recent.size
        self.mtp_layer = shape.num_hidden_layers
        page: list[tuple[str, Part]] = []
        for layer, ratio in enumerate(shape.compress_ratios):
            if ratio:
                page.append(("csa" if ratio == 4 else "hca", self.pages.keys[layer]))
            if ratio == 4:
                page.append(("index", self.pages.index[layer]))
        slot: list[tuple[str, Part]] = []
        for layer, window in self.slots.window.items():
            slot.append(("mtp_window" if layer == self.mtp_layer else "window", window))
        for layer, state in self.slots.state.items():
            slot.append((f"state{shape.compress_ratios[layer]}", state))
        slot.extend(("state4", state) for state in self.slots.index_state.values())
        slot.append(("streams", self.streams))
        slot.append(("recent", self.recent))
        self.page_groups, self.num_page_rows = _number(page)
        self.slot_groups, self.num_slot_rows = _number(slot)
        described = [
            "fp8-584",
            page_tokens,
            max_drafts,
            [(g.name, vars(g.part)) for g in (*self.page_groups, *self.slot_groups)],
            self.page_bytes,
            self.slot_bytes,
        ]
        self.hash = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]

    def live_page_rows(self, num_tokens: int) -> Bools:
        """[num_page_rows]: entries of complete windows among the page's first tokens."""
        ratio = {"csa": 4, "index": 4, "hca": 128}
        live = np.zeros(self.num_page_rows, np.bool_)
        for g in self.page_groups:
            live[g.first : g.first + min(num_tokens, self.page_tokens) // ratio[g.name]] = True
        return live

    def live_slot_rows(self, num_tokens: int) -> Bools:
        """[num_slot_rows]: what a sequence of ``num_tokens`` processed tokens needs.
        The MTP key of the last position waits for the next token."""
        total = num_tokens
        spans = {
            "window": (max(0, total - bytes_of.WINDOW), total),
            "state4": (max(0, total - total % 4 - 4), total),
            "state128": (total - total % 128, total),
            "mtp_window": (max(0, total - 1 - bytes_of.WINDOW), max(0, total - 1)),
            "streams": (0, min(total, 1)),
            "recent": (max(0, total - 1), total),
        }
        live = np.zeros(self.num_slot_rows, np.bool_)
        for g in self.slot_groups:
            first, end = spans[g.name]
            live[g.first + np.arange(first, end) % g.part.rows] = True
        return live

    def word_rows(self, groups: list[RowGroup], extent_bytes: int) -> NDArray[np.int32]:
        """[extent_bytes / 4]: the row that each 32-bit word belongs to; -1 for padding."""
        words = np.full(extent_bytes // 4, -1, np.int32)
        for g in groups:
            number = np.arange(g.first, g.first + g.part.rows, dtype=np.int32)
            for offset, width in (
                (g.part.offset, g.part.data_bytes),
                (g.part.scale_offset, g.part.scale_bytes),
            ):
                at = offset // 4
                count = g.part.rows * width // 4
                words[at : at + count] = np.repeat(number, width // 4)
        return words


def _number(parts: list[tuple[str, Part]]) -> tuple[list[RowGroup], int]:
    groups, first = [], 0
    for name, part in parts:
        groups.append(RowGroup(name, part, first))
        first += part.rows
    return groups, first

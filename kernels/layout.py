"""Byte layout of KV pages and slot extents on the GPU.

Page: ``[layer part][layer part]...``, one contiguous extent for all layers; each part starts at a
multiple of 2,304 bytes (576 and 256 both divide it), and so does the page. A key row is 584 bytes:
448 e4m3 channels and 64 bf16 rope channels (576 bytes of data), and 8 bytes of E8M0 scales (7
used). Inside a part all data rows come first, then all scale rows.

    CSA part      page_tokens / 4 rows of 576, then of 8 bytes
    indexer part  page_tokens / 4 rows of 128 e4m3, then of one fp32 scale
    HCA part      page_tokens / 128 rows of 576, then of 8 bytes

Slot extent: per layer the window ring (position p in row p mod ring) with the same row split, then
the compressor state rings (position p in row p mod 16 or 256; fp32, values c then scores s).
"""

from dataclasses import dataclass

KEY_CHANNELS = 512
NOPE_CHANNELS = 448
ROPE_CHANNELS = 64
SCALE_GROUP = 64
DATA_BYTES = 576
SCALE_BYTES = 8
ROW_BYTES = DATA_BYTES + SCALE_BYTES
INDEX_CHANNELS = 128
INDEX_SCALE_BYTES = 4
ALIGNMENT = 2304
WINDOW = 128
CSA_RATIO = 4
HCA_RATIO = 128
CSA_STATE_ROWS = 16
HCA_STATE_ROWS = 256


def align(size: int) -> int:
    """Round up to the alignment of parts and pages."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Part:
    """One layer's rows inside a page or a slot extent: byte offset of the first data row, number
    of rows.
    """

    offset: int
    rows: int
    data_bytes: int
    scale_bytes: int

    @property
    def scale_offset(self) -> int:
        """Byte offset of the first scale row."""
        return self.offset + self.rows * self.data_bytes

    @property
    def size(self) -> int:
        """Bytes with padding."""
        return align(self.rows * (self.data_bytes + self.scale_bytes))


@dataclass(frozen=True)
class PageLayout:
    """Where each layer's rows are in a page.

    ratios: per layer 0 (window only), 4 (CSA) or 128 (HCA). keys and index map a layer number to
    its Part.
    """

    page_tokens: int
    ratios: tuple[int, ...]
    keys: dict[int, Part]
    index: dict[int, Part]
    stride: int


def page_layout(ratios: tuple[int, ...], page_tokens: int) -> PageLayout:
    """Lay out a page of ``page_tokens`` tokens (a multiple of 128). Raises ValueError for other
    sizes or ratios.
    """
    if page_tokens <= 0 or page_tokens % HCA_RATIO:
        raise ValueError(
            f"page_tokens must be a positive multiple of {HCA_RATIO}, not {page_tokens}"
        )
    offset = 0
    keys: dict[int, Part] = {}
    index: dict[int, Part] = {}
    for layer, ratio in enumerate(ratios):
        if ratio not in (0, CSA_RATIO, HCA_RATIO):
            raise ValueError(f"layer {layer}: ratio {ratio} is none of 0, {CSA_RATIO}, {HCA_RATIO}")
        if ratio == 0:
            continue
        keys[layer] = Part(offset, page_tokens // ratio, DATA_BYTES, SCALE_BYTES)
        offset += keys[layer].size
        if ratio == CSA_RATIO:
            index[layer] = Part(offset, page_tokens // ratio, INDEX_CHANNELS, INDEX_SCALE_BYTES)
            offset += index[layer].size
    return PageLayout(page_tokens, ratios, keys, index, max(offset, ALIGNMENT))


@dataclass(frozen=True)
class SlotLayout:
    """Where each layer's rings are in a slot extent.

    window, state (main compressor) and index_state map a layer number to its Part; state rows hold
    c then s in fp32. The MTP layer, if any, is the layer after the last one and has a window only.
    """

    ring_rows: int
    window: dict[int, Part]
    state: dict[int, Part]
    index_state: dict[int, Part]
    stride: int


def slot_layout(ratios: tuple[int, ...], max_drafts: int, with_mtp: bool = True) -> SlotLayout:
    """Lay out a slot extent: window rings of 128 + max_drafts rows, state rings of 16 and 256
    rows.
    """
    if max_drafts < 0:
        raise ValueError("max_drafts must not be negative")
    ring = WINDOW + max_drafts
    offset = 0
    window: dict[int, Part] = {}
    state: dict[int, Part] = {}
    index_state: dict[int, Part] = {}
    for layer, ratio in enumerate(ratios + ((0,) if with_mtp else ())):
        window[layer] = Part(offset, ring, DATA_BYTES, SCALE_BYTES)
        offset += window[layer].size
        if ratio == CSA_RATIO:
            state[layer] = Part(offset, CSA_STATE_ROWS, 2 * 2 * KEY_CHANNELS * 4, 0)
            offset += state[layer].size
            index_state[layer] = Part(offset, CSA_STATE_ROWS, 2 * 2 * INDEX_CHANNELS * 4, 0)
            offset += index_state[layer].size
        elif ratio == HCA_RATIO:
            state[layer] = Part(offset, HCA_STATE_ROWS, 2 * KEY_CHANNELS * 4, 0)
            offset += state[layer].size
    return SlotLayout(ring, window, state, index_state, offset)

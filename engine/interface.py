"""What the services ask of an engine: frozen plans in, results out. No torch here; arrays are
numpy.

An engine is a TP group seen from rank 0. Its calls block (run them in the one engine thread of the
process); with several ranks it
sends each call to the followers itself. All ranks hold the same KV, so
page and slot numbers serve all.

Positions count from 0 in the whole sequence (prompt and output). A *page* covers ``page_tokens``
positions for all layers; a *slot* is
the extent of one sequence with everything that does not grow: window rings, compressor state rings,
MTP window ring, streams of the
last position. Ring rows are addressed by position, so forgetting rejected drafts is only a smaller
length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from decant.protocol.messages import PoolHandle

if TYPE_CHECKING:
    from decant.engine.sampler import Draw, Row

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]


@dataclass(frozen=True)
class SlotRows:
    """Decode rows of one sequence: its last drawn token and the drafts after it, at positions
    start, start + 1, ...
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]  # at most 1 + max_drafts
    block_table: tuple[int, ...]  # pages of positions 0 .. start + len(token_ids) - 1


@dataclass(frozen=True)
class PrefillChunk:
    """Positions start .. start + len(token_ids) - 1 of one sequence. Chunks of a sequence come in
    order.

    The MTP window key of position p needs the token at p + 1, so a chunk fills it for positions
    start - 1 .. end - 1 (the streams of
    start - 1 are in the slot); that of the last prompt position waits for the first drawn token
    (Propose).
    ``next_token`` is the token after the chunk where it is known (-1 otherwise); it is needed for
    scores only. ``num_top``: at least 0 asks for ``Scores`` with so many alternatives.
    """

    slot: int
    start: int
    token_ids: I32
    block_table: tuple[int, ...]
    next_token: int = -1
    num_top: int = -1


@dataclass(frozen=True)
class Scores:
    """How likely the model held the tokens after a chunk's positions: n of them, the chunk's own
    from the second on, and ``next_token`` if it is known.
    """

    logprobs: F32  # [n]
    ranks: I32  # [n], 1 = the likeliest
    top_ids: I32  # [n, num_top], the likeliest first
    top_logprobs: F32  # [n, num_top]


@dataclass(frozen=True)
class StepPlan:
    """One engine step: decode slots plus at most one prefill chunk, bit-equal to the two done
    apart.
    """

    step: int
    decode: tuple[SlotRows, ...] = ()
    chunk: PrefillChunk | None = None


@dataclass(frozen=True)
class StepResult:
    """Rows in the order of the plan's decode slots."""

    logits: F32  # [num_rows, vocab_size]
    streams: F32  # [num_rows, hc_mult, hidden_size]: trunk streams after the last layer, for MTP
    elapsed_ns: int = 0
    scores: Scores | None = None  # of the chunk, if it asks for them; None: cannot do that


@dataclass(frozen=True)
class DraftSlot:
    """Verified positions start .. start + len(next_tokens) - 1 of a slot, with the token that
    follows each.
    """

    slot: int  # of decode's pool; the draft writes MTP window keys of these positions there
    start: int
    next_tokens: tuple[int, ...]
    streams: F32  # [rows, hc_mult, hidden_size]; hidden_size 0: they are in the slot
    num_drafts: int
    mtp_valid_from: int = 0  # window keys of earlier positions are holes and masked
    seed: int = 0
    choice: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


class Engine(Protocol):
    """The trunk of the model with its pool, for prefill and decode."""

    vocab_size: int
    hidden_size: int
    max_context: int
    page_tokens: int
    num_pages: int
    num_slots: int
    max_drafts: int  # ring rows allow this many drafts a step
    model_hash: str
    kv_layout_hash: str
    eos_token_id: int

    def pools(self) -> list[PoolHandle]:
        """Handles of the own pool, one per rank."""
        ...

    def step(self, plan: StepPlan) -> StepResult:
        """Run the plan: writes pages, rings and last streams of its slots. Raises: KVPageError,
        KernelError.
        """
        ...

    def head(self, slots: Sequence[int]) -> F32:
        """Logits [len(slots), vocab_size] of each slot's last position, from its stored streams.
        The same bits as step's.
        """
        ...

    def last_streams(self, slots: Sequence[int]) -> F32:
        """[len(slots), hc_mult, hidden_size]: streams of each slot's last processed position."""
        ...

    def clear_slot(self, slot: int) -> None:
        """Make a slot ready for a new sequence (position 0)."""
        ...

    def attach(self, peer: str, pools: Sequence[PoolHandle]) -> None:
        """Map a peer's pools (rank i maps the peer's rank i). Raises: HandoffError if the layout
        differs or mapping fails.
        """
        ...

    def detach(self, peer: str) -> None:
        """Close the mapping; never read it again. Unknown peers are ignored."""
        ...

    def pull_pages(
        self,
        peer: str,
        source: Sequence[int],
        target: Sequence[int],
        num_tokens: Sequence[int],
        checksums: Sequence[int],
    ) -> None:
        """Copy pages from a peer's pool; page i has num_tokens[i] live tokens. May run beside step
        in another thread.

        Raises: HandoffError on a wrong epoch, a lost peer or a checksum that differs.
        """
        ...

    def pull_slot(
        self, peer: str, source: int, target: int, num_tokens: int, checksum: int
    ) -> None:
        """Copy the live rows of a slot after num_tokens tokens. Raises: HandoffError."""
        ...

    def page_checksum(self, page: int, num_tokens: int) -> int:
        """crc32 of the live rows of a page that has num_tokens live tokens. Of a full page that
        nobody writes, it may run beside step in another thread.
        """
        ...

    def slot_checksum(self, slot: int, num_tokens: int) -> int:
        """crc32 of the live rows of a slot after num_tokens tokens."""
        ...

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page within the own pool (open page of a fork)."""
        ...

    def copy_slot(self, source: int, target: int, num_tokens: int) -> None:
        """Copy a slot's live rows within the own pool (fork of a choice, snapshot)."""
        ...

    def save_page(self, page: int, num_tokens: int) -> bytes:
        """The live rows of a page, to be kept outside the pool."""
        ...

    def save_slot(self, slot: int, num_tokens: int) -> bytes:
        """The live rows of a slot after num_tokens tokens."""
        ...

    def load_page(self, page: int, num_tokens: int, data: bytes) -> None:
        """What ``save_page`` gave, into a page. Raises: KVPageError if its size is another."""
        ...

    def load_slot(self, slot: int, num_tokens: int, data: bytes) -> None:
        """What ``save_slot`` gave, into a slot. Raises: KVPageError if its size is another."""
        ...

    def close(self) -> None:
        """Unmap everything, unlink the own pool, stop the followers."""
        ...


class DrawingEngine(Engine, Protocol):
    """An engine that draws where its logits are (``draws_on_device`` is True): only token ids come
    to the host, and residual streams stay in the slots, where the draft reads them.
    """

    draws_on_device: bool

    def step_and_draw(self, plan: StepPlan, rows: Callable[[], list[Row]]) -> list[Draw]:
        """``step`` and a draw from each row's logits; ``rows`` is called while the step runs.
        Raises: as ``step``.
        """
        ...

    def draw_heads(self, slots: Sequence[int], rows: list[Row]) -> list[Draw]:
        """A draw from each slot's ``head``."""
        ...


class DraftEngine(Protocol):
    """The MTP layer. Its window ring lives in decode's slots."""

    model_hash: str
    kv_layout_hash: str
    max_drafts: int

    def attach(self, peer: str, pools: Sequence[PoolHandle]) -> None: ...

    def detach(self, peer: str) -> None: ...

    def propose(self, peer: str, slots: Sequence[DraftSlot]) -> list[list[int]]:
        """Teacher-force the verified positions, then chain drafts; returns num_drafts ids per
        slot.
        """
        ...

    def close(self) -> None: ...


def page_checksums(
    engine: Engine, pages: Sequence[int], num_tokens: Sequence[int]
) -> list[int]:
    """Of several pages, at once where the engine can."""
    several = getattr(engine, "page_checksums", None)
    if several is not None:
        found: list[int] = several(pages, num_tokens)
        return found
    return [engine.page_checksum(p, n) for p, n in zip(pages, num_tokens, strict=True)]

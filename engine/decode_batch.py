"""What one decode step is made of, and what comes out of it: plans, results, proposals. Data."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from decant.engine.handoff import Pull
from decant.engine.interface import F32, StepPlan
from decant.engine.page_cache import Seal
from decant.engine.sampler import Bools, Draw, Row
from decant.engine.sequence import Lane, Sequence
from decant.protocol.messages import Message, Propose, ProposeSlot, TokenRun


@dataclass(frozen=True)
class Limits:
    """Sizes that the scheduler works with; from the engine and the configuration."""

    num_pages: int
    num_slots: int
    page_tokens: int
    max_context: int
    vocab_size: int
    eos_token_id: int
    max_batch: int
    growth_tokens: int
    max_drafts: int  # 0: no speculation
    chunk_tokens: int = 256  # of prefill in this process
    page_bytes: int = 0
    slot_bytes: int = 0
    cache_pages: int = 0  # kept for later requests at most; 0: as many as nobody else wants
    tpot_budget_s: float = 0.05  # a token of a sequence may take so long beside prefill


@dataclass(frozen=True)
class ToRouter:
    """Send to the router."""

    message: Message


@dataclass(frozen=True)
class ToPrefill:
    """Send to a prefill process."""

    peer: str  # incarnation
    message: Message


# Grammar's place in the step. mask(sequence, drafts) -> 1 + len(drafts) masks [vocab_size], one for
# the token after sequence.ids + drafts[:i] each; None: every token is allowed. Called in the engine
# thread, for sequences with a grammar only.
Mask = Callable[[Sequence, tuple[int, ...]], list[Bools | None]]

Action = ToRouter | ToPrefill | Pull | Seal  # the last two run in the thread for copies


@dataclass(frozen=True)
class DecodePlan:
    """One step: copies for forks, first tokens of admitted sequences, then the engine's step."""

    step: StepPlan
    sequences: tuple[Sequence, ...] = ()  # in the order of step.decode
    firsts: tuple[Sequence, ...] = ()  # admitted now: first token from head
    page_copies: tuple[tuple[int, int], ...] = ()
    slot_copies: tuple[tuple[int, int, int], ...] = ()  # source, target, num_tokens
    clear_slot: int = -1  # before the first chunk of our own prefill
    lane: Lane | None = None  # of step.chunk

    @property
    def num_rows(self) -> int:
        return sum(len(rows.token_ids) for rows in self.step.decode)


@dataclass(frozen=True)
class StepOutput:
    """What the engine thread brings back."""

    first_draws: list[Draw]
    draws: list[Draw]  # one per row of the plan
    first_streams: F32 | None = None  # [num firsts, hc_mult, hidden]; None: nobody drafts
    streams: F32 | None = None  # [num rows, hc_mult, hidden]
    elapsed_s: float = 0.0


@dataclass
class Proposal:
    """A Propose message with its arrays, and whom the answer is for."""

    message: Propose
    streams: F32  # [rows, hc_mult, hidden]
    next_tokens: array[int]  # one per row
    sequences: list[Sequence]
    ends: list[int]  # position after the last verified one, per sequence
    lengths: list[int]  # of ids at the time: drafts are for this point


@dataclass
class Outgoing:
    """Tokens of one step for one tokenizer."""

    runs: list[TokenRun] = field(default_factory=list)
    ids: array[int] = field(default_factory=lambda: array("i"))


@dataclass(frozen=True)
class Advance:
    """A sequence that moved in this step: positions start .. start + num_rows - 1 are verified."""

    sequence: Sequence
    start: int
    num_rows: int
    streams: F32 | None  # [num_rows, hc_mult, hidden]


def build_proposal(step: int, advances: list[Advance], depth: int) -> Proposal | None:
    """Ask for ``depth`` drafts for each sequence that can use some."""
    slots: list[ProposeSlot] = []
    streams: list[F32] = []
    next_tokens = array("i")
    sequences: list[Sequence] = []
    ends: list[int] = []
    for advance in advances:
        sequence = advance.sequence
        # The step that verifies k drafts may yield k + 1 tokens.
        num_drafts = min(depth, sequence.max_length - len(sequence.ids) - 1)
        if num_drafts < 1 or sequence.finish_reason or advance.streams is None:
            continue
        if sequence.request.is_dropped or sequence.request.is_parked:
            continue
        if sequence.mtp_end != advance.start:  # steps without a draft left a hole
            sequence.mtp_valid_from = advance.start
        end = advance.start + advance.num_rows
        s = sequence.sampling
        slots.append(
            ProposeSlot(
                sequence.slot,
                advance.start,
                advance.num_rows,
                num_drafts,
                sequence.mtp_valid_from,
                s.seed,
                sequence.choice,
                s.temperature,
                s.top_p,
                s.top_k,
                s.min_p,
            )
        )
        streams.append(advance.streams)
        next_tokens.extend(sequence.ids[advance.start + 1 : end + 1])
        sequences.append(sequence)
        ends.append(end)
    if not slots:
        return None
    return Proposal(
        Propose(step, slots),
        np.concatenate(streams),
        next_tokens,
        sequences,
        ends,
        [len(sequence.ids) for sequence in sequences],
    )


def sampler_rows(sequence: Sequence, drafts: tuple[int, ...], mask: Mask | None) -> list[Row]:
    """The draws of one sequence in a step: one row after each of drafts[:0], drafts[:1] ..."""
    num = len(drafts) + 1
    masks: list[Bools | None] = [None] * num
    if mask and sequence.grammar:
        masks = mask(sequence, drafts)
    return [
        Row(
            sequence.sampling,
            sequence.choice,
            len(sequence.ids) + i,
            sequence.num_output + i,
            sequence.history,
            drafts[:i],
            masks[i],
        )
        for i in range(num)
    ]

"""What decode knows of a request: its lanes before admission, its sequences after. Mostly data."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from decant.engine.handoff import Intake, Key
from decant.engine.sampler import History
from decant.protocol.messages import Grammar, Reserve, Sampling, TokenLogprob, TokenRun

SequenceOwner = tuple[str, int, int]  # request_id, attempt, choice: the ledger's owner


@dataclass(eq=False)
class Request:
    """One attempt of a request at decode. Kept until Cancel, for ReplayFrom."""

    request_id: str
    attempt: int
    order: int  # of arrival; the youngest (greatest) is preempted first
    tokenizer: str  # gets the tokens; empty: nobody does
    deadline_ms: int = 0
    salt: str = ""  # of the page cache
    is_parked: bool = False
    is_dropped: bool = False  # cancelled, lost or preempted: results of a running step are void
    lanes: dict[int, Lane] = field(default_factory=dict)
    sequences: dict[int, Sequence] = field(default_factory=dict)  # by choice, finished ones too


@dataclass(eq=False)
class Lane:
    """A reservation: prompt pages come by hand-off or by our own prefill, then it is admitted."""

    request: Request
    message: Reserve
    ids: array[int]  # the sequence to prefill
    pages: list[int]  # covers ids and growth; the first choice's
    tails: dict[int, list[int]]  # choice -> own pages from the open page on (first choice: none)
    slots: dict[int, int]  # choice -> slot
    intake: Intake | None  # None: we prefill it by ourselves
    num_computed: int = 0  # tokens, of our own prefill
    began_ms: float = 0.0  # first publication
    num_pulled_bytes: int = 0
    digests: list[bytes] = field(default_factory=list)  # of the full pages, for the page cache

    @property
    def key(self) -> Key:
        return self.message.request_id, self.message.attempt, self.message.lane

    def owner(self, choice: int) -> SequenceOwner:
        return self.message.request_id, self.message.attempt, choice


@dataclass(eq=False)
class Sequence:
    """One choice in the batch.

    ``ids[-1]`` is drawn but not processed: its row starts the next step. ``num_prompt`` counts the
    original prompt, so ``ids[num_prompt:]`` are the output, what the client had before included.
    """

    request: Request
    choice: int
    sampling: Sampling
    grammar: Grammar | None
    num_prompt: int
    max_length: int  # of ids
    slot: int
    pages: list[int]
    ids: array[int]
    history: History | None = None
    first_output: int = 0  # output position of the first token drawn here
    drafts: tuple[int, ...] = ()  # for the next step
    mtp_end: int = 0  # MTP window keys are known up to here
    mtp_valid_from: int = 0  # and from here on without a hole
    finish_reason: str = ""
    stop_token_id: int = -1
    logprobs: list[TokenLogprob] = field(default_factory=list)  # from first_output on, if wanted
    num_drafted: int = 0
    num_accepted: int = 0
    num_steps: int = 0

    @property
    def owner(self) -> SequenceOwner:
        return self.request.request_id, self.request.attempt, self.choice

    @property
    def num_output(self) -> int:
        return len(self.ids) - self.num_prompt

    def run(self, start: int) -> tuple[TokenRun, array[int]]:
        """The tokens from output position ``start`` on, as sent to a tokenizer, with their ids."""
        ids = self.ids[self.num_prompt + start :]
        skip = start - self.first_output
        return (
            TokenRun(
                self.request.request_id,
                self.request.attempt,
                self.choice,
                start,
                len(ids),
                self.finish_reason,
                self.stop_token_id,
                self.logprobs[max(skip, 0) :] if self.logprobs else [],
            ),
            ids,
        )

"""Decode's dealings with the draft: at most one proposal is open, and what its answer means.

While a proposal is unanswered, steps go on without drafts (k = 0) and nothing further is proposed:
a silent draft is waited for once, not at every step. A late answer still says that its window keys
are written. Positions verified while nothing was proposed are holes in the draft's window.
Pure logic; ``acceptance.py`` has the rule of acceptance and of depth.
"""

from __future__ import annotations

from array import array

from decant.engine.acceptance import DepthController
from decant.engine.decode_batch import Advance, Proposal, build_proposal
from decant.engine.kv_pages import Books
from decant.engine.sequence import Sequence, SequenceOwner


class Speculation:
    """One decode group's drafts."""

    def __init__(self, depth: DepthController, books: Books, vocab_size: int) -> None:
        self.depth = depth
        self.has_draft = False  # a draft process is there
        self.num_drafted = self.num_accepted = 0
        self._books, self._vocab_size = books, vocab_size
        self._proposal: Proposal | None = None  # unanswered
        self._verified: list[tuple[int, int]] = []

    @property
    def is_on(self) -> bool:
        return self.has_draft and self.depth.max_depth > 0

    @property
    def is_due(self) -> bool:
        """A proposal is unanswered."""
        return self._proposal is not None

    def touches(self, owner: SequenceOwner) -> bool:
        """Whether the draft may still write to this owner's slot."""
        proposal = self._proposal
        return proposal is not None and any(s.owner == owner for s in proposal.sequences)

    def propose(self, step: int, advances: list[Advance], batch: int) -> Proposal | None:
        """What to ask after a step. batch: sequences of the next step."""
        if self._proposal or not self.is_on or not advances:
            return None
        depth = self.depth.choose(batch)
        if depth:
            self._proposal = build_proposal(step, advances, depth)
        return self._proposal

    def answered(self, step: int, counts: list[int], ids: array[int]) -> bool:
        """The draft answered.

        False: the answer is not to the open proposal, or malformed, and its drafts are ignored.
        """
        proposal = self._proposal
        if proposal is None or proposal.message.step != step:
            return False
        asked = [slot.num_drafts for slot in proposal.message.slots]
        is_good = len(counts) == len(asked) and sum(counts) == len(ids)
        is_good = is_good and all(0 <= c <= a for c, a in zip(counts, asked, strict=True))
        at = 0
        for i, sequence in enumerate(proposal.sequences if is_good else ()):
            drafts = ids[at : at + counts[i]]
            at += counts[i]
            if not drafts:
                continue  # it did not run: the hole stays
            sequence.mtp_end = proposal.ends[i]
            if not sequence.request.is_dropped and len(sequence.ids) == proposal.lengths[i]:
                good = [0 <= t < self._vocab_size for t in drafts]
                sequence.drafts = tuple(drafts) if all(good) else ()
        self.gone()
        return is_good

    def gone(self) -> None:
        """The draft is dead, or was never told: nobody writes to our slots."""
        proposal, self._proposal = self._proposal, None
        if proposal:
            self._books.unhold([s.owner for s in proposal.sequences], "draft")

    def verified(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """A sequence ran with drafts; they are used up."""
        sequence.drafts = ()
        sequence.num_steps += 1
        sequence.num_drafted += num_drafts
        sequence.num_accepted += num_accepted
        self.num_drafted += num_drafts
        self.num_accepted += num_accepted
        self.depth.verified(num_drafts, num_accepted)
        self._verified.append((num_drafts, num_accepted))

    def take_verified(self) -> list[tuple[int, int]]:
        """(drafts verified, drafts accepted) of each sequence since the last call, for metrics."""
        verified, self._verified = self._verified, []
        return verified

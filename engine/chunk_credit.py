"""How much prefill a decode step may take along: a credit law, not a budget per step. Pure logic.

Decode slots expect a token every TPOT budget. A step that yields n tokens a sequence may take
tau = budget x n; what it leaves over is saved, at most ``MAX_CREDIT_S``, and a chunk may spend it.
A long chunk so overdraws, and the next ones wait until ordinary steps have paid it back.
"""

from __future__ import annotations

from decant.engine.acceptance import Line

GRAIN = 128  # tokens; chunks are multiples of it, the last one of a prompt excepted


class ChunkCredit:
    """The credit of one decode group, and what a chunk costs there.

    Only steps with decode rows count: where nobody waits for a token, a chunk is as long as it may.
    """

    MAX_CREDIT_S = 0.100
    MAX_STEP_S = 0.160  # no mixed step shall take longer
    DECAY = 0.9

    def __init__(self, budget_s: float, max_tokens: int) -> None:
        """budget_s: TPOT that decode slots are promised. max_tokens: longest chunk."""
        self.budget_s, self.max_tokens = budget_s, max_tokens
        self.credit_s = self.MAX_CREDIT_S
        self._plain = Line()  # rows of a step without a chunk -> seconds
        self._chunk = Line()  # tokens of a chunk -> seconds beyond the step without it

    def grant(self, num_rows: int) -> int:
        """Tokens that the next step's chunk may have beside ``num_rows`` decode rows; 0: none.

        At least ``GRAIN`` where credit is not overdrawn, however long that takes: a machine too
        slow for the longest step still gets on, and pays with steps that carry no chunk.
        """
        if not num_rows:
            return self.max_tokens
        if self.credit_s < 0:
            return 0
        left = self.MAX_STEP_S - self._plain.at(num_rows)
        tokens = self.max_tokens
        while tokens > GRAIN and self._chunk.at(tokens) > left:
            tokens -= GRAIN
        return max(min(tokens, self.max_tokens), min(GRAIN, self.max_tokens))

    def stepped(
        self, num_rows: int, num_chunk: int, num_sequences: int, num_tokens: int, seconds: float
    ) -> None:
        """A step of ``num_rows`` decode rows of ``num_sequences`` and ``num_chunk`` chunk tokens
        took ``seconds`` and yielded ``num_tokens`` to the sequences.
        """
        if not num_chunk:
            self._plain.add(num_rows, seconds, self.DECAY)
        else:
            beyond = seconds - (self._plain.at(num_rows) if num_rows else 0.0)
            self._chunk.add(num_chunk, max(0.0, beyond), self.DECAY)
        if num_sequences:
            tau = self.budget_s * max(1.0, num_tokens / num_sequences)
            self.credit_s = min(self.MAX_CREDIT_S, self.credit_s + tau - seconds)

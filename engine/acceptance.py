"""Speculation by coupling: which drafts are accepted, and how many to ask for. Pure logic.

Decode draws at every verified row the token that it would have drawn without drafts, with noise
keyed by (seed, choice, position); a draft is accepted exactly if it equals that token. So nothing
that happens here can change a token: depth, missing drafts and wrong drafts change speed only.
"""

from __future__ import annotations

from collections.abc import Sequence


def accept(drafts: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """Tokens that one verify step yields.

    drafts: the k drafts that were verified. drawn: k + 1 tokens, drawn[i] at the row that follows
    drafts[:i]. Returns: drawn[: m + 1], where the first m drafts equal what was drawn; the last
    one is the token that comes for free.
    """
    assert len(drawn) == len(drafts) + 1
    num = 0
    while num < len(drafts) and drafts[num] == drawn[num]:
        num += 1
    return list(drawn[: num + 1])


class DepthController:
    """Chooses k, the drafts a step, from measured acceptance and time.

    Rule: with a_i the measured probability that draft i is right if all before it were, a step with
    depth k yields E(k) = 1 + a_1 + a_1 a_2 + ... tokens a sequence and costs
    T(k) = base + per_row * batch * (1 + k) + draft(batch, k). The k with the greatest E / T wins.
    Step time is a line through the measured (rows, seconds), draft time a line through
    (batch * k, seconds); both forget with factor ``DECAY``. Every ``PROBE``-th choice takes the
    largest k, so that acceptance and times at depth stay known. Before ``WARM_UP`` measured steps,
    or if not adaptive, k is the largest.
    """

    DECAY = 0.98
    PROBE = 32
    WARM_UP = 16

    def __init__(self, max_depth: int, is_adaptive: bool = True) -> None:
        self.max_depth = max_depth
        self.is_adaptive = is_adaptive
        self.acceptance = [0.8] * max_depth  # a_i
        self._step = Line()
        self._draft = Line()
        self._num_chosen = 0
        self._num_measured = 0

    def choose(self, batch: int) -> int:
        """k for the next step of ``batch`` sequences."""
        self._num_chosen += 1
        if (
            not self.is_adaptive
            or self._num_measured < self.WARM_UP
            or self._num_chosen % self.PROBE == 0
        ):
            return self.max_depth
        best, best_rate, expected, chain = 0, 0.0, 1.0, 1.0
        for depth in range(self.max_depth + 1):
            if depth:
                chain *= self.acceptance[depth - 1]
                expected += chain
            cost = self._step.at(batch * (1 + depth))
            cost += self._draft.at(batch * depth) if depth else 0.0
            rate = expected / max(cost, 1e-9)
            if rate > best_rate:
                best, best_rate = depth, rate
        return best

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """One sequence verified ``num_drafts`` drafts, of which the first ``num_accepted`` held."""
        for i in range(min(num_accepted + 1, num_drafts)):
            hit = float(i < num_accepted)
            self.acceptance[i] += (1 - self.DECAY) * (hit - self.acceptance[i])

    def stepped(self, num_rows: int, seconds: float) -> None:
        """One engine step of ``num_rows`` decode rows (no prefill chunk) took ``seconds``."""
        self._num_measured += 1
        self._step.add(num_rows, seconds, self.DECAY)

    def drafted(self, num_drafts: int, seconds: float) -> None:
        """``num_drafts`` drafts in all (batch * k) took ``seconds`` from request to answer."""
        self._draft.add(num_drafts, seconds, self.DECAY)


class Line:
    """Least squares y = a + b x with forgetting; a, b >= 0."""

    def __init__(self) -> None:
        self.n = self.x = self.y = self.xx = self.xy = 0.0

    def add(self, x: float, y: float, decay: float) -> None:
        for name, value in (("n", 1.0), ("x", x), ("y", y), ("xx", x * x), ("xy", x * y)):
            setattr(self, name, decay * getattr(self, name) + value)

    def at(self, x: float) -> float:
        if self.n == 0:
            return 0.0
        spread = self.n * self.xx - self.x * self.x
        mean = self.y / self.n
        # NOTE: with (nearly) one x only, the slope is unknown: proportional is the careful guess.
        if spread <= 1e-6 * self.n * self.xx:
            return mean * x * self.n / self.x if self.x else mean
        slope = max(0.0, (self.n * self.xy - self.x * self.y) / spread)
        offset = mean - slope * self.x / self.n
        if offset < 0:
            offset, slope = 0.0, self.xy / self.xx
        return offset + slope * x

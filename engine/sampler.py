"""The one sampler: logits in, tokens out. Pure numpy, the same bits for a row in any batch.

A token is drawn by the Gumbel-max trick, ``argmax(logits / temperature + noise)``, with noise keyed
by (seed, choice, absolute position of the drawn token) (``noise.py``). So a draw depends on nothing
but the row's logits and its request: not on batch, speculation or resume.

Order of processing: allowed tokens (grammar), logit bias, min_tokens (eos and stop ids masked),
repetition penalty (prompt and output), presence and frequency penalty (output), temperature, top-k,
top-p (within the top-k, renormalised), min-p. Logprobs are those of the model: log softmax of the
raw logits. Ties at a border of top-k or top-p stay in.

Source: Gumbel-max, Maddison et al. 2014 (A* sampling), section 2; nucleus, Holtzman et al. 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decant.engine.interface import F32, I32
from decant.engine.noise import gumbel_rows
from decant.protocol.messages import Sampling, TokenLogprob

Noise = Callable[[Sequence[tuple[int, int, int]], int], F32]  # (seed, choice, position), n
Bools = NDArray[np.bool_]

GREEDY_BELOW = 1e-5  # temperatures below this count as 0
EASY_TRIES = 4  # perturbed maxima tried before a nucleus is computed by sorting


class History:
    """Token counts of one sequence, for the penalties. Kept only where a penalty is set."""

    def __init__(self, vocab_size: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        self.counts: I32 = np.zeros(vocab_size, np.int32)  # output tokens
        self.is_seen: Bools = np.zeros(vocab_size, np.bool_)  # prompt or output
        self.is_seen[np.asarray(prompt, np.int64)] = True
        self.extend(output)

    def extend(self, output: Sequence[int]) -> None:
        """Count further output tokens."""
        np.add.at(self.counts, np.asarray(output, np.int64), 1)
        self.is_seen[np.asarray(output, np.int64)] = True

    @staticmethod
    def is_needed(sampling: Sampling) -> bool:
        return (
            sampling.presence_penalty != 0
            or sampling.frequency_penalty != 0
            or sampling.repetition_penalty != 1
        )


@dataclass(frozen=True)
class Row:
    """One draw: whose it is and what came before."""

    sampling: Sampling
    choice: int
    position: int  # absolute, of the token to draw
    num_output: int  # output tokens before it, drafts of this step included
    history: History | None = None  # without the drafts of this step
    drafts: tuple[int, ...] = ()  # drafts of this step before it, taken as accepted
    allowed: Bools | None = None  # [vocab_size]; None = all


@dataclass(frozen=True)
class Draw:
    """``token_id`` -1: the logits were not finite, the request must fail."""

    token_id: int
    logprob: TokenLogprob | None = None


class Sampler:
    """Draws one token per row of logits."""

    def __init__(self, vocab_size: int, eos_token_id: int, noise: Noise = gumbel_rows) -> None:
        self.vocab_size = vocab_size
        self.eos_token_id = eos_token_id
        self._noise = noise

    def draw(self, logits: F32, rows: Sequence[Row]) -> list[Draw]:
        """logits: [len(rows), vocab_size] float32, not changed. Returns: one Draw a row."""
        assert logits.shape == (len(rows), self.vocab_size)
        if not rows:
            return []
        is_good = np.isfinite(logits.max(axis=1))  # NaN and +inf spread to the maximum
        processed = logits.copy()
        for i, row in enumerate(rows):
            self._process(processed[i], row)
        is_good &= np.isfinite(processed.max(axis=1))  # nothing is allowed
        tokens = np.full(len(rows), -1, np.int64)
        is_random = np.array([row.sampling.temperature >= GREEDY_BELOW for row in rows])
        greedy = np.flatnonzero(is_good & ~is_random)
        if len(greedy):
            tokens[greedy] = processed[greedy].argmax(axis=1)
        random = np.flatnonzero(is_good & is_random)
        if len(random):
            tokens[random] = self._random(processed[random], [rows[int(i)] for i in random])
        return [
            Draw(int(token), self._logprob(logits[i], int(token), row.sampling.logprobs))
            for i, (row, token) in enumerate(zip(rows, tokens, strict=True))
        ]

    def _process(self, x: F32, row: Row) -> None:
        """Everything before the temperature, in place. x: [vocab_size]."""
        s = row.sampling
        if row.allowed is not None:
            x[~row.allowed] = -np.inf
        for token, bias in s.logit_bias.items():
            x[token] += bias
        if row.num_output < s.min_tokens:
            ends = [self.eos_token_id, *s.stop_token_ids]
            kept = x[ends].copy()
            x[ends] = -np.inf
            if not np.isfinite(x.max()):  # a grammar that allows only the end wins
                x[ends] = kept
        if row.history is not None:
            counts, is_seen = row.history.counts, row.history.is_seen
            if row.drafts:
                drafts = np.asarray(row.drafts, np.int64)
                counts, is_seen = counts.copy(), is_seen.copy()
                np.add.at(counts, drafts, 1)
                is_seen[drafts] = True
            if s.repetition_penalty != 1:
                seen = x[is_seen]
                x[is_seen] = np.where(
                    seen > 0, seen / s.repetition_penalty, seen * s.repetition_penalty
                )
            if s.presence_penalty or s.frequency_penalty:
                ids = np.flatnonzero(counts)
                x[ids] -= s.presence_penalty + s.frequency_penalty * counts[ids]

    def _random(self, x: F32, rows: list[Row]) -> NDArray[np.int64]:
        """Draws for rows with a temperature. x: [num, vocab_size], processed; overwritten."""
        num = len(rows)
        x /= np.array([[row.sampling.temperature] for row in rows], np.float32)
        keys = [(row.sampling.seed, row.choice, row.position) for row in rows]
        perturbed = self._noise(keys, self.vocab_size)
        perturbed += x
        _mask_outside(perturbed, x, [row.sampling for row in rows])
        tokens: NDArray[np.int64] = perturbed.argmax(axis=1)
        todo = np.array([i for i in range(num) if rows[i].sampling.top_p < 1], np.int64)
        if not len(todo):
            return tokens
        # The draw within a nucleus is the greatest perturbed value of its members. Whether a token
        # is a member takes one pass over the row, the whole set takes sorting: so ask the greatest
        # values one after the other first.
        nucleus = _Nucleus(x[todo], [rows[int(i)].sampling for i in todo])
        for _ in range(EASY_TRIES):
            is_member = nucleus.contains(tokens[todo])
            nucleus.keep(~is_member)
            todo = todo[~is_member]
            if not len(todo):
                return tokens
            perturbed[todo, tokens[todo]] = -np.inf
            tokens[todo] = perturbed[todo].argmax(axis=1)
        for j, i in enumerate(todo):
            members = nucleus.members(j)
            tokens[i] = members[perturbed[i, members].argmax()]
        return tokens

    def _logprob(self, raw: F32, token: int, num_top: int) -> TokenLogprob | None:
        """The drawn token and the ``num_top`` likeliest, under the model. num_top < 0: none."""
        if num_top < 0 or token < 0:
            return None
        x = raw.astype(np.float64)
        x -= x.max()
        x -= np.log(np.exp(x).sum())
        top: list[int] = []
        if num_top:
            num_top = min(num_top, self.vocab_size)
            some = np.flatnonzero(x >= np.partition(x, -num_top)[-num_top])
            top = [int(i) for i in some[np.lexsort((some, -x[some]))][:num_top]]
        return TokenLogprob(token, float(x[token]), top, [float(x[i]) for i in top])


def _mask_outside(perturbed: F32, x: F32, samplings: Sequence[Sampling]) -> None:
    """-inf where a token is outside its row's top-k or min-p set. Ties stay in."""
    for i, s in enumerate(samplings):
        border = -np.inf
        if 0 < s.top_k < x.shape[1]:
            border = np.partition(x[i], -s.top_k)[-s.top_k]  # the k-th greatest
        if s.min_p > 0:
            border = max(border, x[i].max() + np.float32(np.log(s.min_p)))
        if border > -np.inf:
            perturbed[i, x[i] < border] = -np.inf


class _Nucleus:
    """Membership in the top-p sets (within top-k) of some rows."""

    def __init__(self, x: F32, samplings: Sequence[Sampling]) -> None:
        """x: [num, vocab_size], logits over temperature."""
        self.x = x
        self.weights = np.exp(x - x.max(axis=1, keepdims=True))  # probabilities times a constant
        for i, s in enumerate(samplings):
            if 0 < s.top_k < x.shape[1]:
                border = np.partition(x[i], -s.top_k)[-s.top_k]
                self.weights[i, x[i] < border] = 0
        # NOTE: no dtype= in these sums: a cast is buffered, and the cuts depend on the batch.
        self.limit = self.weights.sum(axis=1) * np.array([s.top_p for s in samplings])

    def keep(self, which: Bools) -> None:
        """Forget the other rows."""
        self.x, self.weights, self.limit = self.x[which], self.weights[which], self.limit[which]

    def contains(self, tokens: NDArray[np.int64]) -> Bools:
        """Whether tokens[i] is in row i's set: the mass above it is less than top-p."""
        is_above = self.x > self.x[np.arange(len(tokens)), tokens][:, None]
        mass = np.where(is_above, self.weights, np.float32(0)).sum(axis=1)
        result: Bools = mass < self.limit
        return result

    def members(self, row: int) -> NDArray[np.int64]:
        """Token ids of a row's set, ascending."""
        x, weights = self.x[row], self.weights[row]
        order = np.argsort(-x, kind="stable")
        first = np.searchsorted(-x[order], -x[order], side="left")  # values strictly above each
        mass = np.concatenate([[0.0], np.cumsum(weights[order], dtype=np.float64)])[first]
        return np.sort(order[mass < self.limit[row]])

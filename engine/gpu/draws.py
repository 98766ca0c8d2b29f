"""Draws from logits that stay on the device: token ids are all that travels to the host.

The kernel is ``kernels/sampling.py``: the same order of processing and the same noise as
``engine/sampler.py``. Rows with penalties or log probabilities, and those where the end of an
answer is forbidden to a grammar, are fetched and drawn by the host's sampler: the same token, but
for near ties in the last bits of a logarithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decant.engine.sampler import Draw, Row, Sampler
from decant.protocol.messages import Sampling

ROWS_AT_ONCE = 128  # of one launch: bounds the scratch, which is two floats a logit


@dataclass(frozen=True)
class Columns:
    """The numbers of ``rows`` draws on the device, one tensor each (see kernels/sampling.py)."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    choices: Tensor
    positions: Tensor


def columns(rows: Sequence[Row], device: torch.device) -> Columns:
    """In one copy to the device."""
    num = len(rows)
    whole = np.zeros((num, 8), np.int32)
    real = whole.view(np.float32)
    seeds = whole[:, :2].copy().view(np.int64)
    for i, row in enumerate(rows):
        s = row.sampling
        seeds[i, 0] = s.seed
        real[i, 2:5] = s.temperature, s.top_p, s.min_p
        whole[i, 5:8] = s.top_k, row.choice, row.position
    whole[:, :2] = seeds.view(np.int32)
    flat = torch.from_numpy(np.ascontiguousarray(whole.T))
    sent = flat.to(device)
    pair = torch.stack((sent[0], sent[1]), 1).contiguous()
    f32, i32 = sent[2:5].view(torch.float32), sent[5:8]
    return Columns(
        temperature=f32[0],
        top_k=i32[0],
        top_p=f32[1],
        min_p=f32[2],
        seeds=pair.view(torch.int64).view(num),
        choices=i32[1],
        positions=i32[2],
    )


def fits_device(row: Row, vocab_size: int) -> bool:
    """Whether the kernel draws this row."""
    s = row.sampling
    if row.history is not None or s.logprobs >= 0 or s.top_k > vocab_size:
        return False
    return row.allowed is None or row.num_output >= s.min_tokens


class DeviceSampler:
    """One rank's sampler. use_kernel: None: where there is a GPU."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_id: int,
        device: torch.device,
        use_kernel: bool | None = None,
    ) -> None:
        if use_kernel is None:
            use_kernel = device.type == "cuda"
        self.vocab_size, self.eos_token_id, self.device = vocab_size, eos_token_id, device
        self.use_kernel = use_kernel
        self._host = Sampler(vocab_size, eos_token_id)
        self._scratch: Any = None

    def draw(self, logits: Tensor, rows: Sequence[Row]) -> list[Draw]:
        """logits float32 [len(rows), vocab] on the device; may be changed. Returns: one a row."""
        assert logits.shape == (len(rows), self.vocab_size)
        here = [i for i, row in enumerate(rows) if self._fits(row)]
        draws: list[Draw] = [Draw(-1)] * len(rows)
        there = [i for i in range(len(rows)) if i not in set(here)]
        if there:
            taken = logits if len(there) == len(rows) else logits[self._index(there)]
            found = self._host.draw(taken.float().cpu().numpy(), [rows[i] for i in there])
            for i, draw in zip(there, found, strict=True):
                draws[i] = draw
        if here:
            taken = logits if len(here) == len(rows) else logits[self._index(here)]
            chosen = [rows[i] for i in here]
            for i, token in zip(here, self._drawn(taken, chosen).tolist(), strict=True):
                draws[i] = Draw(int(token))
        return draws

    def warm_up(self, most: int) -> None:
        """Compile and load what draws of up to so many rows run, before somebody waits for it."""
        if not self.use_kernel:
            return
        allowed = np.ones(self.vocab_size, np.bool_)
        num = 1
        while num <= min(most, ROWS_AT_ONCE):
            logits = torch.zeros(num, self.vocab_size, device=self.device)
            for some in (None, allowed):
                self.draw(logits, [Row(Sampling(), 0, 0, 0, allowed=some)] * num)
            num *= 2

    def _fits(self, row: Row) -> bool:
        return self.use_kernel and fits_device(row, self.vocab_size)

    def _index(self, places: list[int]) -> Tensor:
        return torch.tensor(places, device=self.device)

    def _drawn(self, logits: Tensor, rows: list[Row]) -> Tensor:
        self._bias(logits, rows)
        tokens = [
            self.tokens(
                logits[at : at + ROWS_AT_ONCE],
                columns(rows[at : at + ROWS_AT_ONCE], self.device),
                self._masks(rows[at : at + ROWS_AT_ONCE]),
            )
            for at in range(0, len(rows), ROWS_AT_ONCE)
        ]
        return torch.cat(tokens).cpu()

    def _bias(self, logits: Tensor, rows: list[Row]) -> None:
        """logit_bias, and -inf for what would end an answer too early; in place."""
        places: list[tuple[int, int, float]] = []
        for i, row in enumerate(rows):
            s = row.sampling
            places += [(i, token, bias) for token, bias in s.logit_bias.items()]
            if row.num_output < s.min_tokens:
                ends = {self.eos_token_id, *s.stop_token_ids}
                places += [(i, token, -np.inf) for token in ends]
        if places:
            index = torch.tensor([(i, t) for i, t, _ in places], device=self.device).t()
            value = torch.tensor([v for _, _, v in places], device=self.device)
            logits.index_put_((index[0], index[1]), value, accumulate=True)

    def _masks(self, rows: list[Row]) -> Tensor | None:
        """Allowed tokens as bits, int32 [rows, ceil(vocab / 32)]."""
        if all(row.allowed is None for row in rows):
            return None
        bits = np.ones((len(rows), -(-self.vocab_size // 32) * 32), np.bool_)
        for i, row in enumerate(rows):
            if row.allowed is not None:
                bits[i, : self.vocab_size] = row.allowed
        words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        return torch.from_numpy(words).to(self.device)

    def tokens(self, logits: Tensor, given: Columns, masks: Tensor | None = None) -> Tensor:
        """Token ids int32 [rows], at most ROWS_AT_ONCE, without waiting for the device; -1 where
        logits are not finite."""
        from decant.kernels import sampling

        if self._scratch is None or len(self._scratch.processed) < len(logits):
            rows = min(ROWS_AT_ONCE, 1 << (len(logits) - 1).bit_length())
            self._scratch = sampling.Workspace(rows, self.vocab_size, self.device)
        out = torch.empty(len(logits), dtype=torch.int32, device=self.device)
        return sampling.sample(
            logits, given.temperature, given.top_k, given.top_p, given.min_p, given.seeds,
            given.choices, given.positions, self._scratch, out, masks,
        )  # fmt: skip

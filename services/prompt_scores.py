"""Scores of one prompt in the gateway: what prefill says chunk by chunk, until all is there."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence

from decant.protocol.errors import ProtocolError
from decant.protocol.messages import PromptLogprobs

MAX_WAIT_S = 30.0  # after the first token; scores travel ahead of it


class PromptScores:
    """Logprob, rank and likeliest tokens of each position but the first.

    logprobs, ranks: one a position; top_ids, top_logprobs: ``num_top`` a position, one after the
    other."""

    def __init__(self, num_prompt: int, num_top: int) -> None:
        self.num_top = num_top
        self.logprobs = array("f", bytes(4 * num_prompt))
        self.ranks = array("i", bytes(4 * num_prompt))
        self.top_ids = array("i", bytes(4 * num_prompt * num_top))
        self.top_logprobs = array("f", bytes(4 * num_prompt * num_top))
        self._is_known = bytearray(num_prompt)
        self._is_known[0] = 1
        self._complete = asyncio.Event()
        self._look()

    def add(self, body: PromptLogprobs, blobs: Sequence[bytes]) -> None:
        """A chunk's scores; again for the same positions is harmless. Raises: ProtocolError."""
        if body.num_top != self.num_top or len(blobs) != 4 or body.start < 1:
            raise ProtocolError("scores of another shape")
        logprobs, ranks = array("f", blobs[0]), array("i", blobs[1])
        ids, values = array("i", blobs[2]), array("f", blobs[3])
        num, top = len(logprobs), self.num_top
        if len(ranks) != num or len(ids) != num * top or len(values) != num * top:
            raise ProtocolError("scores of unequal lengths")
        num = max(0, min(num, len(self._is_known) - body.start))
        end = body.start + num
        self.logprobs[body.start : end] = logprobs[:num]
        self.ranks[body.start : end] = ranks[:num]
        self.top_ids[body.start * top : end * top] = ids[: num * top]
        self.top_logprobs[body.start * top : end * top] = values[: num * top]
        self._is_known[body.start : end] = b"\1" * num
        self._look()

    def _look(self) -> None:
        if all(self._is_known):
            self._complete.set()

    async def wait(self, timeout_s: float = MAX_WAIT_S) -> None:
        """Raises: TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._complete.wait()

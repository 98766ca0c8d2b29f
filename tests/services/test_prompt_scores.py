"""Scores of a prompt as they come in pieces, twice, and wrong."""

from __future__ import annotations

from array import array

import pytest

from decant.protocol.errors import ProtocolError
from decant.protocol.messages import PromptLogprobs
from decant.services.prompt_scores import PromptScores


def piece(
    start: int, logprobs: list[float], num_top: int = 2
) -> tuple[PromptLogprobs, list[bytes]]:
    num = len(logprobs)
    ranks = array("i", range(1, num + 1)).tobytes()
    ids = array("i", range(start * num_top, (start + num) * num_top)).tobytes()
    values = array("f", [-1.0] * num * num_top).tobytes()
    body = PromptLogprobs("r", 1, 0, start, num_top)
    return body, [array("f", logprobs).tobytes(), ranks, ids, values]


async def is_complete(scores: PromptScores) -> bool:
    try:
        await scores.wait(0.001)
    except TimeoutError:
        return False
    return True


async def test_pieces_in_any_order_and_again() -> None:
    scores = PromptScores(6, 2)
    scores.add(*piece(4, [-4.0, -5.0, -6.0]))  # one more than the prompt has: an emitted token
    assert not await is_complete(scores)
    scores.add(*piece(1, [-1.0]))
    scores.add(*piece(1, [-1.0, -2.0, -3.0]))
    assert await is_complete(scores)
    assert scores.logprobs.tolist() == [0, -1, -2, -3, -4, -5]
    assert scores.top_ids.tolist()[2:] == list(range(2, 12))
    assert len(scores.top_logprobs) == 12 and len(scores.ranks) == 6


async def test_a_prompt_of_one_token_has_nothing_to_wait_for() -> None:
    assert await is_complete(PromptScores(1, 5))


async def test_wrong_shapes_are_refused() -> None:
    scores = PromptScores(6, 2)
    body, blobs = piece(1, [-1.0])
    for bad in (
        (piece(0, [-1.0])),
        (piece(1, [-1.0], 3)),
        (body, blobs[:3]),
        (body, [blobs[0] * 2, *blobs[1:]]),
        (body, [*blobs[:2], blobs[2] * 2, blobs[3]]),
    ):
        with pytest.raises(ProtocolError):
            scores.add(*bad)
    assert not await is_complete(scores)

"""How likely the model held the tokens that it was given: log softmax, rank and alternatives.

Plain numpy on blocks of logits, so that no more than a block of them exists at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from decant.engine.interface import F32, I32, PrefillChunk, Scores

BLOCK_ROWS = 64  # positions whose logits exist at once: 33 MB at V4's vocabulary


def score(logits: F32, targets: I32, num_top: int) -> Scores:
    """logits: [n, vocab_size]. targets: [n] the token that follows each. num_top: alternatives.

    Returns: log softmax of the raw logits; rank 1 is the likeliest; ties go to the smaller id."""
    rows = np.arange(len(targets))
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=1, keepdims=True))
    own = x[rows, targets]
    ranks = 1 + (x > own[:, None]).sum(axis=1)
    num_top = min(num_top, x.shape[1])
    ids = np.zeros((len(targets), max(num_top, 0)), np.int32)
    for i in range(len(targets) if num_top > 0 else 0):
        some = np.flatnonzero(x[i] >= np.partition(x[i], -num_top)[-num_top])
        ids[i] = some[np.lexsort((some, -x[i, some]))][:num_top]
    return Scores(
        own.astype(np.float32),
        ranks.astype(np.int32),
        ids,
        np.take_along_axis(x, ids.astype(np.int64), 1).astype(np.float32),
    )


def score_chunk(chunk: PrefillChunk, logits_of: Callable[[int, int], F32]) -> Scores | None:
    """Scores of the tokens after the chunk's positions, as far as they are known.

    logits_of(first, end): [end - first, vocab_size] of rows of the chunk. None: not asked for."""
    if chunk.num_top < 0:
        return None
    targets = np.asarray(chunk.token_ids[1:], np.int32)
    if chunk.next_token >= 0:
        targets = np.append(targets, np.int32(chunk.next_token))
    parts = [
        score(
            logits_of(at, min(at + BLOCK_ROWS, len(targets))),
            targets[at : at + BLOCK_ROWS],
            chunk.num_top,
        )
        for at in range(0, len(targets), BLOCK_ROWS)
    ]
    return _joined(parts, chunk.num_top)


def _joined(parts: Sequence[Scores], num_top: int) -> Scores:
    if not parts:
        none = np.zeros((0, num_top))
        return Scores(
            np.zeros(0, np.float32),
            np.zeros(0, np.int32),
            none.astype(np.int32),
            none.astype(np.float32),
        )
    return Scores(
        np.concatenate([p.logprobs for p in parts]),
        np.concatenate([p.ranks for p in parts]),
        np.concatenate([p.top_ids for p in parts]),
        np.concatenate([p.top_logprobs for p in parts]),
    )

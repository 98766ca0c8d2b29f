"""Scores of a chunk's tokens on the device, as ``engine/scoring.py`` has them: in blocks of rows,
so that no more than a block of logits exists, and only the scores come to the host.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from decant.engine.gpu.header import ChunkBody
from decant.engine.interface import I32, Scores
from decant.engine.scoring import BLOCK_ROWS

Block = tuple[Tensor, Tensor, Tensor, Tensor]


def targets_of(chunk: ChunkBody) -> I32:
    """The tokens after the chunk's positions, as far as they are known."""
    following = chunk.token_ids[1:]
    if chunk.next_token < 0:
        return following
    return np.append(following, np.int32(chunk.next_token))


def score_block(logits: Tensor, targets: Tensor, num_top: int) -> Block:
    """logits: float32 [n, vocab_size]. targets: int64 [n]. Returns: log softmax of the targets,
    ranks (1 is the likeliest), ids and log softmax of the ``num_top`` likeliest; ties go to the
    smaller id."""
    x = torch.log_softmax(logits.double(), 1)
    own = x.gather(1, targets[:, None])
    ranks = 1 + (x > own).sum(1)
    if num_top > 0:
        ordered = torch.sort(x, dim=1, descending=True, stable=True)
        values, ids = (part[:, :num_top] for part in ordered)
    else:
        values, ids = x[:, :0], ranks[:, None][:, :0]
    return own[:, 0].float(), ranks.int(), ids.int(), values.float()


def score_rows(
    h: Tensor, targets: I32, num_top: int, logits_of: Callable[[Tensor], Tensor]
) -> list[Block]:
    """h: [rows, hidden], the inputs of the vocabulary; rows past the targets are not scored.
    Every rank of a group asks for the same blocks, since ``logits_of`` gathers."""
    on_device = torch.from_numpy(np.ascontiguousarray(targets, np.int64)).to(h.device)
    return [
        score_block(logits_of(h[at : at + BLOCK_ROWS][: len(part)]), part, num_top)
        for at in range(0, len(targets), BLOCK_ROWS)
        for part in (on_device[at : at + BLOCK_ROWS],)
    ]


def to_host(blocks: list[Block], num_top: int) -> Scores:
    """All blocks of a chunk as one."""
    if not blocks:
        shape = (0, max(num_top, 0))
        none = np.zeros(shape, np.float32)
        return Scores(none[:, :0].sum(1), np.zeros(0, np.int32), none.astype(np.int32), none)
    parts = [torch.cat(part).cpu().numpy() for part in zip(*blocks, strict=True)]
    return Scores(*parts)

"""Draws on the device against the host's sampler, with the kernel under Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decant.engine.gpu.draws import DeviceSampler, columns, fits_device
from decant.engine.sampler import History, Row, Sampler
from decant.protocol.messages import Sampling

VOCAB, EOS = 301, 1
CPU = torch.device("cpu")


def cases() -> list[Row]:
    allowed = np.zeros(VOCAB, np.bool_)
    allowed[[4, 77, 300]] = True
    history = History(VOCAB, [5, 6], [7, 7])
    settings: list[tuple[Sampling, dict[str, object]]] = [
        (Sampling(temperature=0.0), {}),
        (Sampling(seed=2**62 + 5, temperature=0.9, top_k=7), {}),
        (Sampling(seed=-3, temperature=1.2, top_p=0.8), {}),
        (Sampling(seed=9, min_p=0.1), {}),
        (Sampling(seed=1), {"allowed": allowed}),
        (Sampling(seed=1, temperature=0.0, logit_bias={12: 50.0, 13: -9.0}), {}),
        (Sampling(seed=4, temperature=0.0, min_tokens=9, stop_token_ids=[30]), {}),
        (Sampling(seed=4, logprobs=2), {}),
        (Sampling(seed=8, presence_penalty=0.5), {"history": history}),
    ]
    return [Row(s, i % 2, 100 + i, i, **more) for i, (s, more) in enumerate(settings)]  # type: ignore[arg-type]


@pytest.mark.slow  # the interpreter takes a minute
def test_the_device_draws_what_the_host_draws(interpreter: None) -> None:
    random = np.random.default_rng(1)
    logits = random.standard_normal((9, VOCAB)).astype(np.float32) * 3
    logits[6, [EOS, 30]] = 90.0  # forbidden before min_tokens
    rows = cases()
    device = DeviceSampler(VOCAB, EOS, CPU, use_kernel=True)
    host = Sampler(VOCAB, EOS)
    assert [fits_device(row, VOCAB) for row in rows] == [True] * 7 + [False] * 2
    for _ in range(2):  # scratch that was used before
        got = device.draw(torch.from_numpy(logits.copy()), rows)
        assert got == host.draw(logits, rows)
    assert got[5].token_id == 12 and got[6].token_id not in (EOS, 30)
    assert got[7].logprob is not None
    logits[0, 3] = np.nan
    assert device.draw(torch.from_numpy(logits), rows)[0].token_id == -1


def test_numbers_arrive_as_they_were() -> None:
    rows = cases()
    given = columns(rows, CPU)
    assert given.seeds.tolist() == [r.sampling.seed for r in rows]
    assert given.positions.tolist() == [r.position for r in rows]
    assert given.choices.tolist() == [r.choice for r in rows]
    assert given.top_k.tolist() == [r.sampling.top_k for r in rows]
    assert given.top_p.tolist() == pytest.approx([r.sampling.top_p for r in rows])
    assert given.temperature.tolist() == pytest.approx([r.sampling.temperature for r in rows])

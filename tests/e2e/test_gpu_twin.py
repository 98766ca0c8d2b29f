"""Groups of two ranks of the GPU engine behind the API, on CPUs: header, sums over mapped memory,
drafts from streams in the slots, and a rank that dies in mid-stream."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest
from real_set import SMALL, RealSet

from decant.services.mps import family

TWIN = [
    "gpu.twin=true", "gpu.collectives=ipc", "prefill.tp=2", "decode.tp=2", "draft.tp=2",
    "draft.timeout_ms=5000", "decode.slots=8", "decode.max_batch=8", "router.stall_s=120",
    "gateway.queue_timeout_s=200",
]  # fmt: skip
LATER = [pair for pair in SMALL if pair.split("=")[0] not in {p.split("=")[0] for p in TWIN}]


@pytest.mark.slow
@pytest.mark.e2e
def test_a_set_of_gpu_groups_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # plain torch: the interpreter takes for ever
    run_dir = Path(tempfile.mkdtemp(prefix="twin"))  # short: sockets lie in it
    running = RealSet(run_dir, [*LATER, *TWIN])
    try:
        answer, _, figures = running.chat("What is 12 + 30?")
        assert answer == "12 + 30 = 42"
        assert figures.usage["speculation"]["accepted_tokens"] >= 4
        answers: list[str] = []
        thread = threading.Thread(
            target=lambda: answers.append(running.chat("Sort these numbers: 5, 2, 8, 1")[0])
        )
        thread.start()
        time.sleep(0.3)
        ranks = [p for p in family(running.pid("decode-0")) if p != running.pid("decode-0")]
        assert ranks  # a second rank
        os.kill(ranks[0], signal.SIGKILL)
        thread.join(180)
        assert answers == ["1, 2, 5, 8"]
    finally:
        running.stop()

"""Short forms of the rows in ``rows.py``, ``flood.py`` and ``fuzz.py``: seconds each, in
``make test``. ``make chaos`` runs the full forms (``run_all.py``).

DECANT_CHAOS_SEED chooses the seed. Every test prints its result as one line of JSON.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import flood
import fuzz
import pytest
import rows
from conftest import SEED
from real_set import RealSet
from stage import Result, Stage, is_good, line

MINUTES = 2.0  # at most, on a slow machine
pytestmark = pytest.mark.timeout(400)


def play(
    job: Callable[..., Awaitable[Result]],
    stage: Stage,
    num: int,
    minutes: float = MINUTES,
    **more: Any,
) -> Result:
    """Run a row; it must leave nothing failed, hung, wrong or held."""

    async def run() -> Result:
        return await job(stage, SEED, num, minutes, **more)

    result: Result = {"row": job.__name__, "seed": SEED, **asyncio.run(run())}
    print(line(result))
    assert is_good(result), line(result) + stage.real.logs(30)
    return result


def test_kills_of_random_processes_change_nothing(stage: Stage) -> None:
    result = play(rows.kills, stage, 40, rest_s=0.5)
    assert result["requests"] >= 40 and result["deeds"] >= 2


def test_decode_dies_under_grammar_tools_choices_and_penalties(stage: Stage) -> None:
    result = play(rows.constrained, stage, 20)
    assert result["deeds"] >= 1 and set(result["kinds"]) >= {"schema", "tools"}


def test_a_draft_that_comes_and_goes_changes_nothing(stage: Stage) -> None:
    assert play(rows.flapping, stage, 20)["deeds"] >= 3


def test_who_died_comes_back_from_the_nursery(chaos_set: RealSet) -> None:
    """Forked by the process that has torch loaded (once it has), and supervisord's own child."""
    end = time.monotonic() + 90.0
    while time.monotonic() < end:
        before = chaos_set.kill("draft-0")
        while (pid := chaos_set.pid("draft-0")) in (0, before):
            time.sleep(0.05)
        chaos_set.wait_ready()
        time.sleep(1.0)
        pid = chaos_set.pid("draft-0")  # an attempt may have ended meanwhile
        if not Path(f"/proc/{pid}/comm").exists():
            continue
        if Path(f"/proc/{pid}/comm").read_text() == "draft\n":  # of an executed one: python
            parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
            assert b"supervisord_main" in Path(f"/proc/{parent}/cmdline").read_bytes()
            return
        time.sleep(2.0)
    raise AssertionError("every draft was executed")


def test_death_at_failpoints(stage: Stage, points: Path) -> None:
    """Three points of the path that no kill from outside hits reliably."""
    which = ("decode.before_release", "tokenizer.after_tokens", "router.after_reserved")
    result = play(rows.points, stage, 1, folder=points, which=which)
    assert result["points"] == 3


def test_one_poisonous_request_fails_alone(stage: Stage) -> None:
    result = play(rows.poison, stage, 1)
    assert result["requests"] == 15 and result["is_failed"]


def test_clients_that_leave_at_random_moments(stage: Stage) -> None:
    result = play(rows.cancels, stage, 100)
    assert result["cancelled"] >= 100
    assert result["baseline_s"] < 2.0 or os.getloadavg()[0] > 4


def test_a_stopped_process_is_waited_for(stage: Stage) -> None:
    """SIGSTOP shorter than the fence: a pause, nothing else."""
    play(rows.stops, stage, 1, stop_s=1.0)


def test_readers_that_do_not_read_are_cut(stage: Stage) -> None:
    result = play(flood.slow_readers, stage, 12, 0.4)
    assert result["cut"] == result["readers"] == 12


def test_mutated_frames_on_every_socket(stage: Stage) -> None:
    result = play(fuzz.frames, stage, 6000)
    assert {"router.sock", "tokenizer-0.sock", "prefill-0.sock"} <= set(result["frames"])


def test_overload_is_refused_at_once(start_set: Callable[..., RealSet]) -> None:
    real = start_set(*flood.OVERLOAD)
    try:
        result = play(flood.overload, Stage(real), 1, 0.2)
        assert set(result["statuses"]) <= {200, 429, 503} and 429 in result["statuses"]
    finally:
        real.stop()

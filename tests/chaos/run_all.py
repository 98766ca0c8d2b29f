"""Runs rows of the reliability table against sets of the demo, in order, within a time budget.

    python tests/chaos/run_all.py --rows R12,R13,R1 --seed 7 --minutes 25

prints one line of JSON for each row (its seed in it) and ends with status 1 if one is not good.
``--num`` overrides how much of each row is done; ``--scale 0.1`` does a tenth of everything.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

import flood  # noqa: E402
import fuzz  # noqa: E402
import rows  # noqa: E402
from real_set import SMALL, RealSet  # noqa: E402
from stage import Result, Stage, is_good, line  # noqa: E402

from decant.services import rundir  # noqa: E402

Job = Callable[[Stage, int, int, float], Awaitable[Result]]


@dataclass(frozen=True)
class Row:
    name: str
    job: Job
    num: int  # of its full form
    minutes: float  # its full form takes about so long
    settings: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


async def _points(stage: Stage, seed: int, num: int, minutes: float) -> Result:
    folder = Path(os.environ["DECANT_FAILPOINT_DIR"])
    return await rows.points(stage, seed, num, minutes, folder)


async def _lossy(stage: Stage, seed: int, num: int, minutes: float) -> Result:
    folder = Path(os.environ["DECANT_FAILPOINT_DIR"])
    return await rows.lossy(stage, seed, num, minutes, folder)


ROWS = [
    Row("R12", rows.constrained, 400, 4.0),
    Row("R13", rows.flapping, 600, 3.0),
    Row("R5", rows.cancels, 3000, 10.0),
    Row("poison", rows.poison, 1, 1.5, environment=rows.poison_environment()),
    Row("recovery", rows.recovery, 5, 3.0),
    Row("R4", rows.stops, 1, 4.0),
    Row("links", _lossy, 300, 6.0),
    Row("R1", rows.kills, 3000, 60.0),
    Row("R2", rows.gateways, 600, 10.0, ("gateway.instances=2",)),
    Row("R3", _points, 20, 60.0),
    Row("R6", rows.rolling, 10, 10.0),
    Row("R7", flood.overload, 1, 5.0, flood.OVERLOAD),
    Row("R8", flood.slow_readers, 200, 2.0, flood.SLOW),
    Row("R10", fuzz.frames, 1_000_000, 6.0),
    Row("R14", rows.soak, 1, 30.0),
]


@contextmanager
def started(row: Row) -> Iterator[RealSet]:
    """A set of its own for a row; nothing of it may be left afterwards."""
    with tempfile.TemporaryDirectory(prefix="dcnt-") as folder:
        points = Path(folder) / "points"
        points.mkdir()
        environment = {"DECANT_FAILPOINT_DIR": str(points), **row.environment}
        os.environ.update(environment)
        real = RealSet(Path(folder) / "run", [*SMALL, "warm_start=true", *row.settings])
        try:
            yield real
            real.stop()
            left = rundir.leftovers(real.config)
            assert not left, f"left over: {left}"
        finally:
            rundir.sweep(real.config)
            for name in environment:
                os.environ.pop(name, None)


def run(row: Row, seed: int, num: int, minutes: float, num_distinct: int = 60) -> Result:
    """One row on a set of its own. num_distinct: different requests, asked again and again."""
    began = time.monotonic()
    result: Result = {"row": row.name, "seed": seed, "num": num}
    try:
        with started(row) as real:
            stage = Stage(real, num_distinct)
            result |= asyncio.run(_call(row.job, stage, seed, num, minutes))
            if not is_good(result):
                (Path.cwd() / f"chaos-{row.name}-{seed}.log").write_text(real.logs(400))
    except AssertionError as error:
        result["faults"] = [*result.get("faults", []), str(error)[:4000]]
    result["is_good"] = is_good(result)
    result["minutes"] = round((time.monotonic() - began) / 60, 2)
    return result


async def _call(job: Job, stage: Stage, seed: int, num: int, minutes: float) -> Result:
    return await job(stage, seed, num, minutes)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the set is stopped on the way out
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [row.name for row in ROWS]
    parser.add_argument("--rows", default=",".join(names), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num", type=int, default=0, help="how much of each row; 0: all of it")
    parser.add_argument("--scale", type=float, default=1.0, help="of the full forms' num")
    parser.add_argument("--distinct", type=int, default=60, help="requests, asked again and again")
    parser.add_argument("--minutes", type=float, default=60.0, help="for all rows together")
    arguments = parser.parse_args()
    print_line = functools.partial(print, flush=True)
    end = time.monotonic() + arguments.minutes * 60
    is_all_good = True
    for name in arguments.rows.split(","):
        row = next((r for r in ROWS if r.name == name), None)
        if row is None:
            parser.error(f"no row {name}; there are {', '.join(names)}")
        left = (end - time.monotonic()) / 60
        if left < 0.5:
            print_line(line({"row": name, "skipped": "no time left"}))
            continue
        num = arguments.num or max(1, round(row.num * arguments.scale))
        row_minutes = min(left - 0.3, max(1.0, row.minutes))
        result = run(row, arguments.seed, num, row_minutes, arguments.distinct)
        print_line(line(result))
        is_all_good = is_all_good and bool(result["is_good"])
    return 0 if is_all_good else 1


if __name__ == "__main__":
    sys.exit(main())

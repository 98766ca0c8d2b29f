"""Rank 0's face of a GPU group: as on the CPU (``engine/parallel.py``), but a step travels through
the header in shared memory, and a command carries its number only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from decant.engine.gpu.draft import GpuDraftEngine
from decant.engine.gpu.engine import GpuEngine
from decant.engine.group import Followers, run_on_all
from decant.engine.interface import F32, StepPlan, StepResult
from decant.engine.parallel import GroupDraftEngine, GroupEngine, command
from decant.engine.sampler import Draw, Row
from decant.protocol.messages import PoolHandle

T = TypeVar("T")


class GpuGroupEngine(GroupEngine):
    """interface.DrawingEngine over all ranks of a group."""

    draws_on_device = True

    def __init__(self, own: GpuEngine, followers: Followers, handles: list[PoolHandle]) -> None:
        super().__init__(own, followers, handles)
        self._gpu = own

    @property
    def runner(self) -> object:
        """Of rank 0, for measuring."""
        return self._gpu.runner

    def _with_all(self, frame: bytes, local: Callable[[], T]) -> T:
        followers = self._followers
        return run_on_all(followers.steps, followers.step_lock, frame, local)

    def step(self, plan: StepPlan) -> StepResult:
        body = self._gpu.write(plan)
        return self._with_all(command("run_header", body.epoch), lambda: self._gpu.run(body))

    def step_and_draw(self, plan: StepPlan, rows: Callable[[], list[Row]]) -> list[Draw]:
        body = self._gpu.write(plan)
        frame = command("run_header", body.epoch)
        return self._with_all(frame, lambda: self._gpu.run_and_draw(body, rows))

    def head(self, slots: Sequence[int]) -> F32:
        frame = command("run_heads", list(slots))
        return self._with_all(frame, lambda: self._gpu.head(slots))

    def draw_heads(self, slots: Sequence[int], rows: list[Row]) -> list[Draw]:
        frame = command("run_heads", list(slots))
        return self._with_all(frame, lambda: self._gpu.draw_heads(slots, rows))


class GpuGroupDraft(GroupDraftEngine):
    """interface.DraftEngine over all ranks of a group."""

    def __init__(self, own: GpuDraftEngine, followers: Followers) -> None:
        super().__init__(own, followers)

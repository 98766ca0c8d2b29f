"""Who may still hold something of a request: the ledger of a record's workers. Pure.

A worker is in it from the first work that it is sent until it has answered Cancelled for the newest
attempt that it was sent, or is dead. Cancels are repeated until then.
"""

from __future__ import annotations

from dataclasses import dataclass

from decant.services.decisions import Ref

REPEAT_S = 0.5  # between two Cancels to one worker


@dataclass
class _Debt:
    held: int = 0  # newest attempt that was sent work and is wanted
    called: int = 0  # newest attempt that was sent Cancel and has not been answered
    sent_s: float = 0.0


class Debts:
    def __init__(self) -> None:
        self._debts: dict[Ref, _Debt] = {}

    def __contains__(self, worker: Ref) -> bool:
        return worker in self._debts

    def __len__(self) -> int:
        return len(self._debts)

    def workers(self) -> list[Ref]:
        return list(self._debts)

    def owe(self, worker: Ref, attempt: int) -> None:
        """It is sent work of this attempt. A Cancel of an older one stays to be answered."""
        self._debts.setdefault(worker, _Debt()).held = attempt

    def call(self, attempt: int, now: float) -> list[tuple[Ref, int]]:
        """This attempt and older ones are unwanted. Returns: to whom Cancel goes, for which one."""
        out = []
        for worker, debt in self._debts.items():
            if 0 < debt.held <= attempt:
                debt.called, debt.held, debt.sent_s = debt.held, 0, now
                out.append((worker, debt.called))
        return out

    def due(self, now: float) -> list[tuple[Ref, int]]:
        """Cancels to be repeated."""
        out = []
        for worker, debt in self._debts.items():
            if debt.called and now - debt.sent_s > REPEAT_S:
                debt.sent_s = now
                out.append((worker, debt.called))
        return out

    def answered(self, worker: Ref, attempt: int) -> None:
        """It said Cancelled."""
        debt = self._debts.get(worker)
        if debt is None:
            return
        if debt.called <= attempt:
            debt.called = 0
        if not debt.called and not debt.held:
            del self._debts[worker]

    def died(self, worker: Ref) -> None:
        """Its incarnation is gone for good."""
        self._debts.pop(worker, None)

"""A step plan stays inside the pool: slots, pages, positions, rows and token ids. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from decant.engine.interface import PrefillChunk, SlotRows, StepPlan
from decant.protocol.errors import KVPageError


@dataclass(frozen=True)
class PlanLimits:
    """What a plan may use."""

    num_pages: int
    num_slots: int
    page_tokens: int
    max_context: int
    max_drafts: int
    vocab_size: int

    def check_slot(self, slot: int) -> None:
        """Raises: KVPageError."""
        if not 0 <= slot < self.num_slots:
            raise KVPageError(f"slot {slot} is not one of {self.num_slots}")

    def check(self, plan: StepPlan) -> None:
        """Raises: KVPageError."""
        slots = set()
        work: list[SlotRows | PrefillChunk] = [*plan.decode]
        for s in plan.decode:
            if not 1 <= len(s.token_ids) <= 1 + self.max_drafts:
                raise KVPageError(f"slot {s.slot}: {len(s.token_ids)} rows in one step")
        if plan.chunk is not None:
            work.append(plan.chunk)
        for item in work:
            self._check_item(item)
            if item.slot in slots:
                raise KVPageError(f"slot {item.slot} is twice in one step")
            slots.add(item.slot)

    def _check_item(self, s: SlotRows | PrefillChunk) -> None:
        self.check_slot(s.slot)
        count = len(s.token_ids)
        end = s.start + count
        if s.start < 0 or count == 0 or end > self.max_context:
            raise KVPageError(f"slot {s.slot}: positions {s.start} .. {end - 1} are outside")
        if len(s.block_table) * self.page_tokens < end:
            raise KVPageError(f"slot {s.slot}: position {end - 1} has no page")
        for page in s.block_table:
            if not 0 <= page < self.num_pages:
                raise KVPageError(f"page {page} is not one of {self.num_pages}")
        ids = np.asarray(s.token_ids)
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise KVPageError(f"slot {s.slot}: a token id is outside the vocabulary")

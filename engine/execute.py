"""What the threads do with a plan, a pull, a seal: the engine's calls in order. No scheduling."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

import numpy as np

from decant.engine.decode_batch import DecodePlan, Mask, StepOutput, sampler_rows
from decant.engine.handoff import Pull
from decant.engine.host_tier import HostTier, Move
from decant.engine.interface import F32, DrawingEngine, Engine, page_checksums
from decant.engine.page_cache import Seal
from decant.engine.prefill_scheduler import PrefillOutput, PrefillPlan
from decant.engine.sampler import Draw, Row, Sampler
from decant.protocol.errors import HandoffError

HC_MULT = 4  # residual streams


def execute_decode(
    engine: Engine, sampler: Sampler, plan: DecodePlan, mask: Mask | None, has_draft: bool
) -> StepOutput:
    """Forks, first tokens, the step and its draws.

    has_draft: bring back residual streams. Raises: KVPageError, KernelError.
    """
    for source, target in plan.page_copies:
        engine.copy_page(source, target)
    for source, target, num_tokens in plan.slot_copies:
        engine.copy_slot(source, target, num_tokens)
    if plan.clear_slot >= 0:
        engine.clear_slot(plan.clear_slot)
    first_draws: list[Draw] = []
    draws: list[Draw] = []
    first_streams = streams = None
    drawing = cast(DrawingEngine, engine) if getattr(engine, "draws_on_device", False) else None
    if plan.firsts:
        slots = [sequence.slot for sequence in plan.firsts]
        rows = [row for s in plan.firsts for row in sampler_rows(s, (), mask)]
        if drawing is not None:
            first_draws = drawing.draw_heads(slots, rows)
            first_streams = in_slots(len(slots))
        else:
            first_draws = sampler.draw(engine.head(slots), rows)
            if has_draft:
                first_streams = engine.last_streams(slots)
    began = time.perf_counter()

    def step_rows() -> list[Row]:
        return [
            row
            for sequence, decode in zip(plan.sequences, plan.step.decode, strict=True)
            for row in sampler_rows(sequence, decode.token_ids[1:], mask)
        ]

    if plan.step.decode and drawing is not None:
        draws = drawing.step_and_draw(plan.step, step_rows)
        streams = in_slots(plan.num_rows)
    elif plan.step.decode or plan.step.chunk:
        result = engine.step(plan.step)
        if plan.step.decode:
            draws = sampler.draw(result.logits, step_rows())
            streams = result.streams if has_draft else None
    return StepOutput(first_draws, draws, first_streams, streams, time.perf_counter() - began)


def in_slots(num_rows: int) -> F32:
    """Streams that nobody carries: the draft reads them where they are."""
    return np.zeros((num_rows, HC_MULT, 0), np.float32)


def execute_moves(engine: Engine, tier: HostTier, moves: Sequence[Move]) -> bool:
    """Save evicted pages and slots, bring others back. False: a record is not there any more.

    Raises: KVPageError.
    """
    # Read first: what is saved may push them out of a small tier.
    found = {move.record: tier.get(move.record) for move in moves if move.is_restore}
    for move in moves:
        data = found.get(move.record)
        if not move.is_restore:
            if tier.touch(move.record):
                continue
            if move.slot >= 0:
                saved = engine.save_slot(move.slot, move.num_tokens)
            else:
                saved = engine.save_page(move.page, move.num_tokens)
            tier.put(move.record, saved, move.snapshot)
        elif data is not None:
            if move.slot >= 0:
                engine.load_slot(move.slot, move.num_tokens, data)
            else:
                engine.load_page(move.page, move.num_tokens, data)
    return None not in found.values()


def execute_prefill(
    engine: Engine, plan: PrefillPlan, tier: HostTier | None = None
) -> PrefillOutput:
    """Copies from the tier and the prefix cache, one chunk, checksums of what is published, the
    snapshot.

    Raises: KVPageError, KernelError.
    """
    is_complete = tier is None or execute_moves(engine, tier, plan.moves)
    if plan.hit and not is_complete:
        return PrefillOutput([], is_missing=True)
    if plan.clear_slot >= 0:
        engine.clear_slot(plan.clear_slot)
    if plan.slot_copy:
        engine.copy_slot(*plan.slot_copy)
    if plan.page_copy:
        engine.copy_page(*plan.page_copy)
    hit = plan.hit
    if hit and plan.slot_copy:
        is_same = engine.slot_checksum(plan.slot_copy[1], hit.num_tokens) == hit.slot_checksum
        if plan.page_copy:
            open_tokens = hit.num_tokens % engine.page_tokens
            checksum = engine.page_checksum(plan.page_copy[1], open_tokens)
            is_same = is_same and checksum == hit.open_checksum
        if not is_same:
            return PrefillOutput([], is_corrupt=True)
    scores = engine.step(plan.step).scores if plan.step.chunk is not None else None
    published = [page for page, _ in plan.publish]
    checksums = page_checksums(engine, published, [n for _, n in plan.publish])
    if hit and tuple(checksums[: len(hit.checksums)]) != hit.checksums:
        return PrefillOutput([], is_corrupt=True)
    slot_checksum = open_checksum = 0
    if plan.is_last or plan.snapshot:
        slot_checksum = engine.slot_checksum(plan.lane.slot, plan.end)
    if plan.snapshot:
        engine.copy_slot(*plan.snapshot)
        if plan.open_page >= 0:
            open_checksum = (
                checksums[-1]
                if plan.is_last
                else engine.page_checksum(plan.open_page, plan.end % engine.page_tokens)
            )
    return PrefillOutput(checksums, slot_checksum, open_checksum, scores=scores)


def execute_pull(engine: Engine, pull: Pull) -> None:
    """Check the pages that we have, copy the others, at the end the slot. In the copying thread.

    Raises: HandoffError.
    """
    found = page_checksums(engine, pull.kept, [engine.page_tokens] * len(pull.kept))
    for page, checksum, here in zip(pull.kept, pull.kept_checksums, found, strict=True):
        if here != checksum:
            raise HandoffError(f"cached page {page} is not what it was", page=page)
    engine.pull_pages(pull.peer, pull.source, pull.target, pull.num_tokens, pull.checksums)
    if pull.is_last:
        engine.pull_slot(
            pull.peer, pull.source_slot, pull.target_slot, pull.slot_tokens, pull.slot_checksum
        )


def execute_seal(engine: Engine, seal: Seal) -> list[int]:
    """Checksums of full pages. In the copying thread."""
    return page_checksums(engine, seal.pages, [engine.page_tokens] * len(seal.pages))

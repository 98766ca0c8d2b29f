"""Process entry of prefill, decode and draft over the fake engines: the real services otherwise.

``python -P fake_worker.py ROLE --config FILE --instance NAME``. DECANT_FAKE holds settings as
``step_s=0.01 delay_s=1``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fake_engine import FakeDraft, FakeEngine  # noqa: E402

from decant.protocol.config import Config  # noqa: E402
from decant.services import decode, draft, prefill  # noqa: E402
from decant.services.process import run  # noqa: E402

SETTINGS = dict(pair.split("=") for pair in os.environ.get("DECANT_FAKE", "").split())


def engine(config: Config, pages: int, slots: int) -> FakeEngine:
    step_s = float(SETTINGS.get("step_s", 0))
    return FakeEngine(pages, slots, config.model.max_context, config.shm_prefix, step_s)


async def prefill_main(config: Config, instance: str) -> None:
    room = config.prefill
    await prefill.serve(config, instance, lambda: engine(config, room.pages, room.slots))


async def decode_main(config: Config, instance: str) -> None:
    room = config.decode
    await decode.serve(config, instance, lambda: engine(config, room.pages, room.slots))


async def draft_main(config: Config, instance: str) -> None:
    delay_s = float(SETTINGS.get("delay_s", 0))
    await draft.serve(config, instance, lambda: FakeDraft(delay_s=delay_s))


if __name__ == "__main__":
    role = sys.argv.pop(1)
    run(role, {"prefill": prefill_main, "decode": decode_main, "draft": draft_main}[role])

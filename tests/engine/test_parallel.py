"""TP2 equals TP1 bit for bit, trunk and draft; a group lives and dies as one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from decant.engine.group import lock_rank
from decant.engine.interface import DraftSlot, PrefillChunk, SlotRows, StepPlan
from decant.engine.load import load_draft, load_engine
from decant.protocol.config import Config, DecodeConfig, DraftConfig, KVConfig, ModelConfig
from decant.protocol.errors import CheckpointError, ConfigError, HandoffError, KVPageError

GOLDEN = Path(__file__).parents[1] / "golden"


def config(name: str, tp: int, run_dir: str = "") -> Config:
    return Config(
        run_dir=run_dir,
        model=ModelConfig(path=str(GOLDEN / name), max_context=512),
        decode=DecodeConfig(tp=tp, pages=8, slots=2, max_batch=2),
        draft=DraftConfig(tp=tp, num_drafts=3),
        kv=KVConfig(page_tokens=128),
    )


def trace(name: str, tp: int) -> list[object]:
    """Bits of a prefill in chunks, drafts and 12 verify steps."""
    engine, draft = load_engine(config(name, tp), "decode"), load_draft(config(name, tp))
    try:
        draft.attach("decode", engine.pools())
        ids = np.random.default_rng(5).integers(0, engine.vocab_size, 200).astype(np.int32)
        table = (3, 1)
        for at in range(0, 200, 64):
            chunk = PrefillChunk(1, at, ids[at : at + 64], table)
            engine.step(StepPlan(0, (), chunk))
        out: list[object] = [engine.head([1]).tobytes(), engine.slot_checksum(1, 200)]
        out.append(engine.page_checksum(3, 128))
        streams, token, position = engine.last_streams([1]), 7, 200
        for i in range(12):
            slot = DraftSlot(1, position - 1, (token,), streams, 3, seed=i, temperature=0.8)
            drafts = draft.propose("decode", [slot])[0]
            rows = SlotRows(1, position, (token, *drafts), table)
            result = engine.step(StepPlan(0, (rows,)))
            out += [drafts, result.logits.tobytes(), result.streams.tobytes()]
            streams, token, position = result.streams[:1], int(result.logits[0].argmax()), 201 + i
        return out
    finally:
        draft.close()
        engine.close()


@pytest.mark.parametrize("name", ["trunk-topk", "trunk-quant"])
def test_two_ranks_give_the_same_bits(name: str) -> None:
    assert trace(name, 2) == trace(name, 1)


def test_errors_of_the_group() -> None:
    engine = load_engine(config("trunk-fp32", 2), "decode")
    try:
        with pytest.raises(HandoffError, match="not attached"):
            engine.pull_pages("nobody", [0], [0], [1], [0])
        with pytest.raises(KVPageError, match="slot 9"):
            engine.step(StepPlan(0, (SlotRows(9, 0, (1,), (0,)),)))
        assert [h.rank for h in engine.pools()] == [0, 1]
        engine.clear_slot(0)
        result = engine.step(StepPlan(0, (SlotRows(0, 0, (1,), (0,)),)))
        assert result.logits.shape == (1, engine.vocab_size)
    finally:
        engine.close()


def test_group_pulls_from_group() -> None:
    source = load_engine(config("trunk-fp32", 2), "prefill")
    source.close()
    one, two = (load_engine(config("trunk-fp32", 2), "decode") for _ in range(2))
    try:
        ids = np.arange(150, dtype=np.int32) % 100
        one.step(StepPlan(0, (), PrefillChunk(0, 0, ids, (0, 1))))
        two.attach("one", one.pools())
        sums = [one.page_checksum(0, 128), one.page_checksum(1, 22)]
        two.pull_pages("one", [0, 1], [5, 4], [128, 22], sums)
        two.pull_slot("one", 0, 1, 150, one.slot_checksum(0, 150))
        a = one.step(StepPlan(0, (SlotRows(0, 150, (3, 4), (0, 1)),))).logits
        b = two.step(StepPlan(0, (SlotRows(1, 150, (3, 4), (5, 4)),))).logits
        assert a.tobytes() == b.tobytes()
        with pytest.raises(HandoffError, match="checksum"):
            two.pull_slot("one", 0, 1, 150, 12345)
        # What one rank saved comes back on both.
        two.load_page(2, 128, one.save_page(0, 128))
        two.load_page(3, 22, one.save_page(1, 22))
        two.load_slot(0, 150, one.save_slot(0, 150))
        c = two.step(StepPlan(0, (SlotRows(0, 150, (3, 4), (2, 3)),))).logits
        assert a.tobytes() == c.tobytes()
        with pytest.raises(KVPageError, match="bytes"):
            two.load_page(2, 128, b"1234")
    finally:
        one.close()
        two.close()


def test_what_cannot_be_split() -> None:
    with pytest.raises(CheckpointError, match="num_attention_heads 6 .* 4 ranks"):
        load_engine(config("trunk-fp32", 4), "decode")


CHILD = """
import sys, time
from pathlib import Path
from decant.engine.load import load_engine
from decant.protocol.config import Config, DecodeConfig, KVConfig, ModelConfig
engine = load_engine(Config(
    run_dir=sys.argv[2], model=ModelConfig(path=sys.argv[1], max_context=512),
    decode=DecodeConfig(tp=2, pages=4, slots=2, max_batch=2), kv=KVConfig(page_tokens=128)),
    "decode")
print("ready", *[p for p in engine._followers.pids], flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("victim", ["leader", "follower"])
def test_the_group_dies_with_any_rank(tmp_path: Path, victim: str) -> None:
    run_dir = str(tmp_path)
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", CHILD, str(GOLDEN / "trunk-fp32"), run_dir],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    follower = int(child.stdout.readline().split()[1])
    os.kill(child.pid if victim == "leader" else follower, signal.SIGKILL)
    status = child.wait(timeout=10)
    assert status == (-signal.SIGKILL if victim == "leader" else 70)
    deadline = time.monotonic() + 5
    while Path(f"/proc/{follower}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{follower}").exists()
    # The successor gets both locks and unlinks the pools that were left.
    for rank in (0, 1):
        os.close(lock_rank(run_dir, "decode", rank))
    from decant.engine.load import pool_prefix

    cfg = config("trunk-fp32", 1, run_dir)
    prefix = pool_prefix(cfg, "decode")
    engine = load_engine(cfg, "decode")
    assert len(list(Path("/dev/shm").glob(f"{prefix}-0.*"))) == 1
    engine.close()
    load_engine(cfg, "decode").close()  # close gave the lock back
    for left in Path("/dev/shm").glob(f"{prefix}-1.*"):
        left.unlink()


def test_a_held_lock_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = lock_rank(str(tmp_path), "draft", 0)
    monkeypatch.setattr("decant.engine.group.LOCK_WAIT_S", 0.2)
    with pytest.raises(ConfigError, match="still holds"):
        lock_rank(str(tmp_path), "draft", 0)
    os.close(held)
    os.close(lock_rank(str(tmp_path), "draft", 0))

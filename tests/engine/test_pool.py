"""Layout, shared memory, checksums: extents only, no model."""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from decant.engine.kv_layout import ALIGN_BYTES, CSA_STATE_ROWS, HCA_STATE_ROWS, KVLayout
from decant.engine.model_shape import ModelShape, parse_shape, read_config
from decant.engine.pool import SHM, Pool
from decant.protocol.errors import ConfigError, HandoffError, KVPageError

GOLDEN = Path(__file__).parents[1] / "golden"


def shape() -> ModelShape:
    return parse_shape(read_config(GOLDEN / "trunk-topk"))


def prefix(name: str) -> str:
    return f"decant-test-{os.getpid()}-{name}"


def test_layout_is_page_major_and_aligned() -> None:
    layout = KVLayout(shape(), 256)
    assert layout.page_bytes % ALIGN_BYTES == 0
    for part in layout.page_parts.values():
        assert part.offset * 4 % ALIGN_BYTES == 0
        assert layout.page_stride % part.width == 0
    for part in layout.slot_parts.values():
        assert layout.slot_stride % part.width == 0
    assert [(p.name, p.layer, p.rows) for p in layout.page_parts.values()] == [
        ("csa", 2, 64), ("index", 2, 64), ("hca", 3, 2), ("csa", 4, 64), ("index", 4, 64),
    ]  # fmt: skip
    spans = sorted((p.offset, p.offset + p.rows * p.width) for p in layout.slot_parts.values())
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))


def test_layout_hash_tells_layouts_apart() -> None:
    one = KVLayout(shape(), 256)
    assert one.hash == KVLayout(shape(), 256).hash
    assert one.hash != KVLayout(shape(), 128).hash
    assert one.hash != KVLayout(dataclasses.replace(shape(), head_dim=96), 256).hash
    for wrong in (0, 64, 200):
        with pytest.raises(ConfigError, match="multiple of 128"):
            KVLayout(shape(), wrong)


@pytest.mark.parametrize("total", [0, 1, 3, 4, 5, 15, 16, 17, 127, 128, 129, 131, 256, 300])
def test_live_rows(total: int) -> None:
    """Model-spec 7.2, and rings that can hold them beside 7 drafts."""
    layout = KVLayout(shape(), 128)
    live = {(r.part.name, r.part.layer): r for r in layout.live_in_slot(total)}
    window = live["window", 0]
    assert (window.first, window.count) == (max(0, total - 16), min(total, 16))
    assert window.part.rows >= 16 + 8
    csa = live["csa_state", 2]
    assert csa.count == (total if total < 4 else 4 + total % 4)
    assert csa.first + csa.count == total
    assert csa.count + 8 <= CSA_STATE_ROWS
    hca = live["hca_state", 3]
    assert (hca.first, hca.count) == (total - total % 128, total % 128)
    assert hca.part.rows == HCA_STATE_ROWS
    mtp = live["mtp_window", -1]
    assert mtp.first + mtp.count == max(0, total - 1)
    assert live["streams", -1].count == min(total, 1)
    assert [r.count for r in layout.live_in_page(min(total, 128))] == [
        min(total, 128) // (128 if p.name == "hca" else 4) for p in layout.page_parts.values()
    ]


@pytest.mark.parametrize("total", [1, 5, 130, 300])
def test_pull_copies_the_live_rows(total: int) -> None:
    layout = KVLayout(shape(), 128)
    source = Pool.create(prefix("a"), layout, 4, 3)
    target = Pool.create(prefix("b"), layout, 6, 2)
    try:
        rng = np.random.default_rng(total)
        source.array[:] = rng.standard_normal(len(source.array), np.float32)
        peer = Pool.open(source.handle, layout)
        target.pull_slot(peer, 2, 1, total)
        assert target.slot_checksum(1, total) == source.slot_checksum(2, total)
        assert target.slot_checksum(0, total) != source.slot_checksum(2, total)
        target.pull_page(peer, 3, 5, 100)
        assert target.page_checksum(5, 100) == source.page_checksum(3, 100)
        assert target.page_checksum(5, 104) != source.page_checksum(3, 104)  # 26 entries, not 25
        rows = source.slot_rows("window", 0, 2)
        wanted = rows[[p % len(rows) for p in range(max(0, total - 16), total)]]
        own = target.slot_rows("window", 0, 1)
        got = own[[p % len(own) for p in range(max(0, total - 16), total)]]
        assert np.array_equal(got, wanted)
        peer.close()
    finally:
        source.close()
        target.close()


def test_checksum_is_crc32_of_the_rows() -> None:
    layout = KVLayout(shape(), 128)
    pool = Pool.create(prefix("crc"), layout, 2, 1)
    try:
        pool.array[:] = np.arange(len(pool.array), dtype=np.float32)
        data = b""
        for part in layout.page_parts.values():
            count = 128 // (128 if part.name == "hca" else 4)
            data += pool.page_rows(part.name, part.layer, 1)[:count].tobytes()
        assert pool.page_checksum(1, 128) == zlib.crc32(data)
        with pytest.raises(KVPageError, match="page 2"):
            pool.page_checksum(2, 1)
        with pytest.raises(KVPageError, match="slot 1"):
            pool.clear_slot(1)
    finally:
        pool.close()


def test_life_of_the_memory() -> None:
    layout = KVLayout(shape(), 128)
    first = Pool.create(prefix("life"), layout, 1, 1)
    path = SHM / first.handle.name
    assert path.stat().st_mode & 0o777 == 0o600
    peer = Pool.open(first.handle, layout)
    peer.array[3] = 5.0
    assert first.array[3] == 5.0
    second = Pool.create(prefix("life"), layout, 1, 1)  # the successor unlinks the old one
    assert not path.exists()
    assert second.handle.epoch != first.handle.epoch
    peer.check()  # still mapped, still alive
    first.close()
    with pytest.raises(HandoffError, match="closed by its owner"):
        peer.check()
    with pytest.raises(HandoffError, match="cannot be opened"):
        Pool.open(first.handle, layout)
    peer.close()
    second.close()
    assert not list(SHM.glob(prefix("life") + "*"))


def test_handles_that_do_not_fit() -> None:
    layout = KVLayout(shape(), 128)
    pool = Pool.create(prefix("fit"), layout, 1, 1)
    from msgspec.structs import replace

    try:
        for change, message in (
            ({"layout_hash": "0"}, "KV layout 0 differs"),
            ({"kind": "cuda_ipc"}, "cuda_ipc pool cannot be mapped"),
            ({"num_pages": 2}, "another size"),
            ({"epoch": 3}, "another epoch"),
            ({"name": "../etc/passwd"}, "not the name of a pool"),
            ({"slot_bytes": 4}, "slot size differs"),
        ):
            with pytest.raises(HandoffError, match=message):
                Pool.open(replace(pool.handle, **change), layout)
    finally:
        pool.close()


def test_a_small_dev_shm_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = KVLayout(shape(), 128)
    Space = namedtuple("Space", "f_bavail f_frsize")
    monkeypatch.setattr(os, "statvfs", lambda _: Space(1, 4096))
    with pytest.raises(ConfigError, match=r"needs \d+ MB of shared memory but /dev/shm has 0 MB"):
        Pool.create(prefix("small"), layout, 1, 1)

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "statvfs", lambda _: Space(1 << 30, 4096))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match="enlarge it or lower"):
        Pool.create(prefix("small"), layout, 1, 1)
    assert not list(SHM.glob(prefix("small") + "*"))

"""The GPU pool and its layout, in host memory."""

from __future__ import annotations

import dataclasses
import os

import msgspec
import numpy as np
import pytest
import torch

from decant.engine.gpu.layout import GpuLayout
from decant.engine.gpu.memory import SHM
from decant.engine.gpu.pool import GpuPool
from decant.engine.load import model_folder
from decant.engine.model_shape import parse_shape, read_config
from decant.engine.synthetic import config_table
from decant.protocol.config import Config
from decant.protocol.errors import ConfigError, HandoffError, KVPageError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def layout() -> GpuLayout:
    return GpuLayout(parse_shape(read_config(model_folder(Config()))), 128, 3)


def make(layout: GpuLayout, name: str) -> GpuPool:
    return GpuPool.create(f"gpu-pool-test-{os.getpid()}-{name}", layout, 3, 2, CPU)


def test_real_page_has_the_size_of_the_format() -> None:
    layout = GpuLayout(parse_shape(config_table(43, "real")), 1024, 3)
    rows = 21 * 256 * (584 + 132) + 20 * 8 * 584  # live bytes: CSA and indexer, HCA
    assert rows <= layout.page_bytes < rows * 1.03
    assert layout.page_bytes % 2304 == 0 and layout.slot_bytes % 2304 == 0
    groups = layout.slot_groups
    assert sum(g.name == "window" for g in groups) == 43
    assert [g.name for g in groups[-2:]] == ["streams", "recent"]
    assert all(g.part.data_bytes == 4 * 4096 * 2 for g in groups[-2:])


def test_live_rows_follow_the_positions(layout: GpuLayout) -> None:
    ring = layout.slots.ring_rows
    assert ring == 131
    live = layout.live_slot_rows(300)
    first = {g.name: g for g in reversed(layout.slot_groups)}

    def rows(name: str) -> set[int]:
        g = first[name]
        return set(np.flatnonzero(live[g.first : g.first + g.part.rows]).tolist())

    assert rows("window") == {p % ring for p in range(172, 300)}
    assert rows("state4") == {p % 16 for p in range(296, 300)}
    assert rows("state128") == {p % 256 for p in range(256, 300)}
    assert rows("mtp_window") == {p % ring for p in range(171, 299)}
    assert rows("streams") == {0}
    assert rows("recent") == {299 % 8}
    assert not layout.live_slot_rows(0).any()
    pages = layout.live_page_rows(9)
    assert pages.sum() == 2 * 2 * 3  # two entries of keys and of index keys in three CSA layers


def test_what_is_saved_comes_back(layout: GpuLayout) -> None:
    pool = make(layout, "save")
    try:
        pool.pages.random_(0, 255)
        pool.slots.random_(0, 255)
        pool.load_page(2, pool.save_page(1))
        pool.load_slot(0, pool.save_slot(1))
        assert pool.page_checksum(2, 128) == pool.page_checksum(1, 128)
        assert torch.equal(pool.pages[2], pool.pages[1])
        assert torch.equal(pool.slots[0], pool.slots[1])
        with pytest.raises(KVPageError, match="bytes"):
            pool.load_slot(0, b"1234")
    finally:
        pool.close()


def test_checksum_sees_live_words_only(layout: GpuLayout) -> None:
    pool = make(layout, "sum")
    try:
        pool.pages.random_(0, 255)
        before = pool.page_checksum(1, 8)
        part = layout.pages.keys[1]
        pool.pages[1, part.offset + 2 * part.data_bytes] ^= 1  # entry 2 of a live 0 and 1
        assert pool.page_checksum(1, 8) == before
        pool.pages[1, part.scale_offset + 8] ^= 1  # a scale of entry 1
        assert pool.page_checksum(1, 8) != before
        assert pool.page_checksum(1, 12) != pool.page_checksum(1, 8)
        assert 0 <= before < 1 << 32
        several = pool.page_checksums([1, 0, 1], [8, 128, 128])  # at once, a full page among them
        assert several == [pool.page_checksum(p, n) for p, n in ((1, 8), (0, 128), (1, 128))]
        part = layout.pages.keys[1]
        pool.pages[1, part.offset] ^= 1
        assert pool.page_checksum(1, 128) != several[2]
    finally:
        pool.close()


def test_pull_between_pools(layout: GpuLayout) -> None:
    one, two = make(layout, "one"), make(layout, "two")
    peer = GpuPool.open(one.handle, layout, CPU)
    try:
        one.slots[1].random_(0, 255)
        streams = torch.randn(1, 4, 256).bfloat16()
        one.write_streams(torch.tensor([1]), streams)
        two.pull_slot(peer, 1, 0)
        assert two.slot_checksum(0, 77) == one.slot_checksum(1, 77)
        assert torch.equal(two.read_streams(torch.tensor([0])), streams)
        with pytest.raises(KVPageError):
            two.pull_page(peer, 3, 0)  # the dump page is nobody's
        one.close()
        with pytest.raises(HandoffError, match="closed by its owner"):
            two.pull_slot(peer, 1, 0)
    finally:
        peer.close()
        one.close()
        two.close()
    assert not list(SHM.glob(f"gpu-pool-test-{os.getpid()}-*"))


def test_what_open_refuses(layout: GpuLayout) -> None:
    pool = make(layout, "open")
    try:
        for wrong, text in (
            ({"layout_hash": "0"}, "KV layout"),
            ({"page_bytes": 1}, "size"),
            ({"num_pages": 9}, "another size"),
            ({"name": "../etc/passwd"}, "not the name"),
            ({"name": "no-such-pool"}, "cannot be opened"),
            ({"epoch": 7}, "another epoch"),
            ({"kind": "cuda_ipc"}, "cannot be mapped"),
        ):
            with pytest.raises(HandoffError, match=text):
                GpuPool.open(msgspec.structs.replace(pool.handle, **wrong), layout, CPU)
    finally:
        pool.close()


def test_other_widths_are_refused() -> None:
    shape = parse_shape(read_config(model_folder(Config())))
    with pytest.raises(ConfigError, match="head_dim 512"):
        GpuLayout(dataclasses.replace(shape, head_dim=256), 128, 3)
    with pytest.raises(ConfigError, match="multiple of 128"):
        GpuLayout(shape, 100, 3)

"""A tiny deterministic stand-in for Engine and DraftEngine, with real bytes in a shared pool.

The "model" is a hash: the state after position p is mixed from the state at p - 1 (read from the
slot's ring) and a sum over all tokens so far (read from the pages through the block table). So a
wrong page, a wrong slot, a stale ring row or a torn copy gives other tokens, as in a real model.
Logits come from the state; the draft computes the same state ahead and is made wrong now and then.
"""

from __future__ import annotations

import mmap
import os
import secrets
import time
import zlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from decant.engine.interface import F32, DraftSlot, StepPlan, StepResult
from decant.engine.sampler import History, Row, Sampler
from decant.protocol.errors import HandoffError, KVPageError
from decant.protocol.messages import PoolHandle, Sampling

VOCAB, HIDDEN, EOS, PAGE_TOKENS, MAX_DRAFTS = 48, 4, 1, 128, 3
RING, WINDOW = 160, 128
MASK = (1 << 61) - 1
HEADER_BYTES = 64
SLOT = np.dtype(
    [("ring", "<u8", RING), ("mtp", "<u8", RING), ("position", "<i8"), ("streams", "<f4", 16)]
)


def mix(state: int, token: int) -> int:
    x = (state * 6364136223846793005 + token * 1442695040888963407 + 99) & (2**64 - 1)
    return (x ^ (x >> 29)) & MASK


def weight(position: int) -> int:
    return (position * 2654435761 + 12345) & 0xFFFFF


@lru_cache(4096)
def logits_of(state: int, total: int) -> F32:
    rng = np.random.Generator(np.random.Philox(key=[state, total]))
    return np.asarray(rng.standard_normal(VOCAB) * 2.5, np.float32)


def to_streams(state: int, total: int) -> F32:
    parts = [(x >> (16 * i)) & 0xFFFF for x in (state, total) for i in range(4)]
    return np.array([*parts, *[0] * 8], np.float32).reshape(4, HIDDEN)


def from_streams(streams: F32) -> tuple[int, int]:
    parts = [int(x) for x in streams.reshape(-1)[:8]]
    return (
        sum(p << (16 * i) for i, p in enumerate(parts[:4])),
        sum(p << (16 * i) for i, p in enumerate(parts[4:])),
    )


class Pool:
    """One shared memory file: header (epoch), pages of int32 tokens, slots."""

    def __init__(self, path: str, num_pages: int, num_slots: int, is_new: bool) -> None:
        size = HEADER_BYTES + num_pages * PAGE_TOKENS * 4 + num_slots * SLOT.itemsize
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if is_new else 0)
        descriptor = os.open(path, flags, 0o600)
        if is_new:
            os.ftruncate(descriptor, size)
        self.map = mmap.mmap(descriptor, size)
        os.close(descriptor)
        self.epoch = np.frombuffer(self.map, np.int64, 1)
        start = HEADER_BYTES
        self.pages = np.frombuffer(self.map, np.int32, num_pages * PAGE_TOKENS, start)
        self.pages = self.pages.reshape(num_pages, PAGE_TOKENS)
        self.slots = np.frombuffer(self.map, SLOT, num_slots, start + self.pages.nbytes)


class FakeEngine:
    """See the module. ``step_s`` makes steps slow, ``bad_pulls`` is how many pulls fail."""

    vocab_size, hidden_size, page_tokens, max_drafts = VOCAB, HIDDEN, PAGE_TOKENS, MAX_DRAFTS
    eos_token_id = EOS
    model_hash, kv_layout_hash = "fake", f"fake-{PAGE_TOKENS}"

    def __init__(
        self,
        num_pages: int,
        num_slots: int,
        max_context: int = 2048,
        prefix: str = "decant-fake-",
        step_s: float = 0.0,
    ) -> None:
        self.num_pages, self.num_slots, self.max_context = num_pages, num_slots, max_context
        self.step_s = step_s
        self.num_prefilled = 0
        self.bad_pulls = 0
        self._path = f"/dev/shm/{prefix}{secrets.token_hex(6)}"
        self._epoch = secrets.randbits(40) + 1
        self.pool = Pool(self._path, num_pages, num_slots, True)
        self.pool.epoch[0] = self._epoch
        self.pool.pages[:] = -7
        self._peers: dict[str, tuple[Pool, int]] = {}

    def pools(self) -> list[PoolHandle]:
        return [
            PoolHandle(
                "shm",
                self._path,
                self._epoch,
                self.num_pages,
                PAGE_TOKENS * 4,
                self.num_slots,
                SLOT.itemsize,
                self.kv_layout_hash,
            )
        ]

    def _run(self, slot: int, start: int, ids: Sequence[int], table: Sequence[int]) -> list[F32]:
        """Write and process some positions. Returns: streams of each."""
        if len(table) * PAGE_TOKENS < start + len(ids) or len(set(table)) != len(table):
            raise KVPageError("the block table does not cover the rows")
        here = self.pool.slots[slot]
        state = int(here["ring"][(start - 1) % RING]) if start else 0
        total, result = 0, []
        for page in range(-(-start // PAGE_TOKENS)):
            tokens = self.pool.pages[table[page]][: start - page * PAGE_TOKENS].astype(np.int64)
            positions = np.arange(page * PAGE_TOKENS, page * PAGE_TOKENS + len(tokens))
            total += int((tokens * ((positions * 2654435761 + 12345) & 0xFFFFF)).sum())
        for position, token in enumerate(ids, start):
            page, row = divmod(position, PAGE_TOKENS)
            self.pool.pages[table[page], row] = token
            total += token * weight(position)
            state = mix(state, token)
            here["ring"][position % RING] = state
            result.append(to_streams(state, total & MASK))
        here["position"] = start + len(ids) - 1
        here["streams"] = result[-1].reshape(-1)
        return result

    def step(self, plan: StepPlan) -> StepResult:
        if self.step_s:
            time.sleep(self.step_s)
        streams: list[F32] = []
        for rows in plan.decode:
            streams += self._run(rows.slot, rows.start, rows.token_ids, rows.block_table)
        if plan.chunk:
            chunk = plan.chunk
            ids = [int(i) for i in chunk.token_ids]
            self.num_prefilled += len(ids)
            self._run(chunk.slot, chunk.start, ids, chunk.block_table)
        logits = [logits_of(*from_streams(s)) for s in streams]
        if not streams:
            return StepResult(np.zeros((0, VOCAB), np.float32), np.zeros((0, 4, 4), np.float32))
        return StepResult(np.stack(logits), np.stack(streams))

    def head(self, slots: Sequence[int]) -> F32:
        return np.stack([logits_of(*from_streams(s)) for s in self.last_streams(slots)])

    def last_streams(self, slots: Sequence[int]) -> F32:
        return np.stack([self.pool.slots[s]["streams"].reshape(4, HIDDEN) for s in slots])

    def clear_slot(self, slot: int) -> None:
        self.pool.slots[slot] = np.zeros((), SLOT)

    def attach(self, peer: str, pools: Sequence[PoolHandle]) -> None:
        try:
            pool = Pool(pools[0].name, pools[0].num_pages, pools[0].num_slots, False)
        except OSError as error:
            raise HandoffError(f"cannot map {pools[0].name}") from error
        self._peers[peer] = (pool, pools[0].epoch)

    def detach(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def _peer(self, peer: str) -> Pool:
        if peer not in self._peers:
            raise HandoffError("the peer is not attached")
        pool, epoch = self._peers[peer]
        if pool.epoch[0] != epoch:
            raise HandoffError("another epoch")
        if self.bad_pulls > 0:
            self.bad_pulls -= 1
            raise HandoffError("a pull that shall fail")
        return pool

    def pull_pages(
        self,
        peer: str,
        source: Sequence[int],
        target: Sequence[int],
        num_tokens: Sequence[int],
        checksums: Sequence[int],
    ) -> None:
        pool = self._peer(peer)
        for a, b, num, checksum in zip(source, target, num_tokens, checksums, strict=True):
            self.pool.pages[b][:num] = pool.pages[a][:num]
            if self.page_checksum(b, num) != checksum:
                raise HandoffError(f"checksum of page {a}")

    def pull_slot(
        self, peer: str, source: int, target: int, num_tokens: int, checksum: int
    ) -> None:
        pool = self._peer(peer)
        self._copy_live(pool.slots[source], self.pool.slots[target], num_tokens)
        if self.slot_checksum(target, num_tokens) != checksum:
            raise HandoffError(f"checksum of slot {source}")

    @staticmethod
    def _live(num_tokens: int) -> np.ndarray:
        return np.arange(max(0, num_tokens - WINDOW), num_tokens) % RING

    def _copy_live(self, source: np.void, target: np.void, num_tokens: int) -> None:
        live = self._live(num_tokens)
        for name in ("ring", "mtp"):
            target[name][:] = 0xDEAD
            target[name][live] = source[name][live]
        target["position"], target["streams"] = source["position"], source["streams"]

    def page_checksum(self, page: int, num_tokens: int) -> int:
        return zlib.crc32(self.pool.pages[page][:num_tokens].tobytes())

    def slot_checksum(self, slot: int, num_tokens: int) -> int:
        here, live = self.pool.slots[slot], self._live(num_tokens)
        return zlib.crc32(here["ring"][live].tobytes() + here["streams"].tobytes())

    def copy_page(self, source: int, target: int) -> None:
        self.pool.pages[target] = self.pool.pages[source]

    def copy_slot(self, source: int, target: int, num_tokens: int) -> None:
        self._copy_live(self.pool.slots[source], self.pool.slots[target], num_tokens)

    def save_page(self, page: int, num_tokens: int) -> bytes:
        data: bytes = self.pool.pages[page][:num_tokens].tobytes()
        return data

    def save_slot(self, slot: int, num_tokens: int) -> bytes:
        live = np.zeros(1, SLOT)
        self._copy_live(self.pool.slots[slot], live[0], num_tokens)
        data: bytes = live.tobytes()
        return data

    def load_page(self, page: int, num_tokens: int, data: bytes) -> None:
        self.pool.pages[page] = -9
        self.pool.pages[page][:num_tokens] = np.frombuffer(data, np.int32)

    def load_slot(self, slot: int, num_tokens: int, data: bytes) -> None:
        self.pool.slots[slot] = np.frombuffer(data, SLOT)[0]

    def close(self) -> None:
        os.unlink(self._path)


class FakeDraft:
    """Right most of the time: it knows the model, and errs where a hash says so."""

    model_hash, kv_layout_hash = FakeEngine.model_hash, FakeEngine.kv_layout_hash
    max_drafts = MAX_DRAFTS

    def __init__(self, wrong_of_16: int = 4, delay_s: float = 0.0) -> None:
        self.wrong_of_16 = wrong_of_16
        self.delay_s = delay_s
        self._sampler = Sampler(VOCAB, EOS)
        self._pools: dict[str, Pool] = {}

    def attach(self, peer: str, pools: Sequence[PoolHandle]) -> None:
        self._pools[peer] = Pool(pools[0].name, pools[0].num_pages, pools[0].num_slots, False)

    def detach(self, peer: str) -> None:
        self._pools.pop(peer, None)

    def propose(self, peer: str, slots: Sequence[DraftSlot]) -> list[list[int]]:
        if self.delay_s:
            time.sleep(self.delay_s)
        result = []
        for slot in slots:
            ring = self._pools[peer].slots[slot.slot]["mtp"]
            for i in range(len(slot.next_tokens)):
                ring[(slot.start + i) % RING] = 77
            state, total = from_streams(slot.streams[-1])
            token = slot.next_tokens[-1]
            position = slot.start + len(slot.next_tokens)  # of that token
            drafts: list[int] = []
            sampling = Sampling(
                seed=slot.seed,
                temperature=slot.temperature,
                top_p=slot.top_p,
                top_k=slot.top_k,
                min_p=slot.min_p,
            )
            for _ in range(slot.num_drafts):
                state, total = mix(state, token), (total + token * weight(position)) & MASK
                position += 1
                row = Row(sampling, slot.choice, position, 1)
                token = self._sampler.draw(logits_of(state, total)[None], [row])[0].token_id
                if state % 16 < self.wrong_of_16:
                    token = (token + 1) % VOCAB
                drafts.append(token)
            result.append(drafts)
        return result

    def close(self) -> None:
        self._pools.clear()


def reference_tokens(
    prompt: Sequence[int], sampling: Sampling, choice: int = 0, known: Sequence[int] = ()
) -> list[int]:
    """What a choice must be, computed without any of the machinery under test but the sampler."""
    sampler = Sampler(VOCAB, EOS)
    ids, state, total = list(prompt) + list(known), 0, 0
    for position, token in enumerate(ids):
        state, total = mix(state, token), (total + token * weight(position)) & MASK
    output = list(known)
    while len(output) < sampling.max_tokens:
        history = History(VOCAB, prompt, output)
        row = Row(sampling, choice, len(ids), len(output), history)
        token = sampler.draw(logits_of(state, total)[None], [row])[0].token_id
        state, total = mix(state, token), (total + token * weight(len(ids))) & MASK
        ids.append(token)
        output.append(token)
        if (token == EOS and not sampling.ignore_eos) or token in sampling.stop_token_ids:
            break
    return output

"""The prefix cache of prefill: which token prefixes are still in the pool, pages and snapshot.

On this model a prefix is usable only where windows and compressor state are known too, so an entry
is a *snapshot*: the packed slot after ``num_tokens`` tokens, and its pages. Entries share pages.
Keys are a hash chain over blocks of 128 ids, seeded with salt, model hash and layout hash, so that
nobody finds the prefix of another tenant or another model; the ids after the last whole block are
part of the key as they are.

With a tier behind it (``host_tier.py``) an entry that is evicted is saved there, and comes back
when a prompt begins with it: ``take_moves`` are the copies, to be made before anything else touches
the pool.

Bookkeeping only; the engine copies. Nothing that a lane holds is ever evicted: a page leaves the
pool when neither an entry nor a lane holds it.
Source: DeepSeek's context caching guide (prefix units); docs/architecture.md.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass

from decant.engine.host_tier import HostTier, Move, Snapshot, page_names
from decant.engine.kv_pages import Books, State, pages_for

BLOCK_TOKENS = 128
SNAPSHOT_TOKENS = 4096  # a snapshot at each multiple
MIN_TOKENS = 32  # shorter prefixes are not worth a slot
CUT_FROM = 1024  # from here on a chunk more costs at most 2 % of a prefill
MAX_SEEN = 65536  # hashes remembered to find prefixes that several prompts share
WINDOW = 64  # lookups that ``is_useless`` looks back on ...
WINDOW_REPEATS = 16  # ... of which so many had a prefix that was seen before

Key = tuple[bytes, bytes]  # hash of the whole blocks, ids after them


@dataclass(frozen=True)
class Entry:
    """A prefix in the pool."""

    key: Key
    num_tokens: int
    slot: int
    pages: tuple[int, ...]  # covers num_tokens; the last one may go on with other tokens
    checksums: tuple[int, ...] = ()  # of the full pages
    open_checksum: int = 0  # of the last page's live rows, if it is not full
    slot_checksum: int = 0
    page_records: tuple[bytes, ...] = ()  # names of the full pages in the tier


class PrefixCache:
    """Snapshots by the hash of their prefix, least recently used first."""

    def __init__(
        self,
        books: Books,
        page_tokens: int,
        model_hash: str,
        layout_hash: str,
        max_pages: int = 0,
        tier: HostTier | None = None,
    ) -> None:
        """max_pages: kept at most; 0: as many as nobody else wants. tier: for what is evicted."""
        self.num_hits = self.num_misses = self.num_hit_tokens = self.num_evicted = 0
        self.num_corrupt = 0
        self.num_restored_tokens = 0
        self._max_pages, self._tier = max_pages, tier
        self._moves: list[Move] = []
        self._window: deque[tuple[bool, bool]] = deque(maxlen=WINDOW)  # hit, repeats a prefix
        self._books = books
        self._page_tokens = page_tokens
        self._seed = f"{model_hash}/{layout_hash}/"
        self._entries: OrderedDict[Key, Entry] = OrderedDict()
        self._tails: dict[bytes, dict[bytes, Entry]] = {}  # entries by whole blocks
        self._page_uses: Counter[int] = Counter()  # entries that hold a page
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def digests(self, ids: array[int], salt: str) -> list[bytes]:
        """Hashes of ids[:0], ids[:128], ids[:256] ...: sha256(hash before, block)."""
        result = [hashlib.sha256((self._seed + salt).encode()).digest()]
        for end in range(BLOCK_TOKENS, len(ids) + 1, BLOCK_TOKENS):
            block = ids[end - BLOCK_TOKENS : end].tobytes()
            result.append(hashlib.sha256(result[-1] + block).digest())
        return result

    @staticmethod
    def key(digests: list[bytes], ids: array[int], num_tokens: int) -> Key:
        """Of ids[:num_tokens]."""
        num_blocks = num_tokens // BLOCK_TOKENS
        return digests[num_blocks], ids[num_blocks * BLOCK_TOKENS : num_tokens].tobytes()

    def lookup(self, digests: list[bytes], ids: array[int]) -> Entry | None:
        """The longest prefix of a prompt in the pool."""
        for num_blocks in reversed(range(len(digests))):
            tails = self._tails.get(digests[num_blocks])
            if tails:
                at = num_blocks * BLOCK_TOKENS
                rest = ids[at : at + BLOCK_TOKENS].tobytes()
                found = [tail for tail in tails if rest.startswith(tail)]
                if found:
                    entry = tails[max(found, key=len)]
                    self._entries.move_to_end(entry.key)
                    return entry
        return None

    def count(self, entry: Entry | None) -> None:
        """A lane started with (or without) a cached prefix."""
        self.num_hits += entry is not None
        self.num_misses += entry is None
        self.num_hit_tokens += entry.num_tokens if entry else 0

    def points(
        self, digests: list[bytes], num_tokens: int, hit_tokens: int, chunk_tokens: int
    ) -> list[int]:
        """Where a prompt gets snapshots, ascending, beyond what it hits.

        Its end; its end cut to 128, if that costs no chunk more or the prompt is long (the last
        tokens of a prompt may be rendered otherwise in the next turn); each multiple of 4,096; the
        end of the longest prefix that an earlier prompt had too. Chunks end at these points.
        """
        num_blocks = len(digests) - 1
        wanted = set(range(SNAPSHOT_TOKENS, num_tokens + 1, SNAPSHOT_TOKENS))
        if num_tokens >= MIN_TOKENS:
            wanted.add(num_tokens)
        cut = num_blocks * BLOCK_TOKENS
        with_cut = pages_for(cut - hit_tokens, chunk_tokens) + 1
        if num_tokens >= CUT_FROM or with_cut <= pages_for(num_tokens - hit_tokens, chunk_tokens):
            wanted.add(cut)
        shared = next(
            (i for i in reversed(range(1, num_blocks + 1)) if digests[i] in self._seen), 0
        )
        wanted.add(shared * BLOCK_TOKENS)
        self._window.append((hit_tokens > 0, shared > 0))
        for digest in digests[1:]:
            self._seen[digest] = None
            self._seen.move_to_end(digest)
        while len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        return sorted(p for p in wanted if p > hit_tokens)

    @property
    def is_useless(self) -> bool:
        """Prompts repeat prefixes, and none was found: too few pages or slots, or a mistake."""
        num_repeats = sum(repeats for _, repeats in self._window)
        return num_repeats >= WINDOW_REPEATS and not any(hit for hit, _ in self._window)

    def make_room(self, num_pages: int, num_slots: int, keep: Entry | None = None) -> bool:
        """Evict until so much is free, but not ``keep``. False: the rest is held (and nothing is
        evicted).
        """
        pages, slots = self._books.pages, self._books.slots
        kept = [p for p in keep.pages if pages.state(p) is State.CACHED] if keep else []
        if pages.num_free + pages.count(State.CACHED) - len(kept) < num_pages:
            return False
        if slots.num_free + slots.count(State.CACHED) - (keep is not None) < num_slots:
            return False
        while pages.num_free < num_pages or slots.num_free < num_slots:
            self._evict(next(e for e in self._entries.values() if e is not keep))
        return True

    def _evict(self, entry: Entry) -> None:
        """Drop an entry, and save it to the tier."""
        self.num_evicted += 1
        if self._tier is not None:
            self._save(entry)
        self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        digest, tail = entry.key
        del self._entries[entry.key]
        del self._tails[digest][tail]
        if not self._tails[digest]:
            del self._tails[digest]
        self._books.slots.uncache(entry.slot)
        for page in entry.pages:
            self._page_uses[page] -= 1
            if not self._page_uses[page]:
                del self._page_uses[page]
                self._books.pages.uncache(page)

    def distrust(self, entry: Entry, is_changed: bool = True) -> None:
        """Pages or snapshot are not what they were: whatever shares them goes too. is_changed:
        else they did not come back from the tier, which is no fault.
        """
        self.num_corrupt += is_changed
        if self._tier is not None:
            self._tier.forget(_snapshot(entry))
        pages = set(entry.pages)
        for other in list(self._entries.values()):
            if other.slot == entry.slot or not pages.isdisjoint(other.pages):
                self._drop(other)

    def clear(self) -> int:
        """Forget everything, the tier's part too. Returns: number of entries in the pool."""
        num = len(self._entries)
        for entry in list(self._entries.values()):
            self._drop(entry)
        self._moves.clear()
        if self._tier is not None:
            self._tier.clear()
        self._seen.clear()
        return num

    # ---- the tier --------------------------------------------------------------------------------

    def take_moves(self) -> tuple[Move, ...]:
        """Copies between pool and tier, in order, to be made before the next step."""
        moves, self._moves = tuple(self._moves), []
        return moves

    def _save(self, entry: Entry) -> None:
        snapshot, full = _snapshot(entry), len(entry.page_records)
        for name, page in zip(entry.page_records, entry.pages, strict=False):
            self._moves.append(Move(name, self._page_tokens, page=page))
        if full < len(entry.pages):
            live = entry.num_tokens % self._page_tokens
            self._moves.append(Move(snapshot.open_page, live, page=entry.pages[full]))
        self._moves.append(
            Move(snapshot.slot, entry.num_tokens, slot=entry.slot, snapshot=snapshot)
        )

    def restore(self, digests: list[bytes], ids: array[int], hit: Entry | None) -> Entry | None:
        """An entry anew, longer than the pool's ``hit``, if the tier has one and there is room for
        it and for the prompt. Its bytes come with the next moves.
        """
        if self._tier is None:
            return None
        known = hit.num_tokens if hit else 0
        snapshot = self._tier.find(digests, ids, self._page_tokens, known)
        if snapshot is None or snapshot.key in self._entries:
            return None
        books, full = self._books, len(snapshot.pages)
        shared = hit.pages[: known // self._page_tokens] if hit else ()
        num = pages_for(snapshot.num_tokens, self._page_tokens)
        if self._max_pages and num > self._max_pages:
            return None
        num -= len(shared)
        beside = pages_for(len(ids), self._page_tokens) - full
        if not self.make_room(num + beside, 2, hit):
            return None
        pages = [*shared, *books.pages.reserve(self, num)]
        slot = books.slots.reserve(self, 1)[0]
        for i in range(len(shared), full):
            self._moves.append(
                Move(snapshot.pages[i], self._page_tokens, page=pages[i], is_restore=True)
            )
        if full < len(pages):
            live = snapshot.num_tokens % self._page_tokens
            self._moves.append(Move(snapshot.open_page, live, page=pages[full], is_restore=True))
        self._moves.append(Move(snapshot.slot, snapshot.num_tokens, slot=slot, is_restore=True))
        self.num_restored_tokens += snapshot.num_tokens - known
        books.pages.activate(self, pages[len(shared) :])
        entry = Entry(
            snapshot.key,
            snapshot.num_tokens,
            slot,
            tuple(pages),
            snapshot.checksums,
            snapshot.open_checksum,
            snapshot.slot_checksum,
            snapshot.pages,
        )
        self._add(entry)
        books.pages.release(self, pages[len(shared) :])
        self._shrink(entry)
        return entry

    # ---- snapshots of the pool -------------------------------------------------------------------

    def reserve_slot(self, key: Key, keep: Entry | None = None) -> int:
        """A slot for a snapshot that the engine is about to make; -1: known, or no slot to have.

        The caller gives it back with ``insert`` or ``abandon``.
        """
        if key in self._entries or not self.make_room(0, 1, keep):
            return -1
        return self._books.slots.reserve(self, 1)[0]

    def insert(
        self,
        digests: list[bytes],
        key: Key,
        num_tokens: int,
        slot: int,
        pages: list[int],
        checksums: list[int],
        open_checksum: int,
        slot_checksum: int,
    ) -> None:
        """The snapshot in ``slot`` is made. digests: of the lane; pages: of the lane, from its
        first on; checksums: of the full ones, in the same order.
        """
        full, blocks = num_tokens // self._page_tokens, self._page_tokens // BLOCK_TOKENS
        self._add(
            Entry(
                key,
                num_tokens,
                slot,
                tuple(pages[: pages_for(num_tokens, self._page_tokens)]),
                tuple(checksums[:full]),
                open_checksum,
                slot_checksum,
                page_names(digests[blocks : full * blocks + 1 : blocks]),
            )
        )
        self._shrink()

    def _shrink(self, keep: Entry | None = None) -> None:
        """Down to the budget."""
        while self._max_pages and len(self._page_uses) > self._max_pages:
            self._evict(next(e for e in self._entries.values() if e is not keep))

    def _add(self, entry: Entry) -> None:
        """An entry whose slot is reserved by us, and whose pages somebody holds."""
        slots = self._books.slots
        slots.activate(self, [entry.slot])
        slots.cache(entry.slot)
        slots.release(self, [entry.slot])
        for page in entry.pages:
            if not self._page_uses[page]:
                self._books.pages.cache(page)
            self._page_uses[page] += 1
        self._entries[entry.key] = entry
        self._tails.setdefault(entry.key[0], {})[entry.key[1]] = entry

    def abandon(self, slot: int) -> None:
        """The snapshot was not made."""
        self._books.slots.release(self, [slot])


def _snapshot(entry: Entry) -> Snapshot:
    """An entry, as the tier knows it."""
    return Snapshot(
        entry.key,
        entry.num_tokens,
        entry.page_records,
        entry.checksums,
        entry.open_checksum,
        entry.slot_checksum,
    )

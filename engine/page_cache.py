"""The page cache of decode: which full pages of prompts and answers are still in the pool.

The next turn of a conversation has the same first tokens, so its first pages are the same bytes;
decode keeps what it has and pulls only the rest. Slot and open page always come from prefill, so
no snapshots are needed here. Keys are a SHA-256 chain over whole pages of ids, seeded with the
request's salt, the model hash and the layout hash.

Bookkeeping only. A page in the cache has a checksum: that with which it was pulled, or one that is
computed after it was filled here (*sealed*; before that it is not found). A page that somebody
holds is never evicted, and never changes: sequences write behind their full pages only.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from decant.engine.kv_pages import Ledger


@dataclass(frozen=True)
class Seal:
    """Compute the checksums of these full pages, in the copying thread."""

    serials: tuple[int, ...]
    pages: tuple[int, ...]


@dataclass
class _Page:
    digest: bytes
    page: int
    serial: int
    checksum: int | None  # None: not sealed yet


class PageCache:
    """Full pages by the hash of all tokens up to their end, least recently used first."""

    def __init__(self, pages: Ledger, page_tokens: int, hashes: str, max_pages: int = 0) -> None:
        """hashes: model and layout. max_pages: kept at most; 0: as many as nobody else wants."""
        self.num_hit_pages = self.num_missed_pages = self.num_evicted = self.num_corrupt = 0
        self._pages, self._page_tokens = pages, page_tokens
        self._seed, self._max_pages = f"{hashes}/", max_pages
        self._entries: OrderedDict[bytes, _Page] = OrderedDict()
        self._by_page: dict[int, _Page] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._entries)

    def digests(self, ids: array[int], salt: str) -> list[bytes]:
        """Of each full page, its predecessors included."""
        digest = hashlib.sha256((self._seed + salt).encode()).digest()
        result = []
        for end in range(self._page_tokens, len(ids) + 1, self._page_tokens):
            block = ids[end - self._page_tokens : end].tobytes()
            digest = hashlib.sha256(digest + block).digest()
            result.append(digest)
        return result

    def lookup(self, digests: Sequence[bytes]) -> list[tuple[int, int]]:
        """(page, checksum) of the first pages, as far as they are here without a gap."""
        found: list[_Page] = []
        for digest in digests:
            entry = self._entries.get(digest)
            if entry is None or entry.checksum is None:
                break
            found.append(entry)
        # The first page of a chain is the most recent: what comes after it is useless without it.
        for entry in reversed(found):
            self._entries.move_to_end(entry.digest)
        return [(e.page, e.checksum) for e in found if e.checksum is not None]

    def count(self, num_hit: int, num_pages: int) -> None:
        """A lane with ``num_pages`` full pages was reserved; it had ``num_hit`` of them."""
        self.num_hit_pages += num_hit
        self.num_missed_pages += num_pages - num_hit

    def offer(
        self, digests: Sequence[bytes], pages: Sequence[int], checksums: Sequence[int] | None
    ) -> Seal | None:
        """Keep these pages, which have valid content. checksums: of each; None: not known.

        Returns: what is to be sealed, if anything.
        """
        fresh: list[_Page] = []
        for i in reversed(range(len(digests))):
            digest, page = digests[i], pages[i]
            if digest in self._entries:
                self._entries.move_to_end(digest)
            elif page not in self._by_page:
                self._serial += 1
                checksum = None if checksums is None else checksums[i]
                entry = _Page(digest, page, self._serial, checksum)
                self._pages.cache(page)
                self._entries[digest] = self._by_page[page] = entry
                fresh.append(entry)
        if self._max_pages and len(self._entries) > self._max_pages:
            for entry in list(self._entries.values())[: len(self._entries) - self._max_pages]:
                self._drop(entry)
        open_ones = [e for e in fresh if e.checksum is None and self._by_page.get(e.page) is e]
        if not open_ones:
            return None
        return Seal(tuple(e.serial for e in open_ones), tuple(e.page for e in open_ones))

    def sealed(self, seal: Seal, checksums: Sequence[int]) -> None:
        """The checksums of a seal. Pages that left the cache meanwhile are ignored."""
        for serial, page, checksum in zip(seal.serials, seal.pages, checksums, strict=True):
            entry = self._by_page.get(page)
            if entry is not None and entry.serial == serial:
                entry.checksum = checksum

    def make_room(self, num_pages: int) -> bool:
        """Evict until so many pages are free. False: the rest is held (and nothing is evicted)."""
        wanted = num_pages - self._pages.num_free
        if wanted <= 0:
            return True
        victims = []
        for entry in self._entries.values():
            if not self._pages.num_holders(entry.page):
                victims.append(entry)
                if len(victims) == wanted:
                    break
        if len(victims) < wanted:
            return False
        for entry in victims:
            self._drop(entry)
            self.num_evicted += 1
        return True

    def distrust(self, pages: Sequence[int]) -> None:
        """The content of one of these is not what it was: nobody may find them again."""
        for page in pages:
            entry = self._by_page.get(page)
            if entry is not None:
                self.num_corrupt += 1
                self._drop(entry)

    def clear(self) -> int:
        """Let go of everything. Returns: number of pages."""
        num = len(self._entries)
        for entry in list(self._entries.values()):
            self._drop(entry)
        return num

    def _drop(self, entry: _Page) -> None:
        del self._entries[entry.digest]
        del self._by_page[entry.page]
        self._pages.uncache(entry.page)

"""Which worker has which prompt prefixes in its cache, as far as the router can know: it remembers
where it sent them. A guess, never a promise: the worker looks for itself. Pure.

Keys are a BLAKE2 chain over blocks of 128 ids, seeded with the request's salt.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from decant.services.decisions import Ref

BLOCK_BYTES = 128 * 4
MAX_BLOCKS = 1024  # of one prompt: hashing more would take too long on the event loop
MAX_PREFIXES = 65536  # remembered


def digests(ids: bytes, salt: str) -> list[bytes]:
    """Of the prefixes of 128, 256 ... tokens, at most ``MAX_BLOCKS``. ids: int32 as on the wire."""
    digest = hashlib.blake2b(salt.encode(), digest_size=16).digest()
    result = []
    for at in range(0, min(len(ids) // BLOCK_BYTES, MAX_BLOCKS) * BLOCK_BYTES, BLOCK_BYTES):
        digest = hashlib.blake2b(digest + ids[at : at + BLOCK_BYTES], digest_size=16).digest()
        result.append(digest)
    return result


class Affinity:
    """The worker that got each prefix last, one of each service."""

    def __init__(self) -> None:
        self._owners: OrderedDict[bytes, dict[str, Ref]] = OrderedDict()

    def find(self, service: str, prefixes: Sequence[bytes], among: set[Ref]) -> Ref | None:
        """Of these workers, the one that has the longest of the prefixes."""
        for digest in reversed(prefixes):
            owner = self._owners.get(digest, {}).get(service)
            if owner in among:
                return owner
        return None

    def note(self, service: str, prefixes: Sequence[bytes], worker: Ref) -> None:
        """These prefixes go to this worker."""
        for digest in prefixes:
            self._owners.setdefault(digest, {})[service] = worker
            self._owners.move_to_end(digest)
        while len(self._owners) > MAX_PREFIXES:
            self._owners.popitem(last=False)

    def clear(self) -> None:
        self._owners.clear()

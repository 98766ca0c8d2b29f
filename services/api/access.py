"""Who may call what: API keys, and how much each of them may ask for.

A line of the keys file: the key, then optional limits: ``sk-abc name=ci rpm=60 tpm=100000
concurrent=4`` (requests and tokens per minute, requests at once). ``#`` begins a comment.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web

from decant.protocol.config import GatewayConfig
from decant.protocol.errors import ConfigError
from decant.services.api.errors import ApiError

LOOPBACK = ("127.0.0.1", "::1", "localhost")
LIMITS = ("rpm", "tpm", "concurrent")


class RateLimited(ApiError):
    """A key's own limit, 429."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(429, "rate_limit_exceeded", message)
        self.retry_after_s = retry_after_s


class Bucket:
    """``rate`` units a minute, at most a minute's worth saved up. May go into debt."""

    def __init__(self, rate: float, clock: Callable[[], float]) -> None:
        self._rate, self._clock = rate, clock
        self._level, self._at = rate, clock()

    def wait_s(self) -> float:
        """Seconds until something is left; 0: there is."""
        now = self._clock()
        self._level = min(self._rate, self._level + (now - self._at) * self._rate / 60)
        self._at = now
        return 0.0 if self._level >= 1 else (1 - self._level) * 60 / self._rate

    def take(self, units: float) -> None:
        self._level -= units


class Key:
    """One key: its digest, its name in logs and fair shares, its limits."""

    def __init__(self, digest: bytes, name: str, limits: dict[str, int],
                 clock: Callable[[], float] = time.monotonic) -> None:  # fmt: skip
        self.digest, self.name = digest, name
        self.num_running = 0
        self._most = limits.get("concurrent", 0)
        self._requests = Bucket(limits["rpm"], clock) if limits.get("rpm") else None
        self._tokens = Bucket(limits["tpm"], clock) if limits.get("tpm") else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around one model request. Raises: RateLimited."""
        if self._most and self.num_running >= self._most:
            raise RateLimited(f"This key may run {self._most} requests at once.", 1.0)
        for bucket, what in ((self._requests, "requests"), (self._tokens, "tokens")):
            wait_s = bucket.wait_s() if bucket else 0.0
            if wait_s:
                raise RateLimited(f"This key has used up its {what} per minute.", wait_s)
        if self._requests:
            self._requests.take(1)
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1

    def spend(self, num_tokens: int) -> None:
        """Charge the tokens of a request; known only after it ran."""
        if self._tokens:
            self._tokens.take(num_tokens)


class Keys:
    """The configured keys. Without any, everybody is let in (loopback only)."""

    def __init__(self, config: GatewayConfig) -> None:
        """Raises: ConfigError if the file is unreadable, empty, or missing on a public address."""
        self._anybody = Key(b"", "", {})
        self._keys: list[Key] = []
        if not config.keys_file:
            if config.host not in LOOPBACK:
                raise ConfigError(
                    f"gateway.host is {config.host}: set gateway.keys_file, or listen on loopback"
                )
            return
        try:
            lines = Path(config.keys_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the keys file {config.keys_file}: {error}") from error
        for number, line in enumerate(lines, 1):
            words = line.partition("#")[0].split()
            if words:
                self._keys.append(_key(words, f"{config.keys_file}, line {number}"))
        if not self._keys:
            raise ConfigError(f"the keys file {config.keys_file} holds no key")

    @property
    def is_open(self) -> bool:
        return not self._keys

    def find(self, request: web.Request) -> Key:
        """The caller's key; Bearer wins over x-api-key. Raises: ApiError 401."""
        if self.is_open:
            return self._anybody
        kind, _, bearer = request.headers.get("Authorization", "").partition(" ")
        given = bearer.strip() if kind.lower() == "bearer" else ""
        digest = _digest(given or request.headers.get("x-api-key", ""))
        found: Key | None = None
        for key in self._keys:  # all of them, so that the time tells nothing
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None:
            raise ApiError(401, "invalid_api_key", "Missing or wrong API key.")
        return found


def _key(words: list[str], where: str) -> Key:
    digest = _digest(words[0])
    name, limits = digest.hex()[:12], {}
    for word in words[1:]:
        field, _, value = word.partition("=")
        if field == "name" and value:
            name = value
        elif field in LIMITS and value.isascii() and value.isdigit() and int(value):
            limits[field] = int(value)
        else:
            raise ConfigError(f"{where}: {word!r} is not name= or one of {', '.join(LIMITS)}=")
    return Key(digest, name, limits)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()

"""Who may call what: API keys and limits on what runs at once."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from aiohttp import web

from decant.protocol.config import GatewayConfig
from decant.protocol.errors import ConfigError
from decant.services.api.errors import ApiError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Keys:
    """The configured keys, as digests. Without any, everybody is let in (loopback only)."""

    def __init__(self, config: GatewayConfig) -> None:
        """Raises: ConfigError if the file is unreadable, empty, or missing on a public address."""
        self._digests: list[bytes] = []
        if not config.keys_file:
            if config.host not in LOOPBACK:
                raise ConfigError(
                    f"gateway.host is {config.host}: set gateway.keys_file, or listen on loopback"
                )
            return
        try:
            lines = Path(config.keys_file).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ConfigError(f"keys file {config.keys_file}: {error.strerror}") from error
        keys = [line.strip() for line in lines]
        self._digests = [_digest(k) for k in keys if k and not k.startswith("#")]
        if not self._digests:
            raise ConfigError(f"keys file {config.keys_file} holds no key")

    @property
    def is_open(self) -> bool:
        return not self._digests

    def tenant(self, request: web.Request) -> str:
        """The caller's name: a few digits of its key's digest. Raises: ApiError 401."""
        if self.is_open:
            return ""
        kind, _, bearer = request.headers.get("Authorization", "").partition(" ")
        given = bearer.strip() if kind.lower() == "bearer" else ""
        digest = _digest(given or request.headers.get("x-api-key", ""))
        found = b""
        for known in self._digests:  # all of them, so that time tells nothing
            if hmac.compare_digest(known, digest):
                found = known
        if not found:
            raise ApiError(401, "invalid_api_key", "Missing or wrong API key.")
        return found.hex()[:12]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()

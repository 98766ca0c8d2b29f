"""The router's own request: a short prompt through prefill, hand-off and decode, read by nobody.

It proves a chain before ``/ready`` says yes, and again when the set is idle. Pure: says when one is
due and keeps the result; the request itself is an ordinary record without a gateway.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import structlog

from decant.protocol import messages as m
from decant.protocol.config import RouterConfig
from decant.protocol.wire import pack_ids
from decant.services.membership import Member

TIMEOUT_S = 15.0
RETRY_S = 1.0
MAX_FAILURES = 2  # in a row, of a chain that worked before: then it is not ready
IDS = tuple(range(16, 32))  # any text will do

log = structlog.get_logger()


class Canary:
    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self.request_id = ""  # of the one under way
        self.why = "no canary has run"  # "" = the last one passed
        self.num_failures = 0  # in a row
        self._tried_s = float("-inf")
        self._proved_s = float("-inf")

    def proved(self, now: float) -> None:
        """A request, ours or another, has shown that a chain works. That outweighs a canary that
        got no place in a full set.
        """
        self._proved_s, self.why, self.num_failures = now, "", 0

    def objection(self, workers: Sequence[Sequence[Member]]) -> str:
        """Why a set with these usable workers (a group per service) is not ready; empty: it is."""
        if not self._config.canary:
            return ""
        is_proven = all(any(not x.is_on_probation for x in group) for group in workers)
        if is_proven and self.num_failures < MAX_FAILURES:
            return ""
        return f"the canary has not passed: {self.why or 'it is running'}"

    def due(
        self, workers: Sequence[Sequence[Member]], is_idle: bool, now: float
    ) -> m.Generate | None:
        """The canary to start now, if one is due. Its prompt is ``blob``. is_idle: there is no
        other request.
        """
        if not self._config.canary or self.request_id or not all(workers):
            return None
        is_new = any(all(x.is_on_probation for x in group) for group in workers)
        is_urgent = is_new or self.num_failures > 0
        if not is_urgent and (not is_idle or now - self._proved_s <= self._config.canary_s):
            return None
        if now - self._tried_s < (RETRY_S if is_urgent else self._config.canary_s):
            return None
        self.request_id, self._tried_s = "canary-" + secrets.token_hex(8), now
        sampling = m.Sampling(temperature=0.0, max_tokens=2, ignore_eos=True)
        deadline_ms = int((now + TIMEOUT_S) * 1e3)
        return m.Generate(
            self.request_id, 1, len(IDS), sampling, tokenizer="", deadline_ms=deadline_ms
        )

    @staticmethod
    def blob(workers: Sequence[Sequence[Member]]) -> bytes:
        """Prompt ids, within everybody's vocabulary."""
        sizes = [x.hello.limits.get("vocab_size", 1 << 30) for group in workers for x in group]
        return pack_ids(i % max(1, min(sizes)) for i in IDS)

    def ended(self, failed: m.Failed | None) -> str:
        """The one under way is closed. Returns: "passed" or "failed"."""
        self.request_id = ""
        if failed is None:
            self.why, self.num_failures = "", 0
            return "passed"
        self.why = failed.message
        self.num_failures += 1
        log.warning("canary failed", why=self.why, failures=self.num_failures)
        return "failed"

"""The router's Prometheus metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from decant.services import metrics

if TYPE_CHECKING:
    from decant.services.dispatch import Dispatcher
    from decant.services.sockets import Outbox, RouterSocket


class RouterMetrics(Collector):
    """Counters of what happened, and gauges read from the Dispatcher when the page is asked for."""

    def __init__(self, instance: str) -> None:
        self.registry = metrics.registry("router", instance)
        self._counters = {
            what: Counter(f"decant_{name}", text, labels, registry=self.registry)
            for what, name, text, labels in (
                ("resumes", "resumes", "Attempts lost and resumed", ["cause", "stage"]),
                ("preempted", "preemptions", "Requests put out of decode's full pool", []),
                ("failed", "requests_failed", "Requests that failed in the router", ["code"]),
                ("fenced", "fenced", "Processes killed by the router", ["svc"]),
                ("stale", "stale_messages", "Messages of older attempts or the dead", ["type"]),
                ("unexpected", "unexpected_messages", "Messages from the wrong side", ["type"]),
                ("unsent", "unsent_messages", "Messages that could not be delivered", ["type"]),
                ("refused", "refused_reservations", "Reservations refused", ["reason"]),
                ("canary", "canary", "Canaries", ["result"]),
            )
        }
        self._dispatcher: Dispatcher | None = None
        self._outbox: Outbox | None = None
        self._socket: RouterSocket | None = None

    def attach(self, dispatcher: Dispatcher, outbox: Outbox, socket: RouterSocket) -> None:
        """Where the gauges are read from."""
        self._dispatcher, self._outbox, self._socket = dispatcher, outbox, socket
        self.registry.register(self)

    def count(self, what: str, labels: tuple[str, ...]) -> None:
        """An event of ``decisions.Count``."""
        counter = self._counters[what]
        (counter.labels(*labels) if labels else counter).inc()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        d, outbox, socket = self._dispatcher, self._outbox, self._socket
        assert d is not None and outbox is not None and socket is not None
        now = time.monotonic()

        def one(name: str, text: str, value: float) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"decant_{name}", text, value)

        yield one(
            "ready", "1 if a complete chain exists and admission is open", not d.why_not_ready()
        )
        yield one("queue_depth", "Lanes waiting for a reservation", len(d.admission))
        yield one("router_outbox", "Messages waiting to be sent", len(outbox))
        yield one("router_lost_messages", "Messages refused or undelivered", outbox.num_lost)
        yield one("router_bad_frames", "Frames that could not be decoded", socket.num_bad_frames)
        yield one("void_ticks", "Watchdog ticks without a verdict", d.membership.num_void_ticks)
        stages = GaugeMetricFamily("decant_requests", "Requests by state", labels=["state"])
        for state, number in d.stages().items():
            stages.add_metric([state], number)
        yield stages
        names = ["svc", "instance"]
        age = GaugeMetricFamily(
            "decant_heartbeat_age_seconds", "Since the last heartbeat", labels=names
        )
        usable = GaugeMetricFamily(
            "decant_worker_usable", "1 if it may be given work", labels=names
        )
        pages = GaugeMetricFamily(
            "decant_ledger", "What a worker reports in its heartbeat", labels=[*names, "name"]
        )
        for member in d.membership.all():
            labels = [member.service, member.instance]
            age.add_metric(labels, now - member.heard_s)
            usable.add_metric(labels, member.is_usable)
            for name, value in member.beat.stats.items():
                pages.add_metric([*labels, name], value)
        yield from (age, usable, pages)

"""What ``decant status`` and the administrator's page show of the router."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decant.services.dispatch import Dispatcher


def state(dispatcher: Dispatcher) -> dict[str, Any]:
    """What ``decant status`` shows."""
    now = dispatcher.now()
    why = dispatcher.why_not_ready()
    sums: Counter[str] = Counter()
    processes = []
    for x in sorted(dispatcher.membership.all(), key=lambda x: x.instance):
        sums.update({k: v for k, v in x.beat.stats.items() if k.startswith("pages_")})
        processes.append(
            {
                "service": x.service,
                "instance": x.instance,
                "pid": x.hello.pid,
                "incarnation": x.incarnation,
                "build": x.hello.build,
                "health": x.health.value,
                "heartbeat_age_s": round(now - x.heard_s, 3),
                "uptime_s": round(now - x.joined_s, 3),
                "is_ready": x.beat.is_ready,
                "is_draining": x.is_draining,
                "is_on_probation": x.is_on_probation,
                "is_busy": x.beat.is_busy,
                "step": x.beat.step,
                "loop_lag_ms": x.beat.loop_lag_ms,
                "why": x.fenced_why or x.beat.why,
                "endpoint": x.hello.endpoint,
                "stats": x.beat.stats,
            }
        )
    return {
        "router": dispatcher.incarnation,
        "is_ready": not why,
        "why": why,
        "processes": processes,
        "refused": dict(dispatcher.membership.refusals),
        "requests": dict(dispatcher.stages()),
        "queued": len(dispatcher.admission),
        "pages": dict(sums),
        "canary": {
            "is_ok": not dispatcher.canary.why,
            "why": dispatcher.canary.why,
            "failures": dispatcher.canary.num_failures,
        },
    }

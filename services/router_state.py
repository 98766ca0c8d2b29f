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


def ledger(dispatcher: Dispatcher) -> dict[str, Any]:
    """Who holds what: pages and slots of each worker by state (from its last heartbeat), and each
    request with its lanes and the workers that still owe a Cancelled for it."""
    workers = []
    for x in sorted(dispatcher.membership.all(), key=lambda x: x.instance):
        if "num_pages" not in x.hello.limits:
            continue
        entry: dict[str, Any] = {"instance": x.instance, "incarnation": x.incarnation}
        for kind in ("pages", "slots"):
            prefix = f"{kind}_"
            states = {
                name.removeprefix(prefix): int(value)
                for name, value in x.beat.stats.items()
                if name.startswith(prefix)
            }
            total = x.hello.limits[f"num_{kind}"]
            entry[kind] = {
                "total": total,
                "states": states,
                "is_balanced": not states or sum(states.values()) == total,
            }
        workers.append(entry)
    requests = [
        {
            "request_id": record.request_id,
            "state": record.stage.name.lower(),
            "attempt": record.attempt,
            "num_prompt_tokens": record.generate.num_prompt_tokens,
            "num_resumes": record.num_resumes,
            "lanes": [
                {
                    "lane": lane.lane,
                    "choices": lane.choices,
                    "state": lane.state.name.lower(),
                    "prefill": lane.prefill.instance if lane.prefill else "",
                    "decode": lane.decode.instance if lane.decode else "",
                }
                for lane in record.lanes.values()
            ],
            "debtors": [worker.instance for worker in record.debtors()],
        }
        for record in list(dispatcher.records.values())
    ]
    return {"router": dispatcher.incarnation, "workers": workers, "requests": requests}

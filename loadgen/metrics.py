"""The metrics, each a pure function with its formula. ``None`` where a metric has no meaning.

``r`` is one record; ``records`` any number of them. Nanoseconds in, nanoseconds out, rates per
second. Token counts come from the server's ``usage``, never from the number of chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct

from decant.loadgen.plan import Record

NS = 1_000_000_000


class Slo(Struct, frozen=True, omit_defaults=True):
    """Bounds of one class; 0: no bound."""

    name: str = ""
    share: float = 1.0  # of the requests
    ttft_ns: int = 0
    tpot_ns: int = 0
    e2e_ns: int = 0
    stall_ns: int = 0


# ---- one request ---------------------------------------------------------------------------------


def ttft_ns(r: Record) -> int | None:
    """TTFT = first token received - request sent."""
    return r.chunk_ns[0] - r.sent_ns if r.chunk_ns else None


def due_ttft_ns(r: Record) -> int | None:
    """First token received - moment at which the request was due.

    What a user at the schedule's time saw: it counts the generator's own lateness and any wait for
    a connection, so a slow server cannot hide its queue in ours (coordinated omission).
    """
    return r.chunk_ns[0] - r.due_ns if r.chunk_ns else None


def e2e_ns(r: Record) -> int | None:
    """E2E = last token received - request sent; of answers that ended well."""
    return r.chunk_ns[-1] - r.sent_ns if r.chunk_ns and r.outcome == "ok" else None


def tpot_ns(r: Record) -> float | None:
    """TPOT = (last - first) / (tokens - 1), at least two tokens, tokens from ``usage``."""
    if r.outcome != "ok" or not r.chunk_ns or r.num_output_tokens < 2:
        return None
    return (r.chunk_ns[-1] - r.chunk_ns[0]) / (r.num_output_tokens - 1)


def itl_ns(r: Record) -> list[int]:
    """ITL = gaps between consecutive arrivals of tokens.

    Tokens that arrive in one chunk (one verify step) count as one arrival.
    """
    return [b - a for a, b in zip(r.chunk_ns, r.chunk_ns[1:], strict=False)]


def longest_stall_ns(r: Record) -> int | None:
    """The longest gap between two arrivals of one stream."""
    return max(itl_ns(r), default=None)


def lateness_ns(r: Record) -> int:
    """The generator's own lateness: request sent - request due."""
    return r.sent_ns - r.due_ns


def handoff_share(r: Record) -> float | None:
    """Hand-off time / TTFT, where the server gives stages."""
    ttft = ttft_ns(r)
    if "handoff" not in r.stages_ms or not ttft:
        return None
    return r.stages_ms["handoff"] * 1e6 / ttft


def is_good(r: Record, slo: Slo) -> bool:
    """Ended well and within every bound of its class; TTFT and E2E from the moment it was due."""
    if r.outcome != "ok" or not r.chunk_ns:
        return False
    checks = (
        (slo.ttft_ns, r.chunk_ns[0] - r.due_ns),
        (slo.e2e_ns, r.chunk_ns[-1] - r.due_ns),
        (slo.tpot_ns, tpot_ns(r)),
        (slo.stall_ns, longest_stall_ns(r)),
    )
    return all(not bound or value is None or value <= bound for bound, value in checks)


# ---- many requests -------------------------------------------------------------------------------


def percentile(values: Sequence[float], q: float) -> float | None:
    """Linear interpolation at rank ``q / 100 (n - 1)`` of the sorted values; None of none."""
    if not values:
        return None
    ordered = sorted(values)
    rank = q / 100 * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def duration_s(records: Sequence[Record]) -> float:
    """Last end - first send, of requests that were sent. 0 of none."""
    sent = [r for r in records if r.sent_ns]
    if not sent:
        return 0.0
    return (max(r.end_ns for r in sent) - min(r.sent_ns for r in sent)) / NS


def offered_rate(records: Sequence[Record]) -> float | None:
    """(requests - 1) / (last due - first due): the load that the schedule asked for."""
    due = [r.due_ns for r in records]
    if len(due) < 2 or max(due) == min(due):
        return None
    return (len(due) - 1) * NS / (max(due) - min(due))


def request_throughput(records: Sequence[Record]) -> float | None:
    """Requests that ended well / duration."""
    return _per_second(sum(r.outcome == "ok" for r in records), records)


def output_throughput(records: Sequence[Record]) -> float | None:
    """Output tokens (``usage``) of requests that ended well / duration."""
    return _per_second(
        sum(max(r.num_output_tokens, 0) for r in records if r.outcome == "ok"), records
    )


def total_throughput(records: Sequence[Record]) -> float | None:
    """(Prompt + output tokens) of requests that ended well / duration."""
    return _per_second(
        sum(
            max(r.num_prompt_tokens, 0) + max(r.num_output_tokens, 0)
            for r in records
            if r.outcome == "ok"
        ),
        records,
    )


def goodput(records: Sequence[Record], slos: dict[str, Slo]) -> float | None:
    """Requests within the SLO of their class / duration."""
    return _per_second(num_good(records, slos), records)


def num_good(records: Iterable[Record], slos: dict[str, Slo]) -> int:
    """Requests within the SLO of their class."""
    return sum(is_good(r, slos.get(r.slo, Slo())) for r in records)


def attainment(records: Sequence[Record], slos: dict[str, Slo]) -> float | None:
    """Requests within their SLO / requests that were not cancelled by the plan.

    Errors count against it.
    """
    counted = [r for r in records if r.outcome != "cancelled"]
    return num_good(counted, slos) / len(counted) if counted else None


def acceptance_length(records: Iterable[Record]) -> float | None:
    """Tokens per verify step, bonus token included: 1 + accepted / steps."""
    counted = [r for r in records if r.num_steps]
    steps = sum(r.num_steps for r in counted)
    return 1 + sum(r.num_accepted for r in counted) / steps if steps else None


def acceptance_rate(records: Iterable[Record]) -> float | None:
    """Accepted / drafted tokens."""
    counted = list(records)
    drafted = sum(r.num_drafted for r in counted)
    return sum(r.num_accepted for r in counted) / drafted if drafted else None


def concurrency(records: Sequence[Record]) -> float | None:
    """Mean number in flight: sum of (end - sent) / duration (Little's law)."""
    return _per_second(sum(r.end_ns - r.sent_ns for r in records if r.sent_ns) / NS, records)


def _per_second(amount: float, records: Sequence[Record]) -> float | None:
    took = duration_s(records)
    return amount / took if took > 0 else None

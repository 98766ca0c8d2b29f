"""What a run sends (``Request``) and what came of it (``Record``): the two structs between the
planner, the worker processes and the metrics.

Time is integer nanoseconds. A plan counts from the run's start, a record holds CLOCK_MONOTONIC of
this host. Nothing here knows HTTP or how a schedule is drawn.
"""

from __future__ import annotations

from msgspec import Struct


class Request(Struct, frozen=True, omit_defaults=True):
    """One HTTP request of the plan.

    A request with ``due_ns >= 0`` is sent at that time whatever else is going on (open loop). One
    with ``due_ns == -1`` waits: a later turn of a session for the answer of the turn before and
    ``think_ns`` more, the first turn of a session (or a lone request) for a free user (closed
    loop).
    """

    index: int
    due_ns: int = -1
    session: int = -1  # requests of one session share a conversation; -1: alone
    turn: int = 0
    think_ns: int = 0
    system: str = ""
    user: str = ""
    ids: list[int] = []  # completions with token ids instead of text
    max_tokens: int = 64
    content: str = "prose"  # content class, for acceptance by class
    slo: str = ""  # SLO class
    cancel_after: int = 0  # hang up after this many chunks with tokens; 0: never
    seed: int = 0
    expect: str = ""  # ``answer_hash`` of the fault-free answer; empty: not checked


class Target(Struct, frozen=True, omit_defaults=True):
    """The server and how each request's body is made."""

    url: str  # base, "http://127.0.0.1:8000"
    model: str = ""
    api: str = "chat"  # "chat" or "completions"
    key: str = ""
    timeout_ns: int = 600_000_000_000
    temperature: float = 0.0
    ignore_eos: bool = False
    ask_usage: bool = True
    extra: dict[str, object] = {}  # merged into every body


class Job(Struct, frozen=True):
    """What one worker process gets on its standard input."""

    target: Target
    requests: list[Request]
    start_ns: int  # CLOCK_MONOTONIC at which the plan's 0 is
    concurrency: int = 0  # closed loop: users of this worker; 0: open loop
    max_in_flight: int = 10_000


class Record(Struct, omit_defaults=True):
    """What happened to one request. Times are 0 where the event did not happen.

    outcome: ok, cancelled (by the plan), error (HTTP status or an error event), timeout, lost (the
    connection ended early or never opened).
    """

    index: int
    content: str = ""
    slo: str = ""
    due_ns: int = 0  # when it should have been sent; closed loop: when it was
    sent_ns: int = 0  # written to an open connection, or began to open one
    chunk_ns: list[int] = []  # arrival of each chunk that carried tokens
    end_ns: int = 0
    outcome: str = "lost"
    status: int = 0
    error: str = ""
    finish_reason: str = ""
    num_prompt_tokens: int = -1  # from ``usage``; -1: the server gave none
    num_output_tokens: int = -1
    num_cached_tokens: int = 0
    stages_ms: dict[str, float] = {}  # decant only
    delivery_ms: float = -1.0  # decant only: median over token batches, decode's step to our socket
    num_drafted: int = 0
    num_accepted: int = 0
    num_steps: int = 0
    num_resumes: int = 0
    answer_hash: str = ""
    is_checked: bool = False  # the answer was compared with the fault-free one
    is_match: bool = False
    text: str = ""  # of an answer that differed: its beginning
    turn: int = 0  # of its session, from 0


class Progress(Struct, frozen=True, omit_defaults=True):
    """A worker's report, a few times a second."""

    num_sent: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_in_flight: int = 0
    num_tokens: int = 0  # output tokens of finished requests
    ttft_ns: list[int] = []  # of first tokens since the last report
    late_ns: list[int] = []  # lateness of sends since the last report


class Result(Struct, frozen=True):
    """A worker's last words."""

    records: list[Record]
    cpu_s: float  # processor time of the worker, to tell a slow server from a slow generator

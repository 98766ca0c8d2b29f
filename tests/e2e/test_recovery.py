"""Kill -9 of every process while streams run: they go on, exact, and nothing leaks."""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from real_set import RealSet

PROMPTS = [
    "Sort these numbers: 52, 17, 88, 3, 41, 9",
    "What is 312 + 455?",
    "Copy this: river stone lamp green seven",
    "Reverse this: a b c d e f g h",
]
FIELDS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 160, "ignore_eos": True},
    {"temperature": 1.0, "top_p": 0.95, "seed": 7, "max_tokens": 160, "ignore_eos": True},
]
KILLED = ["decode-0", "prefill-0", "draft-0", "tokenizer-0", "router-0"]


def all_answers(real_set: RealSet) -> list[str]:
    """One answer of every prompt in every way of sampling, asked at once."""
    jobs = [(p, f) for p in PROMPTS for f in FIELDS]
    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(lambda job: real_set.chat(job[0], **job[1])[0], jobs))


@pytest.fixture(scope="module")
def oracle(shared_set: RealSet) -> list[str]:
    """The answers without any disturbance."""
    shared_set.wait_ready()
    return all_answers(shared_set)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", KILLED)
def test_kill_in_mid_stream_changes_no_token(
    name: str, real_set: RealSet, oracle: list[str]
) -> None:
    killed: list[int] = []

    def kill() -> None:
        time.sleep(0.6)
        killed.append(real_set.kill(name))

    killer = threading.Thread(target=kill)
    killer.start()
    answers = all_answers(real_set)
    killer.join()
    assert killed
    assert answers == oracle


@pytest.mark.timeout(240)
def test_a_stopped_decode_is_fenced_and_replaced(real_set: RealSet, oracle: list[str]) -> None:
    """SIGSTOP: no heartbeat, so the router kills it and the streams go on at its successor."""
    first = real_set.pid("decode-0")
    timer = threading.Timer(0.6, lambda: real_set.kill("decode-0", signal.SIGSTOP))
    timer.start()
    answers = all_answers(real_set)
    timer.join()
    assert answers == oracle
    assert real_set.pid("decode-0") != first


def open_stream(real_set: RealSet, **fields: Any) -> http.client.HTTPConnection:
    """A streamed request of which only the first line was read."""
    host, _, port = real_set.url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    body = {
        "model": real_set.model,
        "messages": [{"role": "user", "content": PROMPTS[0]}],
        "stream": True,
        **fields,
    }
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    assert response.status == 200
    response.readline()
    return connection


def test_disconnect_frees_the_pages(real_set: RealSet) -> None:
    connections = [
        open_stream(real_set, max_tokens=4000, ignore_eos=True, n=2, seed=i) for i in range(4)
    ]
    assert not real_set.is_clean()
    for connection in connections:
        if connection.sock:
            connection.sock.close()
        connection.close()
    real_set.wait_clean(5.0)


@pytest.mark.timeout(240)
def test_speculation_changes_no_token(start_set: Callable[..., RealSet], oracle: list[str]) -> None:
    plain = start_set("draft.enabled=false")
    try:
        assert all_answers(plain) == oracle
        plain.wait_clean()
    finally:
        plain.stop()


@pytest.mark.timeout(240)
def test_two_ranks_a_group_change_no_token(
    start_set: Callable[..., RealSet], oracle: list[str]
) -> None:
    """Profile demo-tp2: prefill, decode and draft are two processes each."""
    real_set = start_set(profile="demo-tp2")
    try:
        assert all_answers(real_set) == oracle
        real_set.wait_clean()
    finally:
        real_set.stop()


@pytest.mark.timeout(240)
def test_32_streams_of_ragged_lengths(real_set: RealSet) -> None:
    """Twice as many as a step takes: none waits for another's end, all are exact and counted."""
    jobs = [
        (PROMPTS[i % 4], {"max_tokens": 5 + 4 * i, "ignore_eos": True, "seed": i, "temperature": 1})
        for i in range(32)
    ]

    def ask(job: tuple[str, dict[str, Any]]) -> tuple[str, int]:
        content, reasoning, figures = real_set.chat(job[0], **job[1])
        return content + reasoning, int(figures.usage["completion_tokens"])

    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(ask, jobs))
    assert [num for _, num in together] == [job[1]["max_tokens"] for job in jobs]
    alone = [ask(job) for job in jobs[::8]]
    assert alone == together[::8]

"""The queue: order, bounds, fair shares."""

from __future__ import annotations

from collections import Counter

import pytest

from decant.protocol.config import RouterConfig
from decant.protocol.errors import QueueFull
from decant.services.admission import Admission, Key


def admission(max_queued: int = 8, resumes_per_s: float = 1000.0) -> Admission:
    return Admission(RouterConfig(max_queued=max_queued, resumes_per_s=resumes_per_s))


def push(queue: Admission, name: str, **rest: object) -> None:
    arguments: dict[str, object] = {"tenant": "a", "priority": 0, "cost": 10, **rest}
    queue.push(Key(name, 0), **arguments)  # type: ignore[arg-type]


def drain(queue: Admission, now: float = 1.0) -> list[str]:
    """Names in the order of service."""
    names = []
    while (waiting := queue.next(now)) is not None:
        names.append(queue.pop(waiting.key, now).key.request_id)
    return names


def test_first_come_first_served_within_a_tenant() -> None:
    queue = admission()
    for name in "abc":
        push(queue, name)
    assert queue.position("c") == 2 and queue.position("x") == -1
    assert drain(queue) == ["a", "b", "c"]
    assert len(queue) == 0


def test_suspects_then_resumes_then_priority() -> None:
    queue = admission()
    push(queue, "low", priority=-1)
    push(queue, "plain")
    push(queue, "high", priority=5)
    push(queue, "resumed", is_resume=True)
    push(queue, "suspect", is_resume=True, is_suspect=True)
    assert drain(queue) == ["suspect", "resumed", "high", "plain", "low"]


def test_tenants_share_by_tokens_not_by_requests() -> None:
    queue = admission(max_queued=100)
    for i in range(30):
        push(queue, f"big{i}", tenant="big", cost=100)
        push(queue, f"small{i}", tenant="small", cost=25)
    served: Counter[str] = Counter()
    for name in drain(queue)[:30]:
        served[name.rstrip("0123456789")] += 1
    assert served["small"] in (23, 24, 25) and served["big"] == 30 - served["small"]


def test_a_newcomer_is_not_behind_the_crowd_and_earns_no_credit() -> None:
    queue = admission(max_queued=100)
    for i in range(20):
        push(queue, f"a{i}", tenant="a")
    for _ in range(10):
        waiting = queue.next(1.0)
        assert waiting is not None
        queue.pop(waiting.key, 1.0)
    for i in range(20):
        push(queue, f"b{i}", tenant="b")
    order = drain(queue)
    assert order.index("b0") <= 1  # at once
    head = Counter(name[0] for name in order[:10])
    assert head["a"] == head["b"] == 5  # but from now on half and half


def test_nobody_before_its_time() -> None:
    queue = admission()
    push(queue, "later", not_before_s=5.0)
    assert queue.next(4.9) is None
    assert drain(queue, 5.0) == ["later"]


def test_what_was_refused_keeps_its_place_and_its_money() -> None:
    queue = admission()
    push(queue, "a1", tenant="a", cost=50)
    push(queue, "a2", tenant="a", cost=50)
    push(queue, "b1", tenant="b", cost=50)
    popped = queue.pop(Key("a1", 0), 1.0)
    queue.put_back(popped, 2.0)
    assert drain(queue, 1.5) == ["a2", "b1"]  # not its time yet
    assert drain(queue, 2.0) == ["a1"]


def test_bound_and_retry_after() -> None:
    queue = admission(max_queued=3)
    for i in range(3):
        assert queue.admit("a") == ""
        push(queue, f"a{i}")
    assert not queue.is_open
    with pytest.raises(QueueFull) as error:
        queue.admit("a")
    assert error.value.status == 429 and 1.0 <= error.value.retry_after_s <= 30.0


def test_few_free_places_are_told() -> None:
    queue = admission(max_queued=6)
    told = []
    for i in range(6):
        told.append(queue.num_free(4))
        push(queue, f"a{i}")
    assert told == [-1, -1, 4, 3, 2, 1] and queue.num_free(4) == 0
    small = admission(max_queued=2)
    push(small, "r", is_resume=True)
    assert small.num_free(4) == -1  # nobody new waits: whoever comes may be placed at once
    push(small, "a")
    assert small.num_free(4) == 1


def test_resumed_requests_do_not_count_against_newcomers() -> None:
    queue = admission(max_queued=2)
    for i in range(5):
        push(queue, f"r{i}", is_resume=True)
    assert queue.is_open and queue.admit("a") == ""


def test_a_full_queue_makes_room_for_another_tenant() -> None:
    queue = admission(max_queued=4)
    for i in range(4):
        push(queue, f"a{i}", tenant="a")
    assert queue.admit("b") == "a3"  # the youngest of the one who fills it
    queue.remove("a3")
    push(queue, "b0", tenant="b")
    assert queue.admit("b") == "a2"
    queue.remove("a2")
    push(queue, "b1", tenant="b")
    with pytest.raises(QueueFull):
        queue.admit("b")  # two and two


def test_resumes_are_paced() -> None:
    queue = admission(resumes_per_s=2.0)  # bursts up to 8
    for i in range(12):
        push(queue, f"r{i}", is_resume=True)
    push(queue, "fresh")
    assert len(drain(queue, 100.0)) == 9  # 8 tickets, and the fresh one needs none
    assert drain(queue, 100.4) == []
    assert drain(queue, 101.0) == ["r8", "r9"]


def test_remove_takes_all_lanes() -> None:
    queue = admission()
    queue.push(Key("x", 0), "a", 0, 1)
    queue.push(Key("x", 1), "a", 0, 1)
    push(queue, "y")
    queue.remove("x")
    assert drain(queue) == ["y"]

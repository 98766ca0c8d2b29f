"""When the canary runs, and what its result means; and which worker gets a lane."""

from __future__ import annotations

from decant.protocol import messages as m
from decant.protocol.config import RouterConfig
from decant.protocol.wire import pack_ids, unpack_ids
from decant.services.canary import RETRY_S, Canary
from decant.services.decisions import Ref
from decant.services.membership import Member, Membership
from decant.services.placement import MAX_PREFILLING, Placement
from decant.services.records import Record


def member(instance: str, is_new: bool = True, **limits: int) -> Member:
    service = instance.rpartition("-")[0]
    hello = m.Hello(service, instance, 5, "", limits=limits)
    made = Member(hello, instance + "#1", b"", 0.0, 0.0, 0.0, m.Heartbeat())
    made.is_on_probation = is_new
    return made


def chain(is_new: bool) -> list[list[Member]]:
    return [[member("prefill-0", is_new)], [member("decode-0", is_new, vocab_size=20)]]


FAILED = m.Failed("canary", 1, "deadline_exceeded", "the request's deadline passed in handoff", 504)


def test_before_ready() -> None:
    canary = Canary(RouterConfig())
    assert canary.due([[], [member("decode-0")]], True, 1.0) is None  # no chain yet
    assert "no canary has run" in canary.objection(chain(True))
    generate = canary.due(chain(True), False, 1.0)
    assert generate is not None and generate.tokenizer == "" and generate.deadline_ms > 1000
    assert max(unpack_ids(canary.blob(chain(True)))) < 20
    assert canary.due(chain(True), True, 99.0) is None  # one at a time
    assert canary.ended(None) == "passed"
    assert canary.objection(chain(False)) == ""
    assert "it is running" in canary.objection(chain(True))  # somebody new


def test_when_idle_only() -> None:
    canary = Canary(RouterConfig(canary_s=10.0))
    canary.proved(100.0)
    assert canary.due(chain(False), True, 109.0) is None
    assert canary.due(chain(False), False, 111.0) is None
    assert canary.due(chain(False), True, 111.0) is not None


def test_failures_are_repeated_soon_and_count_in_a_row() -> None:
    canary = Canary(RouterConfig(canary_s=10.0))
    canary.proved(100.0)
    assert canary.due(chain(False), True, 111.0)
    assert canary.ended(FAILED) == "failed"
    assert canary.objection(chain(False)) == ""  # one may be bad luck
    assert canary.due(chain(False), True, 111.0 + RETRY_S)
    canary.ended(FAILED)
    assert "deadline passed in handoff" in canary.objection(chain(False))
    canary.proved(115.0)  # a request of somebody went through
    assert canary.objection(chain(False)) == ""


def test_switched_off() -> None:
    canary = Canary(RouterConfig(canary=False))
    assert canary.objection(chain(True)) == "" and canary.due(chain(True), True, 1e9) is None


class Fixture:
    """Records on workers of a membership."""

    def __init__(self, *instances: str, is_new: bool = False, num_slots: int = 4) -> None:
        self.membership = Membership(RouterConfig(), "router")
        for instance in instances:
            made = member(instance, is_new, num_slots=num_slots)
            self.membership._members[made.incarnation] = made
        self.placement = Placement(self.membership)
        self.records: list[Record] = []

    def record(self, num_choices: int = 1) -> Record:
        name = f"r{len(self.records)}"
        generate = m.Generate(name, 1, 1, m.Sampling(), "tokenizer-0", num_choices)
        record = Record(generate, pack_ids([1]), b"", "g", 0.0)
        record.start(0.0)
        return record

    def place(self, num_choices: int = 1, now: float = 0.0) -> str:
        """Decode and prefill that a new record gets; empty: none."""
        record = self.record(num_choices)
        self.placement.count(self.records)
        chosen = self.placement.choose(record, record.lanes[0], now)
        if chosen is None:
            return ""
        record.place(0, *chosen, now)
        self.records.append(record)
        return f"{chosen[0].instance} {chosen[1].instance}"


def test_the_least_loaded_within_its_slots() -> None:
    f = Fixture("decode-0", "decode-1", "prefill-0")
    places = [f.place(2) for _ in range(5)]
    assert sorted(places[:2]) == ["decode-0 prefill-0", "decode-1 prefill-0"]
    assert sorted(places[2:4]) == ["decode-0 prefill-0", "decode-1 prefill-0"]
    assert places[4] == ""  # four slots each, two choices a request


def test_few_lanes_wait_at_a_prefill() -> None:
    f = Fixture("decode-0", "prefill-0", num_slots=64)
    placed = [f.place() for _ in range(MAX_PREFILLING + 1)]
    assert all(placed[:-1]) and placed[-1] == ""


def test_what_can_never_fit_is_asked_once_to_be_refused() -> None:
    f = Fixture("decode-0", "prefill-0")
    assert f.place(9) == "decode-0 prefill-0"


def test_probation_means_one_at_a_time() -> None:
    f = Fixture("decode-0", "prefill-0", is_new=True)
    assert f.place() and not f.place()
    f.membership.proved("decode-0#1")
    assert not f.place()  # prefill is new as well
    f.membership.proved("prefill-0#1")
    assert f.place()


def test_busy_is_left_alone_for_a_moment_or_until_something_is_free() -> None:
    f = Fixture("decode-0", "prefill-0")
    ref = Ref("decode-0", "decode-0#1")
    f.placement.refused(ref, 0.0)
    assert not f.place(now=0.01) and f.place(now=0.03)
    f.placement.refused(ref, 1.0)
    assert not f.place(now=1.05)  # it said so again
    f.placement.freed(ref)
    assert f.place(now=1.05)


def test_a_suspect_is_tested_beside_cleared_ones_only() -> None:
    """Else a crash of a large batch makes its streams run one after the other to their ends."""
    f = Fixture("decode-0", "prefill-0")
    for incarnation in ("decode-0#1", "prefill-0#1"):
        f.membership.proved(incarnation)
    first, second, third = f.record(), f.record(), f.record()
    for record in (first, second, third):
        record.suspicion, record.suspect_in = 1, {"decode"}

    def place(record: Record) -> frozenset[str] | None:
        f.placement.count(f.records)
        chosen = f.placement.choose(record, record.lanes[0], 0.0)
        if chosen is None:
            return None
        alone_in = f.placement.alone_in(record, 1, *chosen)
        record.place(0, *chosen, 0.0, alone_in)
        f.records.append(record)
        return alone_in

    assert place(first) == frozenset({"decode"})
    assert place(second) is None and not f.place()  # one at a time
    first._is_cleared, first.alone_in, first.suspect_in = True, frozenset(), set()
    assert place(second) == frozenset()  # not alone: its company may be to blame
    third.suspicion = 2
    assert place(third) is None  # accused twice: with nobody
    second._is_cleared, second.suspect_in = True, set()
    assert place(third) is None and f.place()


def test_a_suspect_is_alone_where_it_is_suspected() -> None:
    f = Fixture("decode-0", "prefill-0")
    suspect = f.record()
    suspect.suspicion, suspect.suspect_in = 1, {"decode"}
    assert f.place()
    f.placement.count(f.records)
    assert f.placement.choose(suspect, suspect.lanes[0], 0.0) is None  # it waits for the others
    f.records.clear()
    f.placement.count(f.records)
    chosen = f.placement.choose(suspect, suspect.lanes[0], 0.0)
    assert chosen is not None
    suspect.place(0, *chosen, 0.0, frozenset({"decode"}))
    f.records.append(suspect)
    assert not f.place()  # and the others for it
    f.records.clear()
    assert f.place()

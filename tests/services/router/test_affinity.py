"""Where there are several workers, a request goes where its prefix is."""

from __future__ import annotations

import random

from decant.protocol import messages as m
from decant.protocol.config import RouterConfig
from decant.protocol.wire import pack_ids
from decant.services.affinity import Affinity, digests
from decant.services.decisions import Ref
from decant.services.membership import Membership
from decant.services.placement import LEAD, Placement
from decant.services.records import Record


def ids(seed: int, num: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(num)]


class Room:
    """A placement with workers, which all live and take what they get."""

    def __init__(self, *instances: str) -> None:
        self.members = Membership(RouterConfig(), "router#1")
        for instance in instances:
            self.join(instance)
        self.placement = Placement(self.members)
        self.records: list[Record] = []

    def join(self, instance: str) -> None:
        hello = m.Hello(instance.rpartition("-")[0], instance, 4711, "")
        self.members.hello(hello, f"{instance}#1", b"", 100.0)
        self.members.heartbeat(m.Heartbeat(), f"{instance}#1", 100.0)
        self.members.proved(f"{instance}#1")

    def place(self, prompt: list[int], tenant: str = "", salt: str = "") -> tuple[str, str]:
        """(decode, prefill) of a new request, which stays there in prefill."""
        name = f"r{len(self.records)}"
        generate = m.Generate(name, 1, len(prompt), m.Sampling(), "t", tenant=tenant,
                              cache_salt=salt)  # fmt: skip
        record = Record(generate, pack_ids(prompt), b"", "g", 100.0)
        record.start(100.0)
        self.placement.count(self.records)
        chosen = self.placement.choose(record, record.lanes[0], 100.0)
        assert chosen is not None
        record.place(0, *chosen, 100.0)
        self.records.append(record)
        return chosen[0].instance, chosen[1].instance

    def end(self) -> None:
        self.records.clear()


def test_a_turn_goes_where_the_first_one_was() -> None:
    room = Room("decode-0", "decode-1", "prefill-0", "prefill-1")
    talks = [ids(i, 300) for i in range(6)]
    where = [room.place(talk) for talk in talks]
    assert {p for _, p in where} == {"prefill-0", "prefill-1"}
    assert {d for d, _ in where} == {"decode-0", "decode-1"}
    for _ in range(3):
        room.end()
        for talk, place in zip(talks, where, strict=True):
            talk += ids(99, 40)
            assert room.place(talk) == place
            room.end()


def test_load_counts_for_more_than_a_small_lead() -> None:
    room = Room("decode-0", "prefill-0", "prefill-1")
    talk = ids(1, 300)
    first = room.place(talk)[1]
    places = [room.place(talk)[1] for _ in range(2 * LEAD["prefill"] + 2)]
    assert places[: LEAD["prefill"]] == [first] * LEAD["prefill"]
    assert set(places) == {"prefill-0", "prefill-1"}


def test_tenants_and_salts_do_not_meet() -> None:
    some = pack_ids(ids(1, 256))
    assert len(digests(some, "")) == 2
    assert not set(digests(some, "a")) & set(digests(some, "b"))
    room = Room("decode-0", "prefill-0")
    salts = set()
    for tenant, salt in (("", ""), ("a", ""), ("a", "b"), ("", "b"), ("", "a")):
        room.place(ids(1, 256), tenant, salt)
        salts.add(room.records[-1].salt)
    assert len(salts) == 5


def test_a_worker_that_is_gone_is_not_found() -> None:
    affinity = Affinity()
    a, b = Ref("prefill-0", "1"), Ref("prefill-0", "2")
    affinity.note("prefill", [b"x", b"y"], a)
    affinity.note("prefill", [b"x"], b)
    assert affinity.find("prefill", [b"x", b"y", b"z"], {a, b}) == a
    assert affinity.find("prefill", [b"x", b"y"], {b}) == b
    assert affinity.find("decode", [b"x", b"y"], {a, b}) is None
    affinity.clear()
    assert affinity.find("prefill", [b"x"], {a, b}) is None

"""Membership rules with a clock of their own."""

from __future__ import annotations

from decant.protocol.config import RouterConfig
from decant.protocol.messages import Heartbeat, Hello, Refuse, Welcome
from decant.services.link import UNKNOWN
from decant.services.membership import Health, Membership

CONFIG = RouterConfig()  # heartbeat 1 s, suspect 3 s, dead 10 s, stall 30 s


def hello(instance: str, **rest: object) -> Hello:
    service = instance.rpartition("-")[0]
    return Hello(service, instance, 4711, "test", **rest)  # type: ignore[arg-type]


class Set:
    """A membership under test, and its time."""

    def __init__(self) -> None:
        self.now = 100.0
        self.members = Membership(CONFIG, "router#1")

    def join(self, instance: str, incarnation: str = "", **rest: object) -> Welcome | Refuse:
        name = incarnation or instance + "#1"
        answer, self.fences = self.members.hello(
            hello(instance, **rest), name, name.encode(), self.now
        )
        if isinstance(answer, Welcome):
            self.beat(name)
        return answer

    def beat(self, incarnation: str, **rest: object) -> Welcome | Refuse:
        return self.members.heartbeat(Heartbeat(**rest), incarnation, self.now)  # type: ignore[arg-type]

    def run(self, seconds: int, *beating: str, **beat: object) -> list[str]:
        """One tick a second. Returns: incarnations to fence, in order."""
        fenced = []
        for _ in range(seconds):
            self.now += 1.0
            for incarnation in beating:
                self.beat(incarnation, **beat)
            fenced += [f.member.incarnation for f in self.members.tick(self.now)]
        return fenced


def test_a_chain_is_complete_when_all_are_ready() -> None:
    s = Set()
    assert s.members.missing() == "no tokenizer process has joined"
    for instance in ("tokenizer-0", "prefill-0", "decode-0"):
        s.join(instance)
    assert s.members.missing() == ""
    s.beat("decode-0#1", is_ready=False, why="loading weights")
    assert s.members.missing() == "decode-0 is not ready: loading weights"
    s.beat("decode-0#1", is_draining=True)
    assert s.members.missing() == "decode-0 is not ready: it is draining"
    assert [p.is_draining for p in s.members.peers() if p.service == "decode"] == [True]


def test_unknown_is_asked_for_hello() -> None:
    s = Set()
    answer = s.beat("decode-0#1")
    assert isinstance(answer, Refuse) and answer.reason.startswith(UNKNOWN)


def test_mismatches_are_refused_and_shown() -> None:
    s = Set()
    assert isinstance(s.join("decode-0", model_hash="aaaa", kv_layout_hash="kkkk"), Welcome)
    answer = s.join("prefill-0", model_hash="bbbb", kv_layout_hash="kkkk")
    assert isinstance(answer, Refuse) and "model bbbb differs" in answer.reason
    answer = s.join("prefill-0", model_hash="aaaa", kv_layout_hash="llll")
    assert isinstance(answer, Refuse) and "KV layout llll differs" in answer.reason
    assert s.members.refusals == {"prefill-0": answer.reason}
    s.join("tokenizer-0", model_hash="aaaa")
    assert "prefill-0 was refused" in s.members.missing()
    assert isinstance(s.join("prefill-0", model_hash="aaaa", kv_layout_hash="kkkk"), Welcome)
    assert s.members.refusals == {} and s.members.missing() == ""
    answer = s.join("gateway-0", major=99)
    assert isinstance(answer, Refuse) and "wire version 99" in answer.reason
    assert isinstance(s.join("gateway-0", minor=99), Welcome)


def test_a_model_may_change_with_all_workers() -> None:
    s = Set()
    s.join("decode-0", model_hash="aaaa")
    s.members.exited("decode-0#1")
    assert isinstance(s.join("decode-0", "decode-0#2", model_hash="bbbb"), Welcome)


def test_silence_makes_suspect_then_dead() -> None:
    s = Set()
    s.join("decode-0")
    assert s.run(3) == []
    member = s.members.get("decode-0#1")
    assert member is not None

    def health() -> Health:
        return member.health

    assert health() is Health.HEALTHY
    s.run(1)  # the first tick beyond 3 s only doubts
    assert health() is Health.HEALTHY
    s.run(1)
    assert health() is Health.SUSPECT and not s.members.usable("decode")
    assert s.members.peers() != []  # a suspect is no dead
    assert s.run(5) == []
    assert s.run(1) == ["decode-0#1"]
    assert health() is Health.FENCED and s.members.peers() == []
    assert s.run(5) == []  # fenced once
    assert s.members.exited("decode-0#1") is member
    answer = s.join("decode-0", "decode-0#1")
    assert isinstance(answer, Refuse) and "declared dead" in answer.reason
    assert isinstance(s.beat("decode-0#1"), Refuse)


def test_a_suspect_that_recovers_is_on_probation() -> None:
    s = Set()
    s.join("decode-0")
    s.members.proved("decode-0#1")
    s.run(5)
    assert not s.members.usable("decode")
    s.beat("decode-0#1")
    assert [m.is_on_probation for m in s.members.usable("decode")] == [True]
    s.members.proved("decode-0#1")
    assert [m.is_on_probation for m in s.members.usable("decode")] == [False]


def test_one_missed_tick_is_forgiven() -> None:
    s = Set()
    s.join("decode-0")
    for _ in range(5):
        assert s.run(4) == []
        s.beat("decode-0#1")
    assert s.members.usable("decode")


def test_busy_without_a_step_is_fenced() -> None:
    s = Set()
    s.join("decode-0")
    assert s.run(60, "decode-0#1", is_busy=False, step=5) == []
    assert s.run(31, "decode-0#1", is_busy=True, step=5) == []
    assert s.run(1, "decode-0#1", is_busy=True, step=5) == ["decode-0#1"]


def test_who_has_no_steps_may_be_busy_for_ever() -> None:
    s = Set()
    s.join("gateway-0")
    assert s.run(90, "gateway-0#1", is_busy=True) == []


def test_idle_time_is_counted_from_the_first_idle_heartbeat() -> None:
    s = Set()
    s.join("prefill-0")
    member = s.members.get("prefill-0#1")
    assert member is not None
    s.run(4, "prefill-0#1")
    assert member.idle_s(s.now) == 4.0
    s.run(1, "prefill-0#1", is_busy=True)
    assert member.idle_s(s.now) == 0.0


def test_steps_keep_a_busy_process_alive() -> None:
    s = Set()
    s.join("decode-0")
    for step in range(5):
        assert s.run(25, "decode-0#1", is_busy=True, step=step) == []


def test_our_own_sleep_voids_the_verdict() -> None:
    s = Set()
    s.join("decode-0")
    s.run(1, "decode-0#1", is_busy=True, step=1)
    s.now += 40.0  # the router was stopped, nothing was read
    assert s.members.tick(s.now) == []
    assert s.members.num_void_ticks == 1
    # What was sent meanwhile is read now, before the next tick.
    assert s.run(3, "decode-0#1", is_busy=True, step=1) == []
    assert s.members.usable("decode")
    assert s.run(30, "decode-0#1", is_busy=True, step=1) == ["decode-0#1"]


def test_the_name_of_a_living_process_is_taken_by_force() -> None:
    s = Set()
    s.join("decode-0")
    s.join("decode-0", "decode-0#2")
    assert [f.member.incarnation for f in s.fences] == ["decode-0#1"]
    assert [p.incarnation for p in s.members.peers()] == ["decode-0#2"]
    named = s.members.named("decode-0")
    assert named is not None and named.incarnation == "decode-0#2"


def test_a_repeated_hello_changes_the_address_only() -> None:
    s = Set()
    s.join("decode-0")
    version = s.members.version
    s.members.hello(hello("decode-0"), "decode-0#1", b"other", s.now)
    member = s.members.get("decode-0#1")
    assert member is not None and member.identity == b"other"
    assert s.members.version == version


def test_the_administrators_flag() -> None:
    s = Set()
    s.join("decode-0")
    assert s.members.drain("decode-0", True) is not None
    assert not s.members.usable("decode")
    s.members.drain("decode-0", False)
    assert s.members.usable("decode")
    assert s.members.drain("decode-9", True) is None


def test_nonsense_is_refused() -> None:
    s = Set()
    for bad in (Hello("", "x-0", 5, ""), Hello("x", "", 5, ""), Hello("x", "x-0", 1, "")):
        answer, _ = s.members.hello(bad, "x#1", b"", s.now)
        assert isinstance(answer, Refuse)
    assert s.members.all() == []

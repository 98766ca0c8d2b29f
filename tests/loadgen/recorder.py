"""A proxy that writes down when each byte of an answer came, and a server that plays it again.

    python -P tests/loadgen/recorder.py --upstream URL      # prints its port
    python -P tests/loadgen/recorder.py --replay FILE

Two load generators can never see the same run of a real server: they take processor time from it,
and it is never twice the same. So a run is recorded once; then each generator gets the very same
bytes after the very same pauses, by prompt, from a server that does nothing else. ``GET /recorded``
gives what was recorded or played since the last ``POST /recorded`` with the truth about each
request: nanoseconds from the request's last byte to each piece of its answer. Ends with its
standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from aiohttp import web

SPIN_NS = 300_000  # the last part of a pause is waited for by looking at the clock


def key_of(body: bytes) -> str:
    """Names a request by the text of its last message, whatever else a generator sends."""
    content = json.loads(body)["messages"][-1]["content"]
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    return hashlib.sha256(content.encode()).hexdigest()[:24]


async def until(at_ns: int) -> None:
    """Timers are good to a millisecond; a busy wait for the rest, of a process that has nothing
    else to do.
    """
    left = at_ns - time.monotonic_ns()
    if left > SPIN_NS + 1_000_000:
        await asyncio.sleep((left - SPIN_NS - 1_000_000) / 1e9)
    while time.monotonic_ns() < at_ns:
        await asyncio.sleep(0)


class Recorder:
    """``plays``: a record by key; None: ask ``upstream`` and write down."""

    def __init__(self, upstream: str, plays: dict[str, list[tuple[int, str]]] | None) -> None:
        self.upstream, self.plays = upstream, plays
        self.done: list[dict[str, Any]] = []
        self.session: aiohttp.ClientSession | None = None

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/recorded", self.recorded)
        app.router.add_post("/recorded", self.reset)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/{path:.*}", self.other)
        app.on_cleanup.append(self._close)
        return app

    async def _close(self, app: web.Application) -> None:
        if self.session is not None:
            await self.session.close()

    def _ask(self) -> aiohttp.ClientSession:
        if self.session is None:
            self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self.session

    async def recorded(self, request: web.Request) -> web.Response:
        return web.json_response(self.done)

    async def reset(self, request: web.Request) -> web.Response:
        self.done = []
        return web.json_response({})

    async def other(self, request: web.Request) -> web.Response:
        if self.plays is not None:
            if request.path != "/v1/models":
                raise web.HTTPNotFound
            return web.json_response({"object": "list", "data": [{"id": "decant-demo"}]})
        async with self._ask().get(self.upstream + request.path_qs) as answer:
            return web.Response(
                status=answer.status, body=await answer.read(), content_type=answer.content_type
            )

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        start = time.monotonic_ns()
        key = key_of(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        pieces: list[tuple[int, str]] = []
        if self.plays is not None:
            if key not in self.plays:
                return web.json_response({"error": {"message": "not recorded"}}, status=404)
            await response.prepare(request)
            for after, text in self.plays[key]:
                await until(start + after)
                await response.write(text.encode())
                pieces.append((time.monotonic_ns() - start, text))
        else:
            headers = {"Content-Type": "application/json"}
            url = f"{self.upstream}/v1/chat/completions"
            async with self._ask().post(url, data=body, headers=headers) as answer:
                if answer.status != 200:
                    return web.Response(status=answer.status, body=await answer.read())
                await response.prepare(request)
                async for data in answer.content.iter_any():
                    await response.write(data)
                    pieces.append((time.monotonic_ns() - start, data.decode()))
        self.done.append({"key": key, "pieces": pieces})
        await response.write_eof()
        return response


async def serve(recorder: Recorder) -> None:
    runner = web.AppRunner(recorder.app(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
    await site.start()
    assert runner.addresses
    print(runner.addresses[0][1], flush=True)
    gc.freeze()
    gc.disable()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--upstream", default="")
    parser.add_argument("--replay", type=Path)
    args = parser.parse_args()
    plays = None
    if args.replay:
        rows = json.loads(args.replay.read_text())
        plays = {row["key"]: [(int(t), str(text)) for t, text in row["pieces"]] for row in rows}
    uvloop.run(serve(Recorder(args.upstream, plays)))


if __name__ == "__main__":
    main()

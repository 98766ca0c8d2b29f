"""A stand-in for an OpenAI-compatible server, as a process of its own: prints its port, serves
until its standard input ends.

Answers follow from the prompt, so equal prompts have equal answers. The body's ``mock`` object says
how it behaves: ``ttft_ms``, ``gap_ms``, ``per_chunk`` (tokens in a chunk), ``fault`` (status,
event, cut, no_finish, hang, plain, differs, leak).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from typing import Any

from aiohttp import web

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
CHARS_PER_TOKEN = 5
OVERHEAD = 7  # tokens of the chat template


class Mock:
    def __init__(self) -> None:
        self.held_pages = 0
        self.num_requests = 0
        self.num_hung_up = 0
        self.seen: list[dict[str, Any]] = []

    def tokens(self, body: dict[str, Any]) -> tuple[int, str]:
        """Prompt tokens and the text that decides the answer."""
        if "messages" in body:
            text = "".join(m["content"] for m in body["messages"])
            return OVERHEAD + -(-len(text) // CHARS_PER_TOKEN), text
        prompt = body["prompt"]
        if isinstance(prompt, list):
            return len(prompt), str(prompt)
        return -(-len(prompt) // CHARS_PER_TOKEN), prompt

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.num_requests += 1
        mock = body.get("mock", {})
        fault = mock.get("fault", "")
        is_chat = "messages" in body
        num_prompt, text = self.tokens(body)
        if len(self.seen) < 1000:
            self.seen.append({"text": text[-200:], "max_tokens": body["max_tokens"]})
        if fault == "status":
            return web.json_response({"error": {"message": "queue full"}}, status=429)
        num = body["max_tokens"]
        start = int(hashlib.sha256(text.encode()).hexdigest(), 16)
        if fault == "differs":
            start += self.num_requests
        words = [WORDS[(start + i) % len(WORDS)] + " " for i in range(num)]
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num}
        if not body.get("stream") or fault == "plain":
            return web.json_response({"choices": [{"text": "".join(words)}], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        kind = "chat.completion.chunk" if is_chat else "text_completion"
        frame = {"id": f"mock-{self.num_requests}", "object": kind, "created": 0, "model": "mock"}

        async def event(data: dict[str, Any]) -> None:
            await response.write(b"data: " + json.dumps({**frame, **data}).encode() + b"\n\n")

        try:
            if fault == "hang":
                await asyncio.sleep(3600)
            if fault == "leak":
                self.held_pages += 1
            await asyncio.sleep(mock.get("ttft_ms", 0) / 1e3)
            if is_chat:
                await event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
            size = mock.get("per_chunk", 1)
            for i in range(0, num, size):
                if i:
                    await asyncio.sleep(mock.get("gap_ms", 0) / 1e3)
                if i and fault == "event":
                    await event({"error": {"message": "engine died"}})
                    return response
                if i and fault == "cut":
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                piece = "".join(words[i : i + size])
                delta = {"delta": {"content": piece}} if is_chat else {"text": piece}
                await event({"choices": [{"index": 0, **delta, "finish_reason": None}]})
            if fault != "no_finish":
                end: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
                await event({"choices": [{"index": 0, **end, "finish_reason": "length"}]})
            if body.get("stream_options", {}).get("include_usage"):
                account = {
                    "stages_ms": {"queue": 1.0, "prefill": 2.0, "handoff": 0.5, "decode": 4.0},
                    "delivery_ms": 0.75,
                    "num_drafted": 2 * (num // 2),
                    "num_accepted": num // 2,
                    "num_steps": num // 2,
                }
                await event({"choices": [], "usage": usage, "decant": account})
            await response.write(b"data: [DONE]\n\n")
        except (ConnectionResetError, asyncio.CancelledError):
            self.num_hung_up += 1
            raise
        return response

    async def metrics(self, request: web.Request) -> web.Response:
        lines = [
            "# HELP decant_pages KV pages",
            "# TYPE decant_pages gauge",
            f'decant_pages{{instance="decode-0",state="free"}} {100 - self.held_pages}',
            f'decant_pages{{instance="decode-0",state="active"}} {self.held_pages}',
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "mock"}]})

    async def state(self, request: web.Request) -> web.Response:
        return web.json_response({"num_hung_up": self.num_hung_up, "seen": self.seen})


async def main() -> None:
    mock = Mock()
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/chat/completions", mock.complete)
    app.router.add_post("/v1/completions", mock.complete)
    app.router.add_get("/metrics", mock.metrics)
    app.router.add_get("/v1/models", mock.models)
    app.router.add_get("/state", mock.state)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    import uvloop

    uvloop.run(main())

"""The gateway as a black box: errors, stream rules, limits, keys, disconnects, operations."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from decant.protocol.messages import Failed
from decant.services.commands import up

MODEL = "test-model"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
EOS = "<｜end▁of▁sentence｜>"
PATH = "/v1/chat/completions"


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def post(
    http: aiohttp.ClientSession, stage: Any, body: Any, path: str = PATH, **more: Any
) -> tuple[int, Any, Any]:
    async with http.post(stage.base + path, json=body, **more) as response:
        return response.status, await response.json(), response.headers


async def events(
    http: aiohttp.ClientSession, stage: Any, body: dict[str, Any], path: str = PATH
) -> tuple[int, list[str]]:
    """Status and the raw events of a stream."""
    async with http.post(stage.base + path, json={**body, "stream": True}) as response:
        text = (await response.read()).decode()
        return response.status, [e for e in text.split("\n\n") if e]


async def sample(http: aiohttp.ClientSession, stage: Any, name: str) -> float:
    """The value of a metric of the gateway's page that has no labels but svc and instance."""
    async with http.get(stage.base + "/metrics") as response:
        text = await response.text()
    [line] = [x for x in text.splitlines() if x.startswith(name + "{")]
    return float(line.rpartition(" ")[2])


def chat(**more: Any) -> dict[str, Any]:
    return {**CHAT, **more}


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
DEEP: Any = {"type": "object"}
for _ in range(40):
    DEEP = {"type": "object", "properties": {"x": DEEP}}

BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    (user(5), "messages[0].content"),
    (user([{"type": "text", "text": None}]), "messages[0].content[0].text"),
    (user([{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0].type"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    (
        {"messages": [{"role": "tool", "tool_call_id": "x", "content": "y"}]},
        "messages[0].tool_call_id",
    ),
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_completion_tokens": "5"}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"presence_penalty": -2.5}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"129280": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias"),
    ({"seed": 1 << 64}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ["x" * 257]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": [129280]}, "stop_token_ids"),
    ({"stop_token_ids": ["1"]}, "stop_token_ids"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": "yes"}, "stream"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"tools": [TOOL] * 2}, "tools"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]},
        "tools[0].function.parameters",
    ),
    ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
    ),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ({"task": "dance"}, "task"),
    ({"user_id": "x" * 257}, "user_id"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"continue_final_message": True}, "messages"),
    ({"priority": 1000}, "priority"),
]


@pytest.mark.parametrize(("more", "param"), BAD, ids=lambda x: str(x)[:40])
async def test_bad_fields(
    more: dict[str, Any], param: str, stage: Any, http: aiohttp.ClientSession
) -> None:
    """Every range of the field table: 400, the field's name, and nothing reaches a worker."""
    status, body, headers = await post(http, stage, chat(**more))
    assert status == 400, body
    assert body["error"]["param"] == param and body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"] and "Retry-After" not in headers
    assert not stage.generates


async def test_null_means_absent(stage: Any, http: aiohttp.ClientSession) -> None:
    stage.say("ok" + EOS)
    names = {key for more, _ in BAD for key in more} - {"messages", "model"}
    status, body, _ = await post(http, stage, chat(**dict.fromkeys(names)))
    assert status == 200, body
    assert body["choices"][0]["message"]["content"] == "ok"


async def test_bad_bodies(stage: Any, http: aiohttp.ClientSession) -> None:
    url = stage.base + "/v1/chat/completions"
    kind = {"Content-Type": "application/json"}
    nested = b'{"model":"x","a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    for data, headers, status in (
        (b"[]", kind, 400),
        (b"null", kind, 400),
        (b'"text"', kind, 400),
        (b"{", kind, 400),
        (b"", kind, 400),
        (b"\xff\xfe", kind, 400),
        (b'{"model": NaN}', kind, 400),
        (json.dumps(chat(**user("\ud800"))).encode(), kind, 400),
        (nested, kind, 400),
        (b"a=b", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        (b"{}", {**kind, "Content-Encoding": "gzip"}, 415),
    ):
        async with http.post(url, data=data, headers=headers) as response:
            body = await response.json()
            assert response.status == status, (data[:20], body)
            assert set(body["error"]) == {"message", "type", "param", "code"}
    assert not stage.generates


async def test_routes_and_methods(stage: Any, http: aiohttp.ClientSession) -> None:
    for method, path, status in (
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v2/nothing", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/other", 404),
    ):
        async with http.request(method, stage.base + path) as response:
            assert response.status == status
            message = (await response.json())["error"]["message"]
            assert "no embeddings" in message if "embeddings" in path else message


async def test_a_large_body_is_refused(start: Any, http: aiohttp.ClientSession) -> None:
    stage = await start(max_body_bytes=10_000)
    status, body, _ = await post(http, stage, chat(**user("x" * 20_000)))
    assert status == 413 and body["error"]["code"] == "body_too_large"

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b" " * 1000

    url, kind = stage.base + "/v1/chat/completions", {"Content-Type": "application/json"}
    async with http.post(url, data=chunks(), headers=kind) as response:
        assert response.status == 413


async def test_a_prompt_beyond_the_context(stage: Any, http: aiohttp.ClientSession) -> None:
    status, body, _ = await post(http, stage, chat(**user("word " * 5000)))
    assert status == 400 and body["error"]["code"] == "context_length_exceeded"
    assert "5005" in body["error"]["message"] and "2048" in body["error"]["message"]


async def test_failures_before_the_first_token_keep_their_status(
    stage: Any, http: aiohttp.ClientSession
) -> None:
    for status, retry_s, code in (
        (429, 3.0, "queue_full"),
        (503, 0.0, "out_of_pages"),
        (500, 0, "x"),
    ):
        stage.script.fail = Failed("", 1, code, "no room", status, "", retry_s, status != 500)
        for streamed in (False, True):
            got, body, headers = await post(http, stage, chat(stream=streamed))
            assert got == status and body["error"]["code"] == code
            if status == 500:
                assert headers["x-should-retry"] == "false"
            else:
                assert headers["Retry-After"] == str(int(retry_s or 1))


async def test_stream_shape(stage: Any, http: aiohttp.ClientSession) -> None:
    stage.say("one two" + EOS)
    status, found = await events(http, stage, chat(stream_options={"include_usage": True}))
    assert status == 200 and found[-1] == "data: [DONE]"
    chunks = [json.loads(e[6:]) for e in found[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 3
    assert chunks[-1]["decant"]["stages_ms"] == {"queue": 1.5, "prefill": 20.0}
    finish = chunks[-2]["choices"][0]
    assert finish["delta"] == {} and finish["finish_reason"] == "stop"
    assert len({c["id"] for c in chunks}) == 1


async def test_delivery_is_the_time_from_decode_s_step_to_the_socket(
    stage: Any, http: aiohttp.ClientSession
) -> None:
    """One observation for each token batch of a stream; none for replays (no time of a step) and
    none for answers that are sent whole.
    """
    stage.say("one two" + EOS)
    stage.script.drawn_ago_ns, stage.script.pause_s = 40_000_000, 0.2
    asked = chat(stream_options={"include_usage": True})
    _, found = await events(http, stage, asked)
    account = json.loads(found[-2][6:])["decant"]
    assert 40 <= account["delivery_ms"] < 40 + 1000
    name = "decant_token_delivery_seconds_count"
    assert await sample(http, stage, name) == 3
    await post(http, stage, chat())
    stage.script.drawn_ago_ns = 0
    _, found = await events(http, stage, asked)
    assert "delivery_ms" not in json.loads(found[-2][6:])["decant"]
    assert await sample(http, stage, name) == 3


async def test_the_client_s_trace_goes_on(stage: Any, http: aiohttp.ClientSession) -> None:
    stage.say("one" + EOS)
    header = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for given in (header, "nonsense"):
        async with http.post(
            stage.base + "/v1/chat/completions", json=chat(), headers={"traceparent": given}
        ) as response:
            assert response.status == 200
    first, second = (trace.split("-") for trace in stage.traces)
    assert first[1] == header.split("-")[1] and first[2] != header.split("-")[2]
    assert len(second[1]) == 32 and second[1] != first[1]


async def test_an_error_underway_goes_in_band_and_closes(
    stage: Any, http: aiohttp.ClientSession
) -> None:
    stage.say("one two three four" + EOS, fail_after=2, pause_s=0.03)
    status, found = await events(http, stage, chat())
    assert status == 200
    last = json.loads(found[-1][6:])
    assert last["error"]["message"] == "the engine failed"
    assert not any("[DONE]" in e or '"finish_reason":"' in e for e in found)


async def test_silence_is_filled_with_comments(start: Any, http: aiohttp.ClientSession) -> None:
    stage = await start(first_byte_s=0.2)
    stage.say("late" + EOS, start_s=0.6)
    async with http.post(stage.base + "/v1/chat/completions", json=chat(stream=True)) as response:
        first = await response.content.readline()
        assert first == b": keep-alive\n"
        assert b'"late"' in await response.read()


async def test_a_client_that_leaves_cancels(stage: Any, http: aiohttp.ClientSession) -> None:
    stage.say("word " * 200, pause_s=0.05)
    for streamed in (True, False):
        stage.cancels.clear()
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.4):
                async with http.post(
                    stage.base + "/v1/chat/completions", json=chat(stream=streamed)
                ) as response:
                    await response.read()
        for _ in range(50):
            if stage.cancels:
                break
            await asyncio.sleep(0.02)
        assert stage.cancels and stage.cancels[0].reason == "client_gone"


async def test_a_reader_that_does_not_read_is_cut(start: Any) -> None:
    stage = await start(slow_reader_s=0.5, default_max_tokens=1900)
    stage.say("", group=100)
    stage.script.ids = [[64297] * 1900]
    body = json.dumps(chat(stream=True, logprobs=True, top_logprobs=2)).encode()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", stage.config.gateway.port))
        sock.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        await asyncio.sleep(1.2)  # the deadline passes
        got = b""
        sock.settimeout(2)
        with contextlib.suppress(ConnectionResetError):
            while block := await asyncio.to_thread(sock.recv, 1 << 16):
                got += block
    assert got.startswith(b"HTTP/1.1 200") and b"[DONE]" not in got
    async with aiohttp.ClientSession() as session:  # the others are served
        stage.say("ok" + EOS)
        assert (await post(session, stage, chat()))[0] == 200


async def test_too_many_requests(start: Any, http: aiohttp.ClientSession) -> None:
    stage = await start(max_requests=2)
    stage.say("slow answer" + EOS, start_s=0.4)
    found = await asyncio.gather(*(post(http, stage, chat()) for _ in range(4)))
    assert sorted(status for status, _, _ in found) == [200, 200, 429, 429]
    limited = next(x for x in found if x[0] == 429)
    assert limited[1]["error"]["type"] == "rate_limit_error" and limited[2]["Retry-After"]


async def test_a_full_queue_is_known_at_the_door(
    start: Any, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """Who has all the requests is refused without a word to anybody; for another key the router
    may put one of them out.
    """
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n")
    stage = await start(keys_file=str(file))
    stage.is_full, stage.is_ready = True, False
    await stage.tell_peers()
    await asyncio.sleep(0.05)
    one: dict[str, Any] = {"headers": {"Authorization": "Bearer one"}}
    two: dict[str, Any] = {"headers": {"Authorization": "Bearer two"}}
    stage.say("slow answer" + EOS, start_s=1.0)
    first = asyncio.create_task(post(http, stage, chat(), **one))
    while not stage.generates:
        await asyncio.sleep(0.01)
    status, body, headers = await post(http, stage, chat(), **one)
    assert (status, body["error"]["code"], headers["Retry-After"]) == (429, "queue_full", "7")
    assert len(stage.generates) == 1
    assert (await post(http, stage, chat(), **two))[0] == 200 and len(stage.generates) == 2
    assert (await first)[0] == 200
    assert (await post(http, stage, chat(), **one))[0] == 200  # it has none: the router decides


async def test_who_is_on_its_way_takes_the_last_places(
    start: Any, http: aiohttp.ClientSession
) -> None:
    """The queue has one place left: of three that come at once, one is brought to the router."""
    stage = await start()
    stage.say("slow answer" + EOS, start_s=1.0)
    first = asyncio.create_task(post(http, stage, chat()))
    while not stage.generates:
        await asyncio.sleep(0.01)
    stage.num_free = 1
    await stage.tell_peers()
    await asyncio.sleep(0.1)
    found = await asyncio.gather(*(post(http, stage, chat()) for _ in range(3)))
    assert sorted(status for status, _, _ in found) == [200, 429, 429]
    assert len(stage.generates) == 2 and (await first)[0] == 200
    # Nobody is on its way any more.
    running = asyncio.create_task(post(http, stage, chat()))
    await asyncio.sleep(0.3)
    assert (await post(http, stage, chat()))[0] == 200 and (await running)[0] == 200


async def test_not_ready(stage: Any, http: aiohttp.ClientSession) -> None:
    stage.is_ready = False
    await stage.tell_peers()
    await asyncio.sleep(0.05)
    async with http.get(stage.base + "/ready") as response:
        assert response.status == 503 and "no decode" in (await response.json())["why"]
    async with http.get(stage.base + "/health") as response:
        assert response.status == 200
    stage.say("ok" + EOS)
    asking = asyncio.create_task(post(http, stage, chat()))
    await asyncio.sleep(5.5)  # a worker starts anew
    assert not asking.done()
    stage.is_ready = True
    await stage.tell_peers()
    assert (await asking)[0] == 200


async def test_an_outage_is_waited_for_as_long_as_the_queue(
    start: Any, http: aiohttp.ClientSession
) -> None:
    stage = await start(queue_timeout_s=0.3)
    stage.is_ready = False
    await stage.tell_peers()
    await asyncio.sleep(0.05)
    async with asyncio.timeout(4):
        status, body, headers = await post(http, stage, chat())
    assert status == 503 and "no decode" in body["error"]["message"] and headers["Retry-After"]


KEY = "secret-key-1"


@pytest.fixture
async def locked(start: Any, tmp_path: Path) -> Any:
    file = tmp_path / "keys"
    file.write_text(f"# ours\n{KEY}\nsecond\n")
    return await start(keys_file=str(file))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/chat/completions"),
        ("POST", "/beta/completions"),
        ("GET", "/v1/models"),
        ("HEAD", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/nothing"),
        ("OPTIONS", "/v1/models"),
        ("GET", "//v1/models"),
        ("GET", "/v1/../v1/models"),
        ("GET", "/health/../v1/models"),
        ("GET", "/v1%2Fmodels"),
        ("PUT", "/health"),
    ],
)
async def test_default_deny(
    method: str, path: str, locked: Any, http: aiohttp.ClientSession
) -> None:
    """Every route without a key, by every way to write its path."""
    from yarl import URL

    url = URL(locked.base + path, encoded=True)
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": KEY[:-1]}):
        async with http.request(method, url, headers=headers) as response:
            assert response.status in (401, 405), (method, path, response.status)


async def test_keys_open(locked: Any, http: aiohttp.ClientSession) -> None:
    for headers in (
        {"Authorization": f"Bearer {KEY}"},
        {"x-api-key": "second"},
        {"Authorization": f"Bearer {KEY}", "x-api-key": "wrong"},  # Bearer wins
    ):
        async with http.get(locked.base + "/v1/models", headers=headers) as response:
            assert response.status == 200
    async with http.get(locked.base + "/health") as response:
        assert response.status == 200
    wrong = {"Authorization": "Bearer wrong", "x-api-key": KEY}
    async with http.get(locked.base + "/v1/models", headers=wrong) as response:
        assert response.status == 401
        assert (await response.json())["error"]["code"] == "invalid_api_key"


async def test_metrics_of_all_processes(stage: Any, http: aiohttp.ClientSession) -> None:
    stage.say("one two three" + EOS)
    await post(http, stage, chat())
    async with http.get(stage.base + "/metrics") as response:
        text = await response.text()
    assert 'decant_up{svc="tokenizer",instance="tokenizer-0"} 1' in text
    assert 'decant_tokenizer_tokens_total{svc="tokenizer",instance="tokenizer-0"} 4.0' in text
    assert 'decant_generation_tokens_total{svc="gateway",instance="gateway-0"} 4.0' in text
    line = next(
        x for x in text.splitlines() if x.startswith("decant_time_to_first_token_seconds_c")
    )
    assert line.endswith(" 1.0")


@pytest.mark.parametrize("compat", ["vllm", "sglang"])
async def test_metrics_compat(start: Any, http: aiohttp.ClientSession, compat: str) -> None:
    """What ``decant up --metrics-compat`` sets: one server's names stand beside ours unasked."""
    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    assert f"observability.metrics_compat={compat}" in up.pairs_of(
        parser.parse_args(["--metrics-compat", compat])
    )
    stage = await start(compat=compat)
    stage.say("one two" + EOS)
    await post(http, stage, chat())
    async with http.get(stage.base + "/metrics") as response:
        lines = (await response.text()).splitlines()
    [theirs] = [x for x in lines if x.startswith(f"{compat}:generation_tokens_total{{")]
    [ours] = [x for x in lines if x.startswith("decant_generation_tokens_total{")]
    assert theirs.rpartition(" ")[2] == ours.rpartition(" ")[2] == "3.0"
    other = "sglang" if compat == "vllm" else "vllm"
    assert not [x for x in lines if x.startswith(f"{other}:")]


async def test_request_ids(stage: Any, http: aiohttp.ClientSession) -> None:
    stage.say("x" + EOS)
    _, _, headers = await post(http, stage, chat(), headers={"X-Request-Id": "my-id"})
    assert headers["X-Request-Id"] == "my-id"
    _, _, headers = await post(http, stage, chat(), headers={"X-Request-Id": "bad id\t"})
    assert len(headers["X-Request-Id"]) == 32


async def test_fields_reach_the_worker(stage: Any, http: aiohttp.ClientSession) -> None:
    stage.say("x" + EOS)
    more = {
        "seed": -5, "temperature": 0, "top_p": 0.5, "top_k": 0, "min_p": 0.1, "max_tokens": 9,
        "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [7], "logit_bias": {"3": -100},
        "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.1, "user_id": "u",
        "priority": 3,
    }  # fmt: skip
    status, body, _ = await post(http, stage, chat(**more))
    assert status == 200, body
    g = stage.generates[0]
    s = g.sampling
    assert (s.seed, s.temperature, s.top_p, s.top_k, s.min_p) == (-5, 0, 0.5, 0, 0.1)
    assert (s.max_tokens, s.min_tokens, s.ignore_eos, s.stop_token_ids) == (9, 2, True, [7])
    assert s.logit_bias == {3: -100} and s.repetition_penalty == 1.1
    assert g.priority == 3 and "u" in g.cache_salt and g.deadline_ms > 0
    await post(http, stage, chat())
    await post(http, stage, chat())
    seeds = [g.sampling.seed for g in stage.generates[1:]]
    assert seeds[0] != seeds[1] and all(seed >= 0 for seed in seeds)


THINK, CHAT_END = "<think>", "</think>"


@pytest.mark.parametrize(
    ("more", "is_thinking"),
    [
        ({}, False),
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"chat_template_kwargs": {"thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}, False),
        ({"reasoning": {"effort": "low"}}, True),
        ({"reasoning": {"enabled": False}}, False),
    ],
)
async def test_thinking_in_all_spellings(
    more: dict[str, Any], is_thinking: bool, stage: Any, http: aiohttp.ClientSession
) -> None:
    stage.say("thought</think>said" + EOS)
    status, body, _ = await post(http, stage, chat(**more))
    assert status == 200, body
    marker = 128821 if is_thinking else 128822
    assert stage.prompts[0][-1] == marker
    message = body["choices"][0]["message"]
    assert message.get("reasoning_content") == ("thought" if is_thinking else None)
    assert message["content"] == ("said" if is_thinking else "thoughtsaid")


async def test_tool_choice_none_hides_the_tools(stage: Any, http: aiohttp.ClientSession) -> None:
    stage.say("x" + EOS)
    await post(http, stage, chat())
    await post(http, stage, chat(tools=[TOOL], tool_choice="none"))
    await post(http, stage, chat(tools=[TOOL]))
    lengths = [len(p) for p in stage.prompts]
    assert lengths[0] == lengths[1] < lengths[2]


async def test_strict_fields(start: Any, http: aiohttp.ClientSession) -> None:
    stage = await start(strict_fields=True)
    status, body, _ = await post(http, stage, chat(wibble=1))
    assert status == 400 and body["error"]["param"] == "wibble"


async def test_completions_fields(stage: Any, http: aiohttp.ClientSession) -> None:
    path = "/v1/completions"
    for more, param in (
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [129280]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": "a", "logprobs": 6}, "logprobs"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": ["a"] * 20, "n": 16}, "prompt"),
    ):
        status, body, _ = await post(http, stage, {"model": MODEL, **more}, path)
        assert status == 400 and body["error"]["param"] == param, body
    assert not stage.generates
    body = {"model": MODEL, "prompt": ["a b", [5, 6]], "echo": True, "max_tokens": 0}
    status, answer, _ = await post(http, stage, body, path)
    assert status == 200
    assert answer["choices"][0]["text"] == "a b"
    assert answer["choices"][1]["text"] == stage.vocabulary.decode([5, 6])


async def test_fill_in_the_middle(stage: Any, http: aiohttp.ClientSession) -> None:
    stage.say("x" + EOS)
    body = {"model": MODEL, "prompt": "def f(", "suffix": "return x"}
    status, answer, _ = await post(http, stage, body, "/beta/completions")
    assert status == 200, answer
    ids, v = stage.prompts[0], stage.vocabulary
    assert ids == [0, 128801, *v.encode_text("def f("), 128800, *v.encode_text("return x"), 128802]

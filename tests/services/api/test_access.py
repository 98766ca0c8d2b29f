"""Keys and their limits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from decant.protocol.config import GatewayConfig
from decant.protocol.errors import ConfigError
from decant.services.api.access import Bucket, Key, Keys, RateLimited

CHAT = {"model": "test-model", "messages": [{"role": "user", "content": "hi"}]}


def test_a_bucket_fills_by_the_minute() -> None:
    now = [0.0]
    bucket = Bucket(60, lambda: now[0])
    for _ in range(60):
        assert not bucket.wait_s()
        bucket.take(1)
    assert bucket.wait_s() == pytest.approx(1.0)
    now[0] = 1.5
    assert not bucket.wait_s()
    bucket.take(31)  # tokens are charged afterwards: debt
    assert bucket.wait_s() == pytest.approx(30.5)


def test_limits_of_a_key() -> None:
    now = [0.0]
    key = Key(b"", "k", {"rpm": 2, "concurrent": 1, "tpm": 100}, lambda: now[0])
    with key.running(), pytest.raises(RateLimited, match="1 requests at once"), key.running():
        pass
    with key.running():
        key.spend(50)
    with pytest.raises(RateLimited, match="requests per minute") as error, key.running():
        pass
    assert error.value.retry_after_s == pytest.approx(30)
    now[0] = 60
    key.spend(200)
    with pytest.raises(RateLimited, match="tokens per minute"), key.running():
        pass
    assert key.num_running == 0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no key"),
        ("# nothing\n\n", "holds no key"),
        ("k rpm=0", "line 1: 'rpm=0'"),
        ("k\nl speed=5", "line 2: 'speed=5'"),
    ],
)
def test_bad_files(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        Keys(GatewayConfig(keys_file=str(file)))


def test_a_public_address_needs_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0"):
        Keys(GatewayConfig(host="0.0.0.0"))
    with pytest.raises(ConfigError, match="cannot read"):
        Keys(GatewayConfig(keys_file=str(tmp_path / "none")))


async def test_limits_over_http(start: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one name=ci concurrent=1\ntwo rpm=1\n")
    stage = await start(keys_file=str(file))
    stage.say("ok<｜end▁of▁sentence｜>", start_s=0.2)
    url = stage.base + "/v1/chat/completions"
    async with aiohttp.ClientSession() as http:

        async def ask(key: str) -> int:
            async with http.post(
                url, json=CHAT, headers={"Authorization": f"Bearer {key}"}
            ) as response:
                if response.status == 429:
                    assert (await response.json())["error"]["code"] == "rate_limit_exceeded"
                    assert int(response.headers["Retry-After"]) >= 1
                return response.status

        assert sorted(await asyncio.gather(ask("one"), ask("one"))) == [200, 429]
        assert [await ask("two"), await ask("two")] == [200, 429]
        assert await ask("one") == 200
    assert [g.tenant for g in stage.generates].count("ci") == 2

"""Capture and ``decant wire``: what the sockets sent is what is printed, without our schemas."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from decant.protocol.messages import CloseStream, Detokenize
from decant.protocol.wire import Sender
from decant.services import cli
from decant.services.capture import VARIABLE, Capture
from decant.services.sockets import Dealer, RouterSocket


async def talk(endpoint: str) -> None:
    server = RouterSocket(Sender("tokenizer-0"), endpoint)
    client = Dealer(Sender("gateway-0"), endpoint)
    try:
        await client.send(Detokenize("r1"), [np.arange(3, dtype=np.int32).tobytes()])
        envelope = await asyncio.wait_for(server.receive(), 10)
        await server.send(envelope.identity, CloseStream("r2"))
        await asyncio.wait_for(client.receive(), 10)
    finally:
        client.close()
        server.close()


async def test_capture_and_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "frames"
    monkeypatch.setenv(VARIABLE, str(path))
    await talk(f"ipc://{tmp_path}/s")
    monkeypatch.delenv(VARIABLE)
    assert path.stat().st_mode & 0o077 == 0
    assert cli.main(["wire", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert sum("detokenize" in line for line in lines) == 2
    assert "[12 B: 0 1 2]" in lines[0] and "gateway-0" in lines[0] and "->" in lines[0]
    assert cli.main(["wire", str(path), "--request", "r2", "--direction", "in", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    message = json.loads(line)
    assert message["body"] == {"type": "close_stream", "request_id": "r2"}
    assert message["header"]["source"] == "tokenizer-0"


def test_capture_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "frames"
    capture = Capture(str(path), limit=100_000)
    for _ in range(10_000):
        capture.write("out", "x", [b"h", b"b", bytes(100_000)])
    assert capture.is_full
    assert path.stat().st_size < 100_000 + 64 * 5000


def test_broken_capture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "frames"
    capture = Capture(str(path))
    capture.write(
        "out", "x", [b"\x80", b"\xc1"]
    )  # an empty map, and a byte that msgpack never uses
    assert cli.main(["wire", str(path)]) == 0
    assert "unreadable" in capsys.readouterr().out
    path.write_bytes(path.read_bytes() + b"\x93\x01")
    assert cli.main(["wire", str(path)]) in (0, 1)
    path.write_bytes(b"\x01\x02")
    assert cli.main(["wire", str(path)]) == 1
    assert cli.main(["wire", str(tmp_path / "none")]) == 2

"""The recorder of ``compare_aiperf.py``: what it writes down, and that it plays just that."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@contextmanager
def recorder(*words: str) -> Iterator[str]:
    command = [sys.executable, "-P", str(HERE / "recorder.py"), *words]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(child.stdout.readline())}"
        finally:
            child.kill()


def ask(url: str, prompt: str, **more: Any) -> bytes:
    body = {"model": "mock", "messages": [{"role": "user", "content": prompt}], "stream": True,
            "max_tokens": 6, "stream_options": {"include_usage": True}, **more}  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        data: bytes = answer.read()
        return data


def recorded(url: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/recorded") as answer:
        return list(json.load(answer))


def test_a_recording_is_played_as_it_was(mock_url: str, tmp_path: Path) -> None:
    """Same bytes, and no piece early; how late one may be is up to the machine."""
    mock = {"ttft_ms": 80, "gap_ms": 40, "per_chunk": 2}
    with recorder("--upstream", mock_url) as url:
        answers = {p: ask(url, p, mock=mock) for p in ("one", "two")}
        rows = recorded(url)
    assert [len(row["key"]) for row in rows] == [24, 24]
    times = [at / 1e6 for at, _ in rows[0]["pieces"]]
    assert times[0] < times[-1] and times[-1] >= 80 + 2 * 40 - 2
    path = tmp_path / "record.json"
    path.write_text(json.dumps(rows))
    with recorder("--replay", str(path)) as url:
        # Another generator sends other fields and a list of parts, in another order.
        parts: Any = [{"type": "text", "text": "two"}]
        assert ask(url, parts, temperature=1) == answers["two"]
        assert ask(url, "one") == answers["one"]
        played = {row["key"]: row["pieces"] for row in recorded(url)}
    for row in rows:
        for (want, text), (at, played_text) in zip(row["pieces"], played[row["key"]], strict=True):
            assert text == played_text and 0 <= at - want < 1e9

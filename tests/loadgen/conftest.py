"""The mock server as a process, and a way to run the command against it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from decant.loadgen import cli

Bench = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="session")
def mock_url() -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).with_name("mock_server.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.stdin.close()
        process.wait(10)


@pytest.fixture
def bench(mock_url: str, tmp_path: Path) -> Bench:
    """``bench("--num", 5, mock={...})`` -> exit code and the JSON summary."""

    def run(*words: object, mock: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        path = tmp_path / "run.json"
        path.unlink(missing_ok=True)
        parser = argparse.ArgumentParser()
        cli.add_arguments(parser)
        extra = json.dumps({"mock": mock or {}})
        args = ["--url", mock_url, "--json", str(path), "--extra", extra, *map(str, words)]
        code = cli.main(parser.parse_args(args))
        return code, json.loads(path.read_text()) if path.exists() else {}

    return run

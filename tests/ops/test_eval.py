"""Counting of ``decant eval``, against a small server that answers some prompts right."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from decant.engine.demo import prompts
from decant.services import cli
from decant.services.commands import eval as command

NUM = 6
SEED = 3
USAGE = {
    "completion_tokens": 10,
    "speculation": {"drafted_tokens": 4, "accepted_tokens": 3, "steps": 5},
}


def metrics(num: int) -> str:
    """The page after ``num`` requests."""
    drafted, accepted = command.COUNTERS
    return (
        f'{drafted}{{svc="decode",position="0"}} {num * 4}.0\n'
        f'{drafted}{{svc="decode",position="1"}} {num * 2}.0\n'
        f'{accepted}{{svc="decode",position="0"}} {num * 3}.0\n'
        f'{accepted}{{svc="decode",position="1"}} {num * 1}.0\n'
    )


class Handler(BaseHTTPRequestHandler):
    answers: dict[str, str] = {}
    num = 0
    busy = 0

    def log_message(self, *args: Any) -> None:
        pass

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self) -> None:
        self._answer(200, metrics(Handler.num))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Handler.num += 1
        if Handler.num <= Handler.busy:
            return self._answer(429, '{"error": {"message": "busy"}}')
        text = self.answers.get(json.dumps(body["messages"]), "wrong")
        message = {"role": "assistant", "content": text}
        self._answer(200, json.dumps({"choices": [{"message": message}], "usage": USAGE}))


@pytest.fixture
def url() -> Iterator[str]:
    cases = prompts.cases("add", NUM, SEED)
    Handler.answers = {json.dumps(c.messages): c.answer for c in cases[:4]}
    Handler.num = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_counts(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "eval.json"
    words = ["eval", "--url", url, "--model", "m", "--skills", "add", "--num", str(NUM)]
    words += ["--seed", str(SEED), "--json", str(file)]
    assert cli.main([*words, "--failures", "1"]) == 0
    out = capsys.readouterr().out
    assert "66.7%" in out and "position 1: 75.0%, position 2: 50.0%" in out
    assert "wanted" in out and "got" in out
    table = json.loads(file.read_text())
    (skill,) = table["skills"]
    assert (skill["right"], skill["num"], skill["errors"]) == (4, NUM, 0)
    assert skill["acceptance"] == 0.75
    assert cli.main([*words, "--at-least", "0.6"]) == 0
    assert cli.main([*words, "--at-least", "0.95"]) == 1


def test_answers_are_compared_with_an_earlier_run(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "eval.json"
    words = ["eval", "--url", url, "--model", "m", "--skills", "add", "--num", str(NUM)]
    words += ["--seed", str(SEED)]
    assert cli.main([*words, "--json", str(file)]) == 0
    assert cli.main([*words, "--same-as", str(file)]) == 0
    assert f"{NUM} of {NUM} answers as in" in capsys.readouterr().err
    Handler.answers.popitem()
    assert cli.main([*words, "--same-as", str(file)]) == 1
    assert f"{NUM - 1} of {NUM} answers as in" in capsys.readouterr().err
    assert cli.main([*words[:-1], "9", "--same-as", str(file)]) == 2  # other prompts
    assert cli.main([*words, "--same-as", str(tmp_path / "no.json")]) == 2


def test_short_runs_make_one_table(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "eval.json"
    words = ["eval", "--url", url, "--model", "m", "--num", str(NUM), "--json", str(file)]
    words += ["--merge", "--skills"]
    assert cli.main([*words, "sub"]) == 0  # of seed 0; the server knows only `add` of SEED
    assert cli.main([*words, "add", "--seed", str(SEED)]) == 2
    assert "is of seed 0 and temperature 0.0" in capsys.readouterr().err
    assert cli.main([*words, "add", "--temperature", "1"]) == 2
    assert cli.main([*words, "add", "--model", "n"]) == 2
    assert "is of model m, this run of n" in capsys.readouterr().err
    assert cli.main([*words, "add"]) == 0 and cli.main([*words, "add"]) == 0
    table = json.loads(file.read_text())
    assert [s["skill"] for s in table["skills"]] == ["add", "sub"]
    assert [s["positions"]["1"] for s in table["skills"]] == [[NUM * 4, NUM * 3]] * 2
    assert table["acceptance_by_position"] == {"1": 0.75, "2": 0.5}
    file.write_text("[]")
    assert cli.main([*words, "add"]) == 2
    assert cli.main([*words[:-2], "--skills", "add"]) == 0  # without --merge it is written anew


@pytest.mark.parametrize("pauses, right", [((0.0, 0.0), 4), ((), 2)])
def test_a_busy_set_is_asked_again(
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pauses: tuple[float, ...],
    right: int,
) -> None:
    monkeypatch.setattr(command, "BUSY_PAUSES_S", pauses)
    monkeypatch.setattr(Handler, "busy", 2)
    file = tmp_path / "eval.json"
    words = ["eval", "--url", url, "--model", "m", "--skills", "add", "--num", str(NUM)]
    words += ["--seed", str(SEED), "--concurrency", "1", "--json", str(file)]
    assert cli.main(words) == (0 if pauses else 1)
    assert json.loads(file.read_text())["skills"][0]["right"] == right


def test_questions_about_one_block_wait_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks at once, the questions about one in turn: else the prefix cache has it for none."""
    skill, size = "recall-number@2000", prompts.PER_BLOCK["recall-number@2000"]
    under_way: set[str] = set()
    most, lock = 0, threading.Lock()

    def ask(api: Any, model: str, case: prompts.Case, seed: int, temperature: float) -> Any:
        nonlocal most
        block = case.messages[-1]["content"].rpartition("\n")[0]
        with lock:
            assert block not in under_way
            under_way.add(block)
            most = max(most, len(under_way))
        time.sleep(0.02)
        with lock:
            under_way.remove(block)
        return case.messages[-1]["content"].endswith("?"), {}, f"{seed}"

    monkeypatch.setattr(command, "ask", ask)
    file = tmp_path / "eval.json"
    words = ["eval", "--url", "http://127.0.0.1:9", "--model", "m", "--skills", skill]
    words += ["--num", str(2 * size + 1), "--concurrency", "4", "--json", str(file)]
    cli.main(words)
    (row,) = json.loads(file.read_text())["skills"]
    assert most == 3 and row["num"] == 2 * size + 1
    assert row["digests"] == [command.digest(str(seed)) for seed in range(2 * size + 1)]


def test_a_tool_calls_id_is_not_part_of_an_answer() -> None:
    call = '{"tool_calls": [{"id": "call_%d", "function": {"name": "%s"}}]}'
    assert command.digest(call % (1, "a")) == command.digest(call % (2, "a"))
    assert command.digest(call % (1, "a")) != command.digest(call % (1, "b"))


def test_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", "--skills", "flying"]) == 2
    assert "flying" in capsys.readouterr().err
    assert cli.main(["eval", "--url", "http://127.0.0.1:9", "--num", "0"]) == 2

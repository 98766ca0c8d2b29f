"""``decant bench`` as a whole, against a mock server in another process."""

from __future__ import annotations

import csv
import io
import json
import re
import urllib.request
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from decant.loadgen import cli, probe, sweep, table
from decant.loadgen.plan import Progress
from decant.protocol.errors import InvalidRequest

Bench = Callable[..., tuple[int, dict[str, Any]]]


def state(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/state") as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def test_open_loop(bench: Bench) -> None:
    code, found = bench(
        *("--rate", 100, "--num", 60, "--input-len", 100, "--output-len", 12, "--check", 3),
        *("--content", "prose,json", "--slo", "ttft=5000,tpot=5000"),
        mock={"ttft_ms": 20, "gap_ms": 5, "per_chunk": 3},
    )
    assert code == 0
    assert found["requests"]["ok"] == 60
    latency = found["latency_ms"]
    assert latency["ttft"]["min"] >= 19  # timers of the mock are good to a millisecond
    assert latency["ttft"]["p50"] < 500
    # 4 chunks of 3 tokens, 5 ms apart: 15 ms for 11 tokens
    assert latency["tpot"]["min"] >= 12 / 11
    assert latency["itl"]["count"] == 60 * 3
    assert found["output_tokens"] == {
        "count": 60, "mean": 12, "min": 12, "p50": 12, "p90": 12, "p95": 12, "p99": 12, "max": 12,
    }  # fmt: skip
    assert found["prompt_tokens"]["min"] >= 98 and found["prompt_tokens"]["max"] <= 102
    assert found["slo_attainment"] == 1
    assert found["goodput"] == found["request_throughput"]
    assert found["acceptance"]["all"] == {"requests": 60, "length": 2.0, "rate": 0.5}
    assert set(found["acceptance"]) == {"all", "prose", "json"}
    assert list(found["stages_ms"]) == ["queue", "prefill", "handoff", "decode"]
    assert found["delivery_ms"]["p50"] == 0.75
    assert found["correctness"] == {"checked": 3, "different": 0, "examples": []}
    assert found["pages"]["leaked"] == 0


def test_an_open_loop_does_not_wait_for_slow_answers(bench: Bench) -> None:
    """20 requests due within 0.2 s, answers take 1 s: all are sent on time (in flight together)."""
    code, found = bench(
        *("--arrivals", "constant", "--rate", 100, "--num", 20, "--output-len", 2),
        mock={"ttft_ms": 1000},
    )
    assert code == 0
    assert found["mean_concurrency"] > 12
    assert found["latency_ms"]["lateness"]["p50"] < 50


def test_a_full_generator_shows_as_lateness(bench: Bench) -> None:
    """With one request in flight at most, waits count: no coordinated omission."""
    _, found = bench(
        *("--arrivals", "constant", "--rate", 100, "--num", 6, "--output-len", 2),
        *("--max-in-flight", 1, "--slo", "ttft=150"),
        mock={"ttft_ms": 100},
    )
    assert found["latency_ms"]["lateness"]["max"] > 400
    assert found["latency_ms"]["ttft"]["max"] < 400
    assert found["latency_ms"]["ttft_from_due"]["max"] > 500
    assert found["slo_attainment"] < 0.5


def test_closed_loop(bench: Bench) -> None:
    """3 users, 12 requests of at least 50 ms: never more than 3 in flight."""
    code, found = bench(
        *("--arrivals", "closed", "--concurrency", 3, "--num", 12, "--output-len", 2),
        *("--workers", 2),
        mock={"ttft_ms": 50},
    )
    assert code == 0
    assert found["requests"]["ok"] == 12
    assert found["duration_s"] > 0.19
    assert 1.5 < found["mean_concurrency"] <= 3
    assert "lateness" not in found["latency_ms"]


def test_sessions_carry_the_conversation(bench: Bench, mock_url: str, tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    code, found = bench(
        *("--rate", 50, "--num", 9, "--turns", 3, "--shared-prefix", 100, "--output-len", 4),
        *("--input-len", 50, "--warmup", 0, "--records", records),
    )
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    prompts = [row["num_prompt_tokens"] for row in rows]
    assert code == 0
    for one in (prompts[i : i + 3] for i in range(0, 9, 3)):
        assert one == sorted(one) and one[2] > one[0] + 80
    turns = found["turns"]
    assert [(t["turn"], t["requests"], t["ttft_ms"]["count"]) for t in turns] == [
        (0, 3, 3), (1, 3, 3), (2, 3, 3)
    ]  # fmt: skip
    assert turns[2]["prompt_tokens"]["min"] > turns[0]["prompt_tokens"]["max"]


def test_cancellations_hang_up(bench: Bench, mock_url: str) -> None:
    before = state(mock_url)["num_hung_up"]
    code, found = bench(
        *("--rate", 100, "--num", 20, "--output-len", 500, "--cancel-share", 1),
        *("--cancel-after", 2, "--warmup", 0),
        mock={"gap_ms": 10},
    )
    assert found["requests"]["cancelled"] == 20
    assert found["requests"]["error"] == 0
    assert state(mock_url)["num_hung_up"] == before + 20
    assert code == 1  # no request ended well


@pytest.mark.parametrize(
    ("fault", "outcome", "says"),
    [
        ("status", "error", "queue full"),
        ("event", "error", "engine died"),
        ("cut", "lost", "connection closed"),
        ("no_finish", "error", "without a finish_reason"),
        ("plain", "error", "not a stream"),
        ("hang", "timeout", "time limit"),
    ],
)
def test_faults_are_told_apart(bench: Bench, fault: str, outcome: str, says: str) -> None:
    code, found = bench(
        *("--rate", 100, "--num", 5, "--output-len", 6, "--warmup", 0, "--no-calibrate"),
        *("--timeout", 1 if fault == "hang" else 20),
        mock={"fault": fault},
    )
    assert code == 1
    assert found["requests"][outcome] == 5
    assert says in found["errors"][0]["error"]


def test_different_answers_are_found(bench: Bench) -> None:
    code, found = bench(
        *("--rate", 100, "--num", 6, "--check", 6, "--output-len", 6), mock={"fault": "differs"}
    )
    assert code == cli.EXIT_DIFFERENT
    assert found["correctness"]["different"] >= 4
    assert found["correctness"]["examples"][0]["text"]


def test_mixed_slo_classes(bench: Bench) -> None:
    """One class can be met and the other not: goodput and attainment count each by its own."""
    code, found = bench(
        *("--rate", 100, "--num", 40, "--output-len", 4),
        *("--slo", "chat:0.5:ttft=20000", "--slo", "fast:0.5:ttft=1"),
        mock={"ttft_ms": 20},
    )
    chat, fast = found["slo"]["chat"], found["slo"]["fast"]
    assert code == 0 and chat["requests"] + fast["requests"] == 40
    assert chat["attainment"] == 1 and fast["attainment"] == 0
    assert found["slo_attainment"] == chat["requests"] / 40


def test_live_progress() -> None:
    """On a terminal: done of all, rate, TTFT, lateness, failures, over all workers."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=200)
    with table.Live(10, console) as live:
        live.update(0, Progress(4, 3, 0, 1, 60, [80_000_000], [50_000]))
        live.update(1, Progress(3, 2, 1, 1, 40, [120_000_000], [50_000]))
    text = out.getvalue()
    assert "5/10" in text and "2 in flight" in text
    assert "TTFT p50 100.0 ms" in text and "late p99 0.05 ms" in text and "1 failed" in text


def test_leaked_pages_are_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.settled_pages, "__defaults__", (0.5,))
    code, found = bench(*("--rate", 100, "--num", 4), mock={"fault": "leak"})
    assert code == cli.EXIT_DIFFERENT
    assert found["pages"]["leaked"] == 4


class Outside(HTMLParser):
    """Collects what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.figures = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.figures += tag == "figure"
        for name, value in attrs:
            if name in ("src", "href") or tag in ("script", "link"):
                self.loads.append(f"{tag} {name}={value}")


def test_outputs(bench: Bench, tmp_path: Path) -> None:
    page, rows_csv, records = (tmp_path / n for n in ("r.html", "r.csv", "r.jsonl"))
    code, found = bench(
        *("--rate", 100, "--num", 10, "--output-len", 6, "--content", "code"),
        *("--html", page, "--csv", rows_csv, "--records", records, "--title", "<b>&"),
    )
    assert code == 0
    parser = Outside()
    text = page.read_text()
    parser.feed(text)
    assert parser.loads == []
    assert parser.figures >= 7
    assert "&lt;b&gt;&amp;" in text and "<b>&" not in text
    rows = list(csv.DictReader(rows_csv.read_text().splitlines()))
    assert [r["outcome"] for r in rows] == ["ok"] * 10
    assert all(float(r["ttft_ms"]) > 0 and float(r["handoff_ms"]) == 0.5 for r in rows)
    assert len(records.read_text().splitlines()) == 10
    assert not re.search(r'"key": "[^"]', json.dumps(found))


def test_sweep_finds_the_limit(bench: Bench, tmp_path: Path) -> None:
    page = tmp_path / "s.html"
    code, found = bench(
        *("--arrivals", "constant", "--rate", 40, "--num", 8, "--output-len", 2, "--sweep"),
        *("--max-in-flight", 2, "--slo", "ttft=120", "--attainment", 0.9, "--tolerance", 0.5),
        *("--html", page),
        mock={"ttft_ms": 50},
    )
    # two in flight at 50 ms each: 40/s; at twice that the queue of 8 grows beyond 120 ms
    best = found["sweep"]["highest_rate_within_slo"]
    assert code == 0
    assert 15 <= best <= 110
    assert len(found["sweep"]["steps"]) >= 2
    assert "Goodput and throughput" in page.read_text()


@pytest.mark.parametrize("limit", [0.3, 1.0, 7.0, 7.1, 900.0])
def test_search(limit: float) -> None:
    best, steps = sweep.highest(lambda rate: rate <= limit, 2.0, tolerance=0.05)
    assert limit / 1.06 <= best <= limit
    assert len(steps) < 20


def test_search_without_a_good_rate_ends() -> None:
    best, steps = sweep.highest(lambda rate: False, 2.0)
    assert best == 0 and len(steps) < 12


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--num", "0"], "number of requests"),
        (["--num", "5", "--rate", "0"], "rate must be positive"),
        (["--num", "5", "--slo", "ttft"], "not an SLO"),
        (["--num", "5", "--slo", "ttft=-3"], "not an SLO"),
        (["--num", "5", "--slo", "ttft=1", "--slo", "tpot=1"], "name of its own"),
        (["--num", "5", "--extra", "[1]"], "JSON object"),
        (["--num", "5", "--extra", "{"], "not JSON"),
        (["--num", "5", "--content", "verse"], "CLASS=SHARE"),
        (["--num", "5", "--ids"], "--api completions"),
        (["--num", "5", "--dataset", "mooncake"], "needs --path"),
        (["--num", "5", "--concurrency", "0"], "at least 1"),
        (["--num", "5", "--sweep"], "needs --slo"),
        (["--num", "5", "--url", "http://127.0.0.1:1"], "does not answer"),
        (["--num", "5", "--json", "/nowhere/x.json"], "cannot write"),
    ],
)
def test_wrong_use_is_one_sentence(
    bench: Bench, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    code, _ = bench(*words)
    assert code == 2
    assert says in " ".join(capsys.readouterr().out.split())


def test_slo_forms() -> None:
    assert cli.parse_slo("ttft=300").ttft_ns == 300_000_000
    named = cli.parse_slo("chat:0.8:ttft=300,stall=1000")
    assert (named.name, named.share, named.stall_ns) == ("chat", 0.8, 1_000_000_000)
    with pytest.raises(InvalidRequest):
        cli.parse_slo("chat:ttft=1")

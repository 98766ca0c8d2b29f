"""The same load by ``decant bench`` and by AIPerf, and how far their figures are apart.

    python -P tests/loadgen/compare_aiperf.py --aiperf VENV/bin/aiperf --run-dir DIR \\
        --tokenizer engine/demo --json FILE

With --url or --run-dir one run of that server is recorded first (``recorder.py``), by ``decant
bench`` in a closed loop; then both tools measure the recording, taking turns (--rounds), so both
see the same bytes after the same pauses, and what differs is the tools. The recording says what is
true: TTFT and the gaps as they were sent. --live measures the running server instead, also by
turns: there AIPerf's processes share the machine with it.
Without a server a mock with known delays is measured. AIPerf's inter_token_latency is our TPOT, its
inter_chunk_latency our ITL.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any

from decant.loadgen import content
from decant.loadgen.exchange import Exchange
from decant.loadgen.plan import Record, Request
from decant.loadgen.summary import summarise

PAIRS = (
    ("TTFT", "ttft", "time_to_first_token"),
    ("TPOT", "tpot", "inter_token_latency"),
    ("ITL", "itl", "inter_chunk_latency"),
    ("E2E", "e2e", "request_latency"),
)
PARTS = (("mean", "avg"), ("p50", "p50"), ("p90", "p90"), ("p99", "p99"))
MOCK = {"ttft_ms": 300, "gap_ms": 60, "per_chunk": 2}
HERE = Path(__file__).parent
Figures = dict[tuple[str, str], float]  # (metric of ours, mean or percentile): ms


def write_prompts(path: Path, num: int, input_len: int) -> None:
    """One prompt a line, under the names that both tools read."""
    with path.open("w") as file:
        for number in range(num):
            text = content.text("prose", 4 * input_len, Random(number))
            file.write(json.dumps({"prompt": text, "text": text}) + "\n")


@contextmanager
def process(script: str, *words: str) -> Iterator[str]:
    """A server of ours in a process of its own; its URL."""
    command = [sys.executable, "-P", str(HERE / script), *words]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(child.stdout.readline())}"
        finally:
            child.kill()


def ours(args: argparse.Namespace, url: str, extra: dict[str, Any], folder: Path) -> Figures:
    path = folder / "ours.json"
    command = [sys.executable, "-P", "-m", "decant.loadgen.cli", "--url", url, "--json", str(path)]
    command += ["--arrivals", "closed", "--concurrency", str(args.concurrency), "--warmup", "0"]
    command += ["--num", str(args.num), "--dataset", "prompts", "--path", str(folder / "prompts")]
    command += ["--output-len", str(args.output_len), "--extra", json.dumps(extra)]
    command += ["--no-calibrate", "--ignore-eos"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = json.loads(path.read_text())["latency_ms"]
    return {(key, part): found[key][part] for _, key, _ in PAIRS for part, _ in PARTS}


def theirs(args: argparse.Namespace, url: str, extra: dict[str, Any], folder: Path) -> Figures:
    with tempfile.TemporaryDirectory(dir=folder) as out:
        command = [args.aiperf, "profile", "--model", args.model, "--url", url]
        command += ["--endpoint-type", "chat", "--streaming", "--tokenizer", args.tokenizer]
        command += ["--concurrency", str(args.concurrency), "--request-count", str(args.num)]
        command += ["--input-file", str(folder / "prompts")]
        command += ["--custom-dataset-type", "single_turn", "--use-server-token-count"]
        fields = {"max_tokens": args.output_len, "ignore_eos": True, "temperature": 0.0, **extra}
        command += ["--extra-inputs", json.dumps(fields), "--artifact-dir", out, "--ui", "none"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"AIPerf failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        (path,) = Path(out).rglob("profile_export_aiperf.json")
        found = json.loads(path.read_text())
    return {(key, part): found[name][t] for _, key, name in PAIRS for part, t in PARTS}


def truth(rows: list[dict[str, Any]]) -> Figures:
    """Figures of what a recorder sent, by our definitions: no socket, no client between."""
    records = []
    for i, row in enumerate(rows):
        record = Record(i, sent_ns=1, due_ns=1)
        exchange = Exchange(Request(i), record, b"")
        rest = ""
        for at, text in row["pieces"]:
            *events, rest = (rest + text).split("\n\n")
            for event in events:
                exchange.on_event(event.removeprefix("data: ").encode(), 1 + at)
        exchange.finish("ok", 1 + row["pieces"][-1][0])
        records.append(record)
    found = summarise(records, is_open_loop=False)["latency_ms"]
    return {(key, part): found[key][part] for _, key, _ in PAIRS for part, _ in PARTS}


def recorded(url: str, reset: bool = False) -> list[dict[str, Any]]:
    request = urllib.request.Request(f"{url}/recorded", method="POST" if reset else "GET")
    with urllib.request.urlopen(request) as answer:
        return list(json.load(answer)) if not reset else []


def record(args: argparse.Namespace, url: str, folder: Path) -> Path:
    """One run of the server, written down."""
    path = folder / "record.json"
    with process("recorder.py", "--upstream", url) as proxy:
        ours(args, proxy, {}, folder)
        rows = recorded(proxy)
    assert len(rows) == args.num, f"{len(rows)} of {args.num} requests were recorded"
    path.write_text(json.dumps(rows))
    return path


def server_of(args: argparse.Namespace) -> str:
    if not args.run_dir:
        return str(args.url)
    from decant.services import rundir
    from decant.services.target import url_of

    return url_of(rundir.read_config(Path(args.run_dir)))


def mean(runs: list[Figures]) -> Figures:
    return {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}


def show(rows: dict[str, Figures]) -> float:
    """The table; returns the largest difference of a mean or median of TTFT, TPOT and ITL."""
    names = list(rows)
    print(f"{'ms':12}" + "".join(f"{n:>12}" for n in names) + f"{'apart':>9}")
    worst = 0.0
    for title, key, _ in PAIRS:
        for part, _ in PARTS:
            values = [rows[n][key, part] for n in names]
            mine, other = rows["decant"][key, part], rows["AIPerf"][key, part]
            apart = 100 * (mine / other - 1) if other else float("inf") if mine else 0.0
            if part in ("mean", "p50") and key != "e2e":
                worst = max(worst, abs(apart))
            cells = "".join(f"{v:12.3f}" for v in values)
            print(f"{title:6}{part:>6}{cells}{apart:8.2f}%")
    return worst


def main() -> int:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--aiperf", required=True)
    add("--tokenizer", required=True, help="a folder with tokenizer.json")
    add("--url", default="", help="a running server; default: a mock with known delays")
    add("--run-dir", default="", help="a running set of decant")
    add("--live", action="store_true", help="measure the server, not a recording of it")
    add("--model", default="")
    add("--num", type=int, default=40)
    add("--rounds", type=int, default=2)
    add("--concurrency", type=int, default=4)
    add("--input-len", type=int, default=100)
    add("--output-len", type=int, default=32)
    add("--json", default="", help="write the figures there")
    args = parser.parse_args()
    args.tokenizer = str(Path(args.tokenizer).absolute())
    url, extra = server_of(args), {}
    is_replay = bool(url) and not args.live
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_prompts(folder / "prompts", args.num, args.input_len)
        args.model = args.model or ("decant-demo" if url else "mock")
        if not url:
            url, extra = stack.enter_context(process("mock_server.py")), {"mock": MOCK}
        if is_replay:
            path = record(args, url, folder)
            url = stack.enter_context(process("recorder.py", "--replay", str(path)))
        mine: list[Figures] = []
        other: list[Figures] = []
        sent: list[dict[str, Any]] = []
        for number in range(args.rounds):
            turns = [(mine, ours), (other, theirs)]
            for runs, tool in turns if number % 2 == 0 else reversed(turns):
                runs.append(tool(args, url, extra, folder))
                if is_replay:
                    sent += recorded(url)
                    recorded(url, reset=True)
        rows = {"decant": mean(mine), "AIPerf": mean(other)}
        if is_replay:
            rows = {"sent": truth(sent), **rows}
    worst = show(rows)
    print(f"means and medians of TTFT, TPOT and ITL: at most {worst:.2f} % apart")
    if args.json:
        what = {k: v for k, v in vars(args).items() if k not in ("aiperf", "tokenizer", "json")}
        what |= {"run_dir": bool(args.run_dir), "url": bool(args.url)}
        flat = {n: {f"{a}_{b}": v for (a, b), v in f.items()} for n, f in rows.items()}
        text = json.dumps({"settings": what, "ms": flat, "worst_percent": worst}, indent=1)
        Path(args.json).write_text(text + "\n")
    return 0 if worst <= 3 else 1


if __name__ == "__main__":
    sys.exit(main())

"""The same load by ``decant bench`` and by AIPerf, and how far their figures are apart.

    python -P tests/loadgen/compare_aiperf.py --aiperf VENV/bin/aiperf --url URL \\
        --tokenizer engine/demo

Closed loop and the same prompts, so that both see the same queue; one after the other (ours first
and last, averaged, so that a slow drift or a warm cache favours nobody), so run it on a quiet
machine.
Without --url a mock with known delays is measured: then the truth is known too. AIPerf's
inter_token_latency is our TPOT, its inter_chunk_latency our ITL.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from decant.loadgen import content

PAIRS = (
    ("TTFT", "ttft", "time_to_first_token"),
    ("TPOT", "tpot", "inter_token_latency"),
    ("ITL", "itl", "inter_chunk_latency"),
    ("E2E", "e2e", "request_latency"),
)
MOCK = {"ttft_ms": 300, "gap_ms": 60, "per_chunk": 2}


def write_prompts(path: Path, num: int, input_len: int) -> None:
    """One prompt a line, under the names that both tools read."""
    with path.open("w") as file:
        for number in range(num):
            text = content.text("prose", 4 * input_len, Random(number))
            file.write(json.dumps({"prompt": text, "text": text}) + "\n")


def ours(args: argparse.Namespace, url: str, extra: dict[str, Any], folder: Path) -> dict[str, Any]:
    path = folder / "ours.json"
    command = [sys.executable, "-P", "-m", "decant.loadgen.cli", "--url", url, "--json", str(path)]
    command += ["--arrivals", "closed", "--concurrency", str(args.concurrency)]
    command += ["--num", str(args.num), "--dataset", "prompts", "--path", str(folder / "prompts")]
    command += ["--output-len", str(args.output_len), "--extra", json.dumps(extra)]
    subprocess.run([*command, "--ignore-eos"], check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(path.read_text())["latency_ms"]
    return found


def theirs(
    args: argparse.Namespace, url: str, extra: dict[str, Any], folder: Path
) -> dict[str, Any]:
    out = folder / "aiperf"
    command = [args.aiperf, "profile", "--model", args.model, "--url", url]
    command += ["--endpoint-type", "chat", "--streaming", "--tokenizer", args.tokenizer]
    command += ["--concurrency", str(args.concurrency), "--request-count", str(args.num)]
    command += ["--input-file", str(folder / "prompts"), "--custom-dataset-type", "single_turn"]
    command += ["--use-server-token-count"]
    fields = {"max_tokens": args.output_len, "ignore_eos": True, "temperature": 0.0, **extra}
    command += ["--extra-inputs", json.dumps(fields), "--artifact-dir", str(out), "--ui", "none"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (path,) = out.rglob("profile_export_aiperf.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--aiperf", required=True)
    parser.add_argument("--tokenizer", required=True, help="a folder with tokenizer.json")
    parser.add_argument("--url", default="", help="default: a mock with known delays")
    parser.add_argument("--model", default="")
    parser.add_argument("--num", type=int, default=40)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--input-len", type=int, default=100)
    parser.add_argument("--output-len", type=int, default=32)
    args = parser.parse_args()
    args.tokenizer = str(Path(args.tokenizer).absolute())
    mock: subprocess.Popen[str] | None = None
    url, extra = args.url, {}
    with tempfile.TemporaryDirectory() as name:
        if not url:
            path = Path(__file__).with_name("mock_server.py")
            mock = subprocess.Popen(
                [sys.executable, "-P", str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert mock.stdout is not None
            url, extra = f"http://127.0.0.1:{int(mock.stdout.readline())}", {"mock": MOCK}
        args.model = args.model or ("mock" if mock else "decant-demo")
        try:
            write_prompts(Path(name) / "prompts", args.num, args.input_len)
            first = ours(args, url, extra, Path(name))
            other = theirs(args, url, extra, Path(name))
            second = ours(args, url, extra, Path(name))
        finally:
            if mock is not None:
                mock.kill()
                mock.wait()
    print(f"{'':6}{'':>6}{'decant':>12}{'AIPerf':>12}{'apart':>9}")
    for title, key, name in PAIRS:
        for ours_, theirs_ in (("mean", "avg"), ("p50", "p50"), ("p99", "p99")):
            a = (first[key][ours_] + second[key][ours_]) / 2
            b = other[name][theirs_]
            print(f"{title:6}{ours_:>6}{a:12.2f}{b:12.2f}{100 * (a - b) / b:8.1f}%")


if __name__ == "__main__":
    main()

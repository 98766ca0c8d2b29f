"""``decant bench``: measure any OpenAI-compatible server under load."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from msgspec.structs import replace
from rich.console import Console

from decant.loadgen import arrivals, content, drive, html_report, probe, summary, sweep, table
from decant.loadgen.metrics import Slo
from decant.loadgen.plan import Record, Request, Target
from decant.loadgen.workload import Options, Scale, build
from decant.protocol.errors import DecantError, InvalidRequest

EXIT_DIFFERENT = 3  # answers under load differ from the fault-free ones, or pages leaked
EXAMPLES = """examples:
  decant bench --rate 4 --num 200 --input-len 100 --output-len 64
  decant bench --arrivals closed --concurrency 16 --num 200 --json run.json --html run.html
  decant bench --rate 2 --slo ttft=300,tpot=50 --sweep
  decant bench --dataset mooncake --path trace.jsonl --time-scale 0.5 --api completions --ids
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``decant bench``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    a = parser.add_argument
    a("--url", default="http://127.0.0.1:8000", help="base URL of the server")
    a("--model", default="", help="model name; default: the first of /v1/models")
    a("--api", choices=("chat", "completions"), default="chat", help="which route to ask")
    a("--key", default=os.environ.get("OPENAI_API_KEY", ""), help="API key (or OPENAI_API_KEY)")
    a("--seed", type=int, default=0, help="of arrivals, contents and sampling")
    a("--num", type=int, default=0, help="number of requests")
    a("--duration", type=float, default=0.0, metavar="S", help="seconds of arrivals")
    a("--arrivals", choices=("closed", *arrivals.KINDS), default="poisson", help="when to ask")
    a("--rate", type=float, default=1.0, help="requests per second (open loop)")
    a("--rate-to", type=float, default=0.0, help="ramp: the last rate")
    a("--burstiness", type=float, default=1.0, help="gamma: 1 is Poisson, below 1 bursty")
    a("--burst-size", type=int, default=8, help="burst: requests at once")
    a("--concurrency", type=int, default=1, help="closed loop: users")
    a("--max-in-flight", type=int, default=10_000, help="open loop: more wait, and are counted")
    a("--dataset", default="synthetic", choices=_DATASETS, help="where requests come from")
    a("--path", default="", help="file of the dataset")
    a("--time-scale", type=float, default=1.0, help="of a trace; 0.5 is twice as fast")
    a("--input-len", default="128", help="tokens: N, uniform:A:B, normal:M:SD, lognormal:M:S")
    a("--output-len", default="128", help="max_tokens, the same forms")
    a("--max-input", type=int, default=1 << 20, help="cut prompts to this many tokens")
    a("--content", default="prose", help="mix of content classes, such as prose=2,code=1")
    a("--ids", action="store_true", help="prompts as token ids (completions; exact lengths)")
    a("--vocab", type=int, default=256, help="with --ids: size of the vocabulary")
    a("--turns", type=int, default=1, help="turns of a session; each repeats the conversation")
    a("--think", type=float, default=0.0, metavar="S", help="pause of a user between turns")
    a("--shared-prefix", type=int, default=0, help="tokens that every session begins with")
    a("--prefix-groups", type=int, default=1, help="number of different shared prefixes")
    a("--cancel-share", type=float, default=0.0, help="share of requests that hang up")
    a("--cancel-after", type=int, default=4, help="chunks before they do")
    a(
        "--slo",
        action="append",
        default=[],
        metavar="[NAME:SHARE:]ttft=MS,tpot=MS,e2e=MS,stall=MS",
        help="bounds of a request; repeat with names and shares for mixed classes",
    )
    a("--sweep", action="store_true", help="find the highest rate within the SLO, from --rate on")
    a("--attainment", type=float, default=0.99, help="sweep: share that must be within")
    a("--tolerance", type=float, default=0.05, help="sweep: relative width at which it ends")
    a("--check", type=int, default=0, metavar="N", help="compare N answers with fault-free ones")
    a("--warmup", type=int, default=2, metavar="N", help="requests before the run, not counted")
    a("--temperature", type=float, default=0.0, help="of sampling; 0 is greedy")
    a("--ignore-eos", action="store_true", help="send ignore_eos (servers that have it)")
    a("--no-usage", action="store_true", help="do not ask for usage (very old servers)")
    a("--no-calibrate", action="store_true", help="take 4 characters a token, ask nothing")
    a("--extra", default="{}", help="JSON object merged into every body")
    a("--timeout", type=float, default=600.0, metavar="S", help="time limit of a request")
    a("--workers", type=int, default=1, help="load-generating processes")
    a("--json", dest="json_path", default="", metavar="FILE", help="summary as JSON")
    a("--records", default="", metavar="FILE", help="one JSON line a request, with every arrival")
    a("--csv", default="", metavar="FILE", help="one line a request")
    a("--html", default="", metavar="FILE", help="self-contained report with plots")
    a("--title", default="decant bench", help="heading of the HTML report")


_DATASETS = ("synthetic", "mooncake", "burstgpt", "sharegpt", "prompts")
_BOUNDS = {"ttft": "ttft_ns", "tpot": "tpot_ns", "e2e": "e2e_ns", "stall": "stall_ns"}


def parse_slo(spec: str) -> Slo:
    """``ttft=300,tpot=50`` or ``chat:0.8:ttft=300``; bounds in ms. Raises: InvalidRequest."""
    *front, bounds = spec.split(":")
    try:
        if len(front) not in (0, 2):
            raise ValueError
        name, share = (front[0], float(front[1])) if front else ("all", 1.0)
        found = {}
        for part in bounds.split(","):
            key, _, value = part.strip().partition("=")
            found[_BOUNDS[key]] = round(float(value) * 1e6)
        if not name or not share > 0 or not all(v > 0 for v in found.values()):
            raise ValueError
    except (ValueError, KeyError, OverflowError) as error:
        raise InvalidRequest(f"not an SLO: {spec!r}; try chat:0.8:ttft=300,tpot=50") from error
    return Slo(name, share, **found)


def _options(args: argparse.Namespace) -> Options:
    if args.dataset != "synthetic" and not args.path:
        raise InvalidRequest(f"--dataset {args.dataset} needs --path")
    if args.ids and args.api != "completions":
        raise InvalidRequest("--ids needs --api completions")
    if not 0 <= args.cancel_share <= 1:
        raise InvalidRequest("--cancel-share is from 0 to 1")
    for name in ("num", "duration", "think", "shared_prefix", "check", "warmup"):
        value = getattr(args, name)
        if not (math.isfinite(value) and value >= 0):
            raise InvalidRequest(f"--{name.replace('_', '-')} must not be negative")
    for name in ("concurrency", "workers", "turns", "max_in_flight", "cancel_after", "max_input"):
        if getattr(args, name) < 1:
            raise InvalidRequest(f"--{name.replace('_', '-')} is at least 1")
    if args.ids and args.vocab < 8:
        raise InvalidRequest("--vocab is at least 8")
    return Options(
        seed=args.seed,
        num=args.num,
        duration_s=args.duration,
        kind=args.arrivals,
        rate=args.rate,
        rate_to=args.rate_to,
        burstiness=args.burstiness,
        burst_size=args.burst_size,
        dataset=args.dataset,
        path=args.path,
        time_scale=args.time_scale,
        input_len=args.input_len,
        output_len=args.output_len,
        mix=content.parse_mix(args.content),
        as_ids=args.ids,
        vocab=args.vocab,
        max_input=args.max_input,
        turns=args.turns,
        think_s=args.think,
        shared_prefix=args.shared_prefix,
        prefix_groups=args.prefix_groups,
        cancel_share=args.cancel_share,
        cancel_after=args.cancel_after,
    )


def _target(args: argparse.Namespace) -> Target:
    try:
        extra = json.loads(args.extra)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"--extra is not JSON: {error}") from error
    if not isinstance(extra, dict):
        raise InvalidRequest("--extra is a JSON object")
    if not args.timeout > 0:
        raise InvalidRequest("--timeout must be positive")
    target = Target(
        args.url,
        args.model,
        args.api,
        args.key,
        round(args.timeout * 1e9),
        args.temperature,
        args.ignore_eos,
        not args.no_usage,
        extra,
    )
    return target if args.model else replace(target, model=probe.first_model(target))


class Bench:
    """A prepared server and plan; ``run`` sends a plan and sums it up."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.args = args
        self.console = console
        self.options = _options(args)
        self.slos = [parse_slo(s) for s in args.slo]
        if len({s.name for s in self.slos}) != len(self.slos):
            raise InvalidRequest("every SLO class needs a name of its own")
        self.target = _target(args)
        self.scales: dict[str, Scale] = {}
        if not args.no_calibrate and not args.ids and args.dataset != "prompts":
            kinds = {*self.options.mix, "prose"}
            self.scales = {kind: probe.scale(self.target, kind) for kind in sorted(kinds)}

    def plan(self, options: Options) -> list[Request]:
        """The requests, those to check with their fault-free answers."""
        requests = build(options, self.scales, self.slos)
        candidates = [r for r in requests if r.turn == 0 and not r.cancel_after]
        rng = Random(f"check {options.seed}")
        chosen = rng.sample(candidates, min(self.args.check, len(candidates)))
        for request in chosen:
            answer = probe.fault_free(self.target, request)
            requests[request.index] = replace(request, expect=answer.record.answer_hash)
        return requests

    def warm_up(self) -> None:
        options = replace(
            self.options, num=self.args.warmup, kind="closed", dataset="synthetic", turns=1
        )
        for request in build(options, self.scales, []) if self.args.warmup else []:
            probe.fault_free(self.target, request)

    def run(self, options: Options, label: str = "") -> tuple[dict[str, Any], list[Record]]:
        """One run's summary and records."""
        requests = self.plan(options)
        if not requests:
            raise InvalidRequest("the plan has no requests; a higher rate or a longer duration")
        is_closed = options.kind == "closed"
        before = probe.pages_by_state(probe.metrics_page(self.target))
        with table.Live(len(requests), self.console, label) as live:
            result = drive.run(
                self.target,
                requests,
                concurrency=self.args.concurrency if is_closed else 0,
                workers=self.args.workers,
                max_in_flight=self.args.max_in_flight,
                on_progress=live.update,
            )
        pages = probe.settled_pages(self.target, before) if before else None
        found = summary.summarise(
            result.records,
            self.slos,
            pages=pages,
            is_open_loop=not is_closed,
            cpu_s=result.cpu_s,
        )
        return found, result.records

    def sweep(self) -> tuple[dict[str, Any], list[Record], list[dict[str, Any]], float]:
        """Steps of a sweep; the best step's summary and records (the last one's if none passed)."""
        if not self.slos:
            raise InvalidRequest("--sweep needs --slo")
        if self.options.kind not in ("poisson", "gamma", "constant", "burst"):
            raise InvalidRequest("--sweep needs open-loop arrivals at a rate")
        steps: list[dict[str, Any]] = []
        kept: dict[float, tuple[dict[str, Any], list[Record]]] = {}

        def is_within(rate: float) -> bool:
            found, records = self.run(replace(self.options, rate=rate), f"{rate:.3g}/s")
            share = found["slo_attainment"]
            passed = share is not None and share >= self.args.attainment
            steps.append({"rate": rate, "is_within": passed, "summary": found})
            kept[rate] = found, records
            return passed

        best, _ = sweep.highest(is_within, self.options.rate, tolerance=self.args.tolerance)
        found, records = kept[best or steps[-1]["rate"]]
        return found, records, steps, best


def _check_writable(args: argparse.Namespace) -> None:
    """Before the run, not after it."""
    for path in (args.json_path, args.records, args.csv, args.html):
        if path and path != "-" and not os.access(Path(path).absolute().parent, os.W_OK):
            raise InvalidRequest(f"cannot write {path}")


def _write(path: str, text: str) -> None:
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error}") from error


def main(args: argparse.Namespace) -> int:
    """Run ``decant bench``. 0: done; 1: no request ended well; 2: wrong use or no server; 3:
    answers differ or pages leaked.
    """
    console = Console(stderr=args.json_path == "-")
    try:
        _check_writable(args)
        bench = Bench(args, console)
        bench.warm_up()
        steps: list[dict[str, Any]] = []
        best = 0.0
        if args.sweep:
            found, records, steps, best = bench.sweep()
            table.show_sweep(steps, best, console)
        else:
            found, records = bench.run(bench.options)
        table.show(found, console)
        settings = {
            "target": msgspec.to_builtins(replace(bench.target, key="")),
            "options": msgspec.to_builtins(bench.options),
            "slo": args.slo,
            "concurrency": args.concurrency if args.arrivals == "closed" else 0,
            "workers": args.workers,
            "tokens_of_text": msgspec.to_builtins(bench.scales),
        }
        if args.json_path:
            whole = {"settings": settings, **found}
            if steps:
                whole["sweep"] = {"highest_rate_within_slo": best, "steps": steps}
            _write(args.json_path, json.dumps(whole, indent=1) + "\n")
        if args.records:
            _write(args.records, "".join(msgspec.json.encode(r).decode() + "\n" for r in records))
        if args.csv:
            _write(args.csv, summary.to_csv(records))
        if args.html:
            _write(args.html, html_report.render(args.title, found, records, settings, steps))
    except DecantError as error:
        console.print(f"decant bench: {error.message}", style="red", markup=False)
        return 2
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    if not found["requests"]["ok"]:
        return 1
    is_wrong = found.get("correctness", {}).get("different", 0) > 0
    is_leaky = found.get("pages", {}).get("leaked", 0) > 0
    return EXIT_DIFFERENT if is_wrong or is_leaky else 0


def run(argv: Sequence[str] | None = None) -> int:
    """``python -P -m decant.loadgen.cli``."""
    parser = argparse.ArgumentParser(prog="decant bench", description=__doc__)
    add_arguments(parser)
    return main(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(run())

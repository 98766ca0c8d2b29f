"""``decant eval``: held-out prompts of the demo's skills through the HTTP API, counted; greedy, but
for ``--temperature``.

The demo's room knows prompts and right answers; this file sends, counts and prints. The JSON file
is written after each skill, and keeps a digest of each answer: a later run with ``--same-as`` says
whether another set (without speculation, with other ranks or chunks) answers the same. ``--merge``
keeps what the file has of other skills, so that a long table is made by several short runs.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from decant.engine.demo import prompts
from decant.protocol.errors import ConfigError
from decant.services.cli import FAILED, OK
from decant.services.client import Api, ApiError
from decant.services.target import add_server, api_of, model_of

COUNTERS = ("decant_spec_decode_num_draft_tokens_per_pos_total",
            "decant_spec_decode_num_accepted_tokens_per_pos_total")  # fmt: skip
MAX_SHOWN = 300
BUSY, BUSY_PAUSES_S = (429, 503), (1.0, 5.0, 20.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server(parser)
    add = parser.add_argument
    add("--skills", default="essential", help="essential, all, or names separated by commas: "
        + ", ".join(prompts.SKILLS).replace("%", "%%"))  # fmt: skip
    add("--num", metavar="N", type=int, default=200, help="prompts per skill (default 200)")
    add("--seed", type=int, default=0, help="of the prompts (default 0)")
    add("--temperature", metavar="T", type=float, default=0.0,
        help="of the answers (default 0: greedy); above, fewer drafts are accepted")  # fmt: skip
    add("--concurrency", metavar="N", type=int, default=8, help="requests at once (default 8)")
    add("--at-least", metavar="SHARE", type=float, default=0.0,
        help="exit with 1 if an essential skill has fewer right answers than this")  # fmt: skip
    add("--failures", metavar="N", type=int, default=0, help="show the first N wrong answers")
    add("--same-as", metavar="FILE", default="",
        help="compare each answer with the run that wrote this JSON file; exit with 1 if one "
        "differs")  # fmt: skip
    add("--json", metavar="FILE", default="", help="all counts as JSON; - for standard output")
    add("--merge", action="store_true",
        help="keep the skills that the JSON file has from earlier runs; only those asked are "
        "counted anew")  # fmt: skip


@dataclass
class Score:
    """Counts of one skill."""

    skill: str
    num: int = 0
    right: int = 0
    errors: int = 0
    completion_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    seconds: float = 0.0
    positions: dict[str, list[int]] = field(default_factory=dict)
    """Draft position from "1" -> [drafted, accepted] by the set meanwhile (of all its clients)."""
    wrong: list[dict[str, Any]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.right / self.num if self.num else 0.0

    @property
    def acceptance(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


def skills_of(text: str) -> list[str]:
    """Raises: ConfigError for a name that there is not."""
    if text == "all":
        return list(prompts.SKILLS)
    names = list(prompts.ESSENTIAL) if text == "essential" else text.split(",")
    for name in names:
        if name not in prompts.SKILLS:
            raise ConfigError(f"there is no skill {name!r}; there are {', '.join(prompts.SKILLS)}")
    return names


def per_position(api: Api) -> dict[str, dict[int, float]]:
    """The draft counters of /metrics by position (1 = the first draft); empty if there are none."""
    found: dict[str, dict[int, float]] = {name: {} for name in COUNTERS}
    try:
        page = str(api.call("GET", "/metrics")[1])
    except ApiError:
        return found
    for name, labels, value in re.findall(r"^(\w+)\{([^}]*)\} (\S+)$", page, re.MULTILINE):
        if name in found and (position := re.search(r'position="(\d+)"', labels)):
            number = int(position[1]) + 1
            found[name][number] = found[name].get(number, 0.0) + float(value)
    return found


def counts_between(
    before: dict[str, dict[int, float]], after: dict[str, dict[int, float]]
) -> dict[str, list[int]]:
    """Draft position -> [drafted, accepted] between two readings."""
    gains = [
        {p: round(total - before[name].get(p, 0.0)) for p, total in after[name].items()}
        for name in COUNTERS
    ]
    return {str(p): [n, gains[1].get(p, 0)] for p, n in sorted(gains[0].items()) if n > 0}


def shares(scores: list[Score]) -> dict[str, float]:
    """Accepted / drafted at each draft position, over all skills."""
    sums: dict[str, list[int]] = {}
    for s in scores:
        for position, counts in s.positions.items():
            total = sums.setdefault(position, [0, 0])
            total[0] += counts[0]
            total[1] += counts[1]
    return {p: accepted / drafted for p, (drafted, accepted) in sorted(sums.items())}


def ask(
    api: Api, model: str, case: prompts.Case, seed: int, temperature: float = 0.0
) -> tuple[bool, dict[str, Any], str]:
    """One request: right or not, usage, and what came back (or the error, after "error: ").

    A busy set is asked again, a few times: this counts answers, not admission."""
    body = {"model": model, "seed": seed, **case.body(), "temperature": temperature}
    for pause_s in (*BUSY_PAUSES_S, None):
        try:
            answer = api.post("/v1/chat/completions", body)
            message = answer["choices"][0]["message"]
            return case.check(message), answer.get("usage") or {}, json.dumps(message)
        except ApiError as error:
            if error.status not in BUSY or pause_s is None:
                return False, {}, f"error: {error.message}"
            time.sleep(pause_s)
    raise AssertionError("the last try returns")


def digest(got: str) -> str:
    """Of what came back; a tool call's id is drawn at random and does not count."""
    plain = re.sub(r'"id": "[^"]*"', "", got)
    return hashlib.sha256(plain.encode()).hexdigest()[:12]


def read_table(path: str, args: argparse.Namespace) -> dict[str, Any]:
    """The JSON file of an earlier run.

    Raises: ConfigError if it cannot be read, or if that run asked other prompts or otherwise."""
    try:
        table: dict[str, Any] = json.loads(Path(path).read_text())
        given = (table["seed"], table.get("temperature", 0.0))
        table["skills"] = [dict(s) for s in table["skills"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot use {path}: {error!r}") from None
    if given != (mine := (args.seed, args.temperature)):
        raise ConfigError(
            f"{path} is of seed {given[0]} and temperature {given[1]}, this run of {mine[0]} and "
            f"{mine[1]}"
        )
    return table


def earlier(path: str, args: argparse.Namespace) -> dict[str, list[str]]:
    """Digests by skill of the run to compare with. Raises: ConfigError, see read_table."""
    rows = read_table(path, args)["skills"]
    return {s["skill"]: list(s.get("digests", [])) for s in rows}


def kept(path: str, model: str, args: argparse.Namespace, names: list[str]) -> list[Score]:
    """Scores of the file's other skills; none if there is no file.

    Raises: ConfigError, see read_table, and for a run of another model."""
    if not Path(path).exists():
        return []
    table, known = read_table(path, args), {f.name for f in fields(Score)}
    if table.get("model") != model:
        raise ConfigError(f"{path} is of model {table.get('model')}, this run of {model}")
    rows = [{k: v for k, v in s.items() if k in known} for s in table["skills"]]
    return [Score(**row) for row in rows if row.get("skill", "") not in ("", *names)]


def in_order(scores: list[Score]) -> list[Score]:
    """As the table lists skills; an old file may name some that there are no more."""
    order = list(prompts.SKILLS)
    return sorted(scores, key=lambda s: order.index(s.skill) if s.skill in order else len(order))


def differences(scores: list[Score], before: dict[str, list[str]]) -> tuple[int, int]:
    """(answers compared, answers that differ)."""
    pairs = [pair for s in scores for pair in zip(s.digests, before.get(s.skill, []), strict=False)]
    return len(pairs), sum(a != b for a, b in pairs)


def score(api: Api, model: str, skill: str, args: argparse.Namespace) -> Score:
    """Ask all prompts of a skill, a few at once; those about one fact block one after the other,
    so that the prefix cache has the block for all but the first."""
    result, started, before = Score(skill), time.monotonic(), per_position(api)
    chosen = prompts.cases(skill, args.num, args.seed)
    size = prompts.PER_BLOCK.get(skill, 1)

    def ask_block(first: int) -> list[tuple[bool, dict[str, Any], str]]:
        # Each has a seed of its own: the same draw for all would be the same luck for all.
        block = enumerate(chosen[first : first + size], args.seed + first)
        return [ask(api, model, case, seed, args.temperature) for seed, case in block]

    with ThreadPoolExecutor(max(1, args.concurrency)) as pool:
        blocks = pool.map(ask_block, range(0, len(chosen), size))
        answers = itertools.chain.from_iterable(blocks)
        for case, (is_right, usage, got) in zip(chosen, answers, strict=True):
            counts = usage.get("speculation") or {}
            result.num += 1
            result.digests.append(digest(got))
            result.right += is_right
            result.errors += got.startswith("error: ")
            result.completion_tokens += int(usage.get("completion_tokens", 0))
            result.drafted += int(counts.get("drafted_tokens", 0))
            result.accepted += int(counts.get("accepted_tokens", 0))
            result.steps += int(counts.get("steps", 0))
            if not is_right:
                wanted = case.calls or case.answer
                result.wrong.append({"messages": case.messages, "wanted": wanted, "got": got})
            _progress(f"{skill}: {result.num} of {args.num}, {result.right} right")
    result.seconds = time.monotonic() - started
    result.positions = counts_between(before, per_position(api))
    return result


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def show(scores: list[Score]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("skill")
    for name in ("right", "of", "share", "tokens", "drafts accepted", "tokens a step", "s"):
        table.add_column(name, justify="right")
    for s in scores:
        table.add_row(
            s.skill, str(s.right), str(s.num), f"{s.share:.1%}", str(s.completion_tokens),
            f"{s.acceptance:.1%}" if s.drafted else "-",
            f"{s.completion_tokens / s.steps:.2f}" if s.steps else "-", f"{s.seconds:.0f}",
        )  # fmt: skip
    Console().print(table)
    if by_position := shares(scores):
        parts = [f"position {p}: {share:.1%}" for p, share in by_position.items()]
        print(f"\ndraft acceptance by position: {', '.join(parts)}")
    if errors := sum(s.errors for s in scores):
        print(f"{errors} requests failed")


def as_json(model: str, args: argparse.Namespace, scores: list[Score]) -> str:
    table = {
        "model": model,
        "num": args.num,
        "seed": args.seed,
        "temperature": args.temperature,
        "skills": [{**asdict(s), "share": s.share, "acceptance": s.acceptance} for s in scores],
        "acceptance_by_position": shares(scores),
    }
    return json.dumps(table, indent=1) + "\n"


def run(args: argparse.Namespace) -> int:
    names = skills_of(args.skills)
    if args.num < 1 or not 0 <= args.temperature <= 2:
        raise ConfigError("--num is at least 1, --temperature 0 to 2")
    known = earlier(args.same_as, args) if args.same_as else {}
    api = api_of(args)
    model = model_of(args, api)
    is_file = args.json not in ("", "-")
    others = kept(args.json, model, args, names) if args.merge and is_file else []
    scores: list[Score] = []
    for name in names:
        scores.append(score(api, model, name, args))
        if is_file:
            Path(args.json).write_text(as_json(model, args, in_order(others + scores)))
    _progress("")
    if args.json != "-":
        show(scores)
    for wrong in [w for s in scores for w in s.wrong][: args.failures]:
        last = str(wrong["messages"][-1].get("content"))[-MAX_SHOWN:]
        print(f"\nasked  {last}\nwanted {wrong['wanted']}\ngot    {wrong['got'][:MAX_SHOWN]}")
    if args.json == "-":
        print(as_json(model, args, scores), end="")
    is_bad = any(s.share < args.at_least for s in scores if s.skill in prompts.ESSENTIAL)
    if args.same_as:
        num, num_other = differences(scores, known)
        print(f"{num - num_other} of {num} answers as in {args.same_as}", file=sys.stderr)
        is_bad = is_bad or num_other > 0 or num == 0
    return FAILED if is_bad or any(s.errors for s in scores) else OK

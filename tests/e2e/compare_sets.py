"""The same answers from every set: without drafts, with chunks of several sizes, with two ranks a
group, and asked again when the prefix cache has the prompt.

``python -P tests/e2e/compare_sets.py [--num 10] [--json FILE]`` starts a set per setting, one after
the other, asks greedy held-out prompts of all kinds twice, and compares whole messages with the
first answers of the demo profile. Exit 1 if one differs. In pieces: ``--oracle FILE`` keeps the
demo profile's answers, ``--only NAME`` adds the row of one setting to ``--json``.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from decant.engine.demo.prompts import Case, cases
from decant.services.client import Api

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from real_set import RealSet  # noqa: E402

SKILLS = ("sub", "sort", "memory", "json", "think-sub", "story", "recall@300", "recall-number@300")
# A fifth as many, since their prompts are longer: several pages.
LONG = ("tools", "tools-new", "tool-result", "no-tool", "recall@2000", "recall-number@2000")
SETTINGS: dict[str, tuple[str, list[str]]] = {
    "demo": ("demo", []),
    "no drafts": ("demo", ["draft.enabled=false"]),
    "chunks of 64": ("demo", ["prefill.chunk_tokens=64"]),
    "chunks of 200": ("demo", ["prefill.chunk_tokens=200"]),
    "chunks of 1024": ("demo", ["prefill.chunk_tokens=1024"]),
    "two ranks": ("demo-tp2", []),
}
CONCURRENCY = 12
TIMEOUT_S = 600.0  # two ranks beside other work are slow


def prompts(num: int) -> list[Case]:
    todo = [case for skill in SKILLS for case in cases(skill, num, 4)]
    return todo + [case for skill in LONG for case in cases(skill, max(1, num // 5), 4)]


def ask(real: RealSet, case: Case) -> tuple[list[Any], int]:
    """(what was answered, tokens of the prompt that the prefix cache had)."""
    done = real.api.post("/v1/chat/completions", {**case.body(), "model": real.model})
    choice, usage = done["choices"][0], done["usage"]
    message = choice["message"]
    calls = [c["function"] for c in message.get("tool_calls") or []]
    text = [message.get("reasoning_content"), message.get("content"), calls]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return [*text, choice["finish_reason"], usage["completion_tokens"]], cached


def run(name: str, todo: list[Case]) -> tuple[list[list[Any]], list[list[Any]], int]:
    """First answers, second answers, and cached tokens of the second prompts."""
    profile, pairs = SETTINGS[name]
    with tempfile.TemporaryDirectory(prefix="dcnt-") as folder:
        real = RealSet(Path(folder) / "run", ["gateway.port=0", *pairs], profile)
        real.api = Api(real.url, timeout_s=TIMEOUT_S)
        try:
            with ThreadPoolExecutor(CONCURRENCY) as pool:
                first = list(pool.map(lambda c: ask(real, c), todo))
                second = list(pool.map(lambda c: ask(real, c), todo))
        finally:
            real.stop()
    return [a for a, _ in first], [a for a, _ in second], sum(cached for _, cached in second)


def num_different(answers: list[list[Any]], expected: list[list[Any]]) -> int:
    return sum(a != b for a, b in zip(answers, expected, strict=True))


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and stop the set
    parser = argparse.ArgumentParser(description="other sets give the same answers")
    parser.add_argument("--num", type=int, default=10, help="prompts a skill")
    parser.add_argument("--json", type=Path, help="write the result here, or add to it")
    parser.add_argument("--only", choices=list(SETTINGS), help="one setting")
    parser.add_argument("--oracle", type=Path, help="the demo's answers: written, then read")
    args = parser.parse_args()
    todo = prompts(args.num)
    result: dict[str, Any] = {"prompts": len(todo), "settings": {}}
    if args.only and args.json and args.json.exists():
        result = json.loads(args.json.read_text())
    expected: list[list[Any]] = []
    if args.oracle and args.oracle.exists():
        expected = json.loads(args.oracle.read_text())
    is_bad = False
    for name in SETTINGS:
        if args.only not in (None, name):
            continue
        if not expected and name != "demo":
            parser.error(f"{name!r} needs the answers of the demo: --oracle FILE")
        began = time.monotonic()
        first, second, num_cached = run(name, todo)
        if not expected:
            expected = first
            if args.oracle:
                args.oracle.write_text(json.dumps(first))
        row = {
            "different": num_different(first, expected),
            "different_asked_again": num_different(second, expected),
            "cached_tokens_asked_again": num_cached,
            "tokens": sum(a[-1] for a in first),
            "seconds": round(time.monotonic() - began, 1),
        }
        is_bad = is_bad or bool(row["different"] or row["different_asked_again"])
        result["settings"][name] = row
        print(name, json.dumps(row), flush=True)
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if is_bad else 0


if __name__ == "__main__":
    sys.exit(main())

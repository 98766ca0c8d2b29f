"""Speculation changes no token: the same prompts, greedy and seeded, k = 0, 1, 2, 3 and changing.

``python -P tests/e2e/compare_speculation.py [--num 500] [--json FILE]`` starts a set per setting,
one after the other, asks every prompt twice (temperature 0; temperature 1.0 and top-p 0.95 with a
seed) and compares whole messages with those of the set without drafts. Exit 1 if one differs.
In pieces: ``--oracle FILE`` keeps the answers without drafts, ``--only "k = 2"`` runs one setting
against them and adds its row to ``--json``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from decant.engine.demo.prompts import Case, cases

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from real_set import RealSet  # noqa: E402

# Short answers, calls, thinking, and two skills with real uncertainty.
SKILLS = (
    "add", "sub", "sort", "reverse", "copy", "tools", "think-add", "json", "story", "random-words",
)  # fmt: skip
SETTINGS = {
    "k = 0": ["draft.enabled=false"],
    "k = 1": ["draft.num_drafts=1", "draft.adaptive=false"],
    "k = 2": ["draft.num_drafts=2", "draft.adaptive=false"],
    "k = 3": ["draft.num_drafts=3", "draft.adaptive=false"],
    "k changing": ["draft.num_drafts=3", "draft.adaptive=true"],
}
CONCURRENCY = 12


def prompts(num: int) -> list[Case]:
    """num prompts, the skills in turn."""
    per_skill = [cases(skill, -(-num // len(SKILLS)), 3) for skill in SKILLS]
    return [case for group in zip(*per_skill, strict=True) for case in group][:num]


def ask(real: RealSet, case: Case, number: int, is_greedy: bool) -> Any:
    body = {**case.body(), "model": real.model, "max_tokens": min(case.max_tokens, 64)}
    if not is_greedy:
        body |= {"temperature": 1.0, "top_p": 0.95, "seed": 1000 + number}
    done = real.api.post("/v1/chat/completions", body)
    choice = done["choices"][0]
    message = choice["message"]
    calls = [c["function"] for c in message.get("tool_calls") or []]
    usage = done["usage"]
    text = [message.get("reasoning_content"), message.get("content"), calls]
    return [*text, choice["finish_reason"], usage["completion_tokens"]]


def run(pairs: list[str], todo: list[Case]) -> tuple[list[Any], float]:
    """Answers, first all greedy ones, then all seeded ones; and the seconds they took."""
    with tempfile.TemporaryDirectory(prefix="dcnt-") as folder:
        real = RealSet(Path(folder) / "run", ["gateway.port=0", *pairs])
        try:
            began = time.monotonic()
            work = [(c, i, greedy) for greedy in (True, False) for i, c in enumerate(todo)]
            with ThreadPoolExecutor(CONCURRENCY) as pool:
                answers = list(pool.map(lambda w: ask(real, *w), work))
            return answers, time.monotonic() - began
        finally:
            real.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description="speculation on and off give the same answers")
    parser.add_argument("--num", type=int, default=500, help="prompts, each asked twice")
    parser.add_argument("--json", type=Path, help="write the result here, or add to it")
    parser.add_argument("--only", choices=list(SETTINGS), help="one setting")
    parser.add_argument("--oracle", type=Path, help="answers without drafts: written, then read")
    args = parser.parse_args()
    todo = prompts(args.num)
    result: dict[str, Any] = {"prompts": len(todo), "settings": {}}
    if args.only and args.json and args.json.exists():
        result = json.loads(args.json.read_text())
    expected: list[Any] = []
    if args.oracle and args.oracle.exists():
        expected = json.loads(args.oracle.read_text())
    num_different = 0
    for name, pairs in SETTINGS.items():
        if args.only not in (None, name):
            continue
        answers, seconds = run(pairs, todo)
        if not expected:
            if name != next(iter(SETTINGS)):
                parser.error(f"{name!r} needs the answers without drafts: --oracle FILE")
            expected = answers
            if args.oracle:
                args.oracle.write_text(json.dumps(answers))
        different = [i for i, (a, b) in enumerate(zip(answers, expected, strict=True)) if a != b]
        num_different += len(different)
        row = {
            "different_greedy": sum(i < len(todo) for i in different),
            "different_seeded": sum(i >= len(todo) for i in different),
            "seconds": round(seconds, 1),
            "tokens": sum(a[-1] for a in answers),
        }
        result["settings"][name] = row
        print(name, json.dumps(row), flush=True)
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())

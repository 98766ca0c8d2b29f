"""The demo's tool skill through the API, as a table: ``python -P tests/e2e/measure_tools.py``.

Held-out prompts of the skills "tools" and "tools-new" (functions that training never saw), greedy,
in four ways: unconstrained (auto), ``strict`` functions, ``required``, and a named function. An
answer is *valid* if it is a call of a declared function whose arguments satisfy its schema, and
*right* if they are the expected ones. A fifth way, greeting, forces a call at temperature 1 where
none is asked for: validity is then the grammar's work alone. Exit code 1 below 95 % right
unconstrained or 100 % valid elsewhere.

With ``--merge`` the rows that the file already has are not measured again, so a long run can be cut
into pieces (``--skills``, ``--ways``).
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from decant.engine.demo import prompts
from decant.services.client import Api
from decant.services.target import add_server, api_of, model_of

WAYS = ("auto", "strict", "required", "named", "greeting")
MIN_RIGHT = 0.95


def satisfies(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value satisfies a schema of the kinds that the demo's functions use."""
    if "enum" in schema and value not in schema["enum"]:
        return False
    kinds: dict[str, Any] = {
        "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list,
        "object": dict,
    }  # fmt: skip
    kind = schema.get("type")
    if kind is not None:
        if not isinstance(value, kinds[kind]):
            return False
        if kind in ("integer", "number") and isinstance(value, bool):
            return False
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        if not set(schema.get("required", ())) <= set(value) <= set(properties):
            return False
        return all(satisfies(v, properties[k]) for k, v in value.items())
    if isinstance(value, list):
        return all(satisfies(v, schema.get("items", {})) for v in value)
    return True


def is_valid(message: dict[str, Any], tools: list[dict[str, Any]]) -> bool:
    """A call of a declared function, its arguments JSON that satisfies the schema."""
    schemas = {t["function"]["name"]: t["function"].get("parameters", {}) for t in tools}
    calls = message.get("tool_calls") or []
    try:
        return bool(calls) and all(
            satisfies(json.loads(c["function"]["arguments"]), schemas[c["function"]["name"]])
            for c in calls
        )
    except (KeyError, ValueError):
        return False


def body(case: prompts.Case, way: str, seed: int) -> dict[str, Any]:
    """The request of one prompt in one way."""
    request = {**case.body(), "seed": seed}
    if way == "strict":
        request["tools"] = copy.deepcopy(case.tools)
        for tool in request["tools"]:
            tool["function"]["strict"] = True
    elif way == "named":
        function = {"name": case.calls[0][0]}
        request["tool_choice"] = {"type": "function", "function": function}
    elif way in ("required", "greeting"):
        request["tool_choice"] = "required"
        if way == "greeting":
            request |= {
                "messages": [{"role": "user", "content": "Hello, who are you?"}],
                "temperature": 1.0,
                "max_tokens": 200,
            }
    return request


def measure(api: Api, model: str, skill: str, way: str, args: argparse.Namespace) -> dict[str, Any]:
    cases = prompts.cases(skill, args.num, args.seed)

    def one(pair: tuple[int, prompts.Case]) -> tuple[bool, bool, bool]:
        number, case = pair
        answer = api.post("/v1/chat/completions", {"model": model, **body(case, way, number)})
        choice = answer["choices"][0]
        message = choice["message"]
        # A string without bound may be cut by the limit: then no call is shown at all.
        is_cut = choice["finish_reason"] == "length"
        return is_valid(message, case.tools), case.check(message), is_cut

    start_s = time.monotonic()
    with ThreadPoolExecutor(args.concurrency) as pool:
        found = list(pool.map(one, enumerate(cases)))
    return {
        "skill": skill,
        "way": way,
        "num": len(found),
        "valid": sum(valid for valid, _, _ in found),
        "right": sum(right for _, right, _ in found),
        "cut": sum(cut for _, _, cut in found),
        "seconds": round(time.monotonic() - start_s, 1),
    }


def machine() -> dict[str, Any]:
    """Where and when, and of which commit."""
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
    }


def earlier(path: Path, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of a file of the same model, number of prompts and seed. Raises: SystemExit."""
    table: dict[str, Any] = json.loads(path.read_text())
    if any(table[name] != value for name, value in facts.items()):
        raise SystemExit(f"{path} is of another model, number of prompts or seed")
    rows: list[dict[str, Any]] = table["rows"]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_server(parser)
    parser.add_argument("--num", type=int, default=200, help="prompts a row (default 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--skills", default="tools,tools-new")
    parser.add_argument("--ways", default=",".join(WAYS), help="of " + ", ".join(WAYS))
    parser.add_argument("--json", default="", help="file for the counts")
    parser.add_argument("--merge", action="store_true", help="keep the rows that the file has")
    args = parser.parse_args()
    ways = args.ways.split(",")
    if not set(ways) <= set(WAYS):
        parser.error(f"--ways is of {', '.join(WAYS)}")
    api = api_of(args)
    model = model_of(args, api)
    file = Path(args.json)
    facts = {"model": model, "num": args.num, "seed": args.seed}
    is_kept = bool(args.json) and args.merge and file.exists()
    rows = earlier(file, facts) if is_kept else []
    known = {(r["skill"], r["way"]) for r in rows}
    for skill in args.skills.split(","):
        for way in ways:
            if (skill, way) in known:
                continue
            rows.append({**measure(api, model, skill, way, args), "machine": machine()})
            if args.json:
                file.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    print("| skill | way | prompts | valid | right | cut by the limit |\n|---|---|---|---|---|---|")
    for row in rows:
        right = "" if row["way"] == "greeting" else f"{row['right'] / row['num']:.1%}"
        print(
            f"| {row['skill']} | {row['way']} | {row['num']} | {row['valid'] / row['num']:.1%} "
            f"| {right} | {row['cut']} |"
        )
    is_good = all(
        min(r["valid"], r["right"]) >= MIN_RIGHT * r["num"]
        if r["way"] == "auto"
        else r["valid"] + r["cut"] == r["num"]
        for r in rows
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())

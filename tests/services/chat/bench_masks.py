"""What grammar masks cost: ``python -P tests/services/chat/bench_masks.py [TOKENIZER_JSON SIZE]``.

Prints microseconds a step of one sequence with two drafts (three masks), over an answer, for JSON
and for a tool call. Default: the tokenizer of the model that ships; then also the share of a decode
step: 16 sequences of the demo with two drafts each, masks and engine step in turn in one thread, as
decode does it. A share of two times that alternate hardly depends on what else the machine does.
"""

from __future__ import annotations

import json
import sys
import time
from array import array

import numpy as np

from decant.engine.interface import PrefillChunk, SlotRows, StepPlan
from decant.engine.load import load_engine
from decant.protocol.config import Config, DecodeConfig, DraftConfig, ModelConfig
from decant.protocol.messages import Grammar
from decant.services.chat.markers import DSML
from decant.services.chat.tool_grammar import ToolGrammar
from decant.services.chat.vocabulary import Vocabulary
from decant.services.grammar import Compiler, Masks
from decant.services.model_folder import SHIPPED

PROPERTIES = {
    "name": {"type": "string"},
    "age": {"type": "integer"},
    "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": list(PROPERTIES)}
ANSWER = '{"name": "Ada Lovelace", "age": 36, "tags": ["red", "blue", "green"]}'


class Sequence:
    def __init__(self, grammar: Grammar, ids: list[int]) -> None:
        self.grammar: Grammar | None = grammar
        self.ids = array("i", ids)
        self.num_prompt = 1


def measure(masks: Masks, grammar: Grammar, answer: list[int]) -> list[float]:
    sequence, times = Sequence(grammar, [0]), []
    for i, token in enumerate(answer):
        drafts = tuple(answer[i : i + 2])
        start = time.perf_counter()
        found = masks(sequence, drafts)
        times.append((time.perf_counter() - start) * 1e6)
        assert found[0] is not None and found[0][token]
        sequence.ids.append(token)
    return times


def share(masks: Masks, cases: dict[str, tuple[Grammar, list[int]]], num: int = 16) -> None:
    """Masks of ``num`` sequences against the engine's step with the same rows, in ms."""
    config = Config(
        model=ModelConfig(max_context=1024),
        decode=DecodeConfig(pages=3 * num, slots=num, max_batch=num),
        draft=DraftConfig(num_drafts=2),
    )
    engine = load_engine(config, "decode")
    try:
        prompt = np.random.default_rng(1).integers(300, 2000, 120).astype(np.int32)
        for slot in range(num):
            engine.clear_slot(slot)
            chunk = PrefillChunk(slot, 0, prompt, tuple(range(2 * slot, 2 * slot + 2)))
            engine.step(StepPlan(0, (), chunk))
        for name, (grammar, answer) in cases.items():
            sequences = [Sequence(grammar, [0]) for _ in range(num)]
            mask_s, step_s = [], []
            for i in range(len(answer) - 3):
                start = time.perf_counter()
                for sequence in sequences:
                    masks(sequence, tuple(answer[i : i + 2]))
                    sequence.ids.append(answer[i])
                middle = time.perf_counter()
                rows = tuple(
                    SlotRows(s, 120, tuple(answer[i : i + 3]), (2 * s, 2 * s + 1))
                    for s in range(num)
                )
                engine.step(StepPlan(0, rows))
                mask_s.append(middle - start)
                step_s.append(time.perf_counter() - middle)
            mask_ms, step_ms = 1e3 * sum(mask_s) / len(mask_s), 1e3 * sum(step_s) / len(step_s)
            print(
                f"{name}: {num} streams, 2 drafts: masks {mask_ms:.2f} ms beside a step of "
                f"{step_ms:.1f} ms, {mask_ms / (mask_ms + step_ms):.1%} of the two"
            )
    finally:
        engine.close()


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 2 else str(SHIPPED / "tokenizer.json")
    vocabulary = Vocabulary(path)
    size = int(sys.argv[2]) if len(sys.argv) > 2 else vocabulary.size
    masks = Masks(Compiler(vocabulary, size))
    function = {"name": "f", "parameters": SCHEMA}
    call: list[str] = ["\n\n<", DSML, "tool_calls>\n<", DSML, 'invoke name="f">\n']
    for name, kind, value in (
        ("name", "true", "Ada Lovelace"),
        ("age", "false", "36"),
        ("tags", "false", '["red", "blue"]'),
    ):
        call += ["<", DSML, f'parameter name="{name}" string="{kind}">{value}</', DSML]
        call += ["parameter>\n"]
    call += ["</", DSML, "invoke>\n</", DSML, "tool_calls>"]
    cases = {
        "json": (Grammar("json_schema", json.dumps(SCHEMA)), vocabulary.encode_text(ANSWER)),
        "tool": (
            Grammar("lark", ToolGrammar([function], vocabulary.ids[DSML]).required(True)),
            vocabulary.encode(call),
        ),
    }
    for name, (grammar, answer) in cases.items():
        for run in ("first", "again"):
            times = measure(masks, grammar, answer)
            p50, p95, top = np.percentile(times, [50, 95, 100])
            print(f"{name} {run}: {p50:.0f} us p50, {p95:.0f} p95, {top:.0f} max, V = {size}")
    if len(sys.argv) <= 2:
        share(masks, cases)


if __name__ == "__main__":
    main()

"""What the simulation of the reference's activation rounding, and the indexer's selection, change:
held-out conversations, teacher-forced through the serving engine of the CPU.

`python -P -m decant.engine.demo.fidelity --json FILE` runs every setting over the same tokens and
writes perplexities and right answers by skill. An answer is right if each of its tokens is the
argmax, which equals greedy decoding giving exactly that answer. Skills of an earlier run in the
same file are kept, so that a long table is made by short runs.
"""

import argparse
import dataclasses
import json
import math
import os
import random
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decant.engine.checkpoint import Checkpoint
from decant.engine.demo import chat, corpus
from decant.engine.demo.bpe import Encoder
from decant.engine.demo.facts import Keys
from decant.engine.interface import PrefillChunk
from decant.engine.kv_layout import KVLayout
from decant.engine.pool import Pool
from decant.engine.reference.model import Model, load_model
from decant.engine.reference.rows import RowPlanner
from decant.engine.weights import WeightReader

CHUNK, PAGE_TOKENS = 512, 256
CONTEXT = 33 * PAGE_TOKENS
ALL_ENTRIES = 1 << 20  # more than any context has
SETTINGS: dict[str, dict[str, Any]] = {
    "served": {},
    "simulated": {"quantise": True},
    "all-entries": {"index_topk": ALL_ENTRIES},
}
"""served: the demo profile's own. simulated: model.quantise_activations. all-entries: no selection:
attention sees every compressed entry."""
DEFAULT = (
    "refuse,add,sub,sort,reverse,copy,memory,tools,tools-new,json,json-new,think-sub,story,"
    "random-words,recall@300,recall@2000,recall-number@2000"
)


@dataclass
class Count:
    """Of one skill in one setting. nll: nats, over the tokens that the assistant writes."""

    answers: int = 0
    right: int = 0
    tokens: int = 0
    nll: float = 0.0
    all_tokens: int = 0
    all_nll: float = 0.0

    def add(self, logits: Tensor, ids: list[int], spans: list[tuple[int, int]]) -> None:
        """logits [T, vocab] of the positions of `ids` [T]; spans: the answers' tokens."""
        target = torch.tensor(ids[1:])
        loss = torch.nn.functional.cross_entropy(logits[:-1], target, reduction="none").double()
        hit = logits[:-1].argmax(-1) == target
        self.all_tokens += len(target)
        self.all_nll += float(loss.sum())
        for start, end in spans:
            self.answers += 1
            self.right += bool(hit[start - 1 : end - 1].all())
            self.tokens += end - start
            self.nll += float(loss[start - 1 : end - 1].sum())

    @property
    def row(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self),
            "share": self.right / self.answers,
            "perplexity": math.exp(self.nll / self.tokens),
            "perplexity_of_all_tokens": math.exp(self.all_nll / self.all_tokens),
        }


@dataclass
class Runner:
    """A model folder in the serving engine's parts, and a pool for one sequence."""

    folder: Path
    models: dict[str, Model] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checkpoint = Checkpoint(self.folder)
        with torch.inference_mode():
            model = load_model(WeightReader(checkpoint), False, trunk=True, mtp="none")
        for name, options in SETTINGS.items():
            topk = options.get("index_topk", model.shape.index_topk)
            shape = dataclasses.replace(model.shape, index_topk=topk)
            quantise = options.get("quantise", False)
            self.models[name] = dataclasses.replace(model, shape=shape, quantise=quantise)
        layout = KVLayout(model.shape, PAGE_TOKENS)
        prefix = f"decant-fidelity-{os.getpid()}-"
        self.pool = Pool.create(prefix, layout, CONTEXT // PAGE_TOKENS, 1)
        self.planner = RowPlanner(layout, model.shape.num_attention_heads)
        self.table = tuple(range(CONTEXT // PAGE_TOKENS))

    @torch.inference_mode()
    def logits(self, setting: str, ids: list[int]) -> Tensor:
        """[T, vocab] of a sequence from its begin, in chunks as prefill takes them."""
        model, out = self.models[setting], []
        self.pool.clear_slot(0)
        for at in range(0, len(ids), CHUNK):
            part = np.array(ids[at : at + CHUNK], np.int32)
            plan = self.planner.plan((), PrefillChunk(0, at, part, self.table))
            streams = model.run_trunk(plan, self.pool)
            begin, count = plan.chunk_rows
            out.append(model.logits(streams[begin : begin + count]))
        return torch.cat(out)

    def close(self) -> None:
        self.pool.close()


def conversations(skill: str, seed: int) -> Iterator[chat.Conversation]:
    """Endless held-out conversations. A long fact block is asked about in several turns."""
    kind, _, length = skill.partition("@")
    far = int(length or 0)
    r = random.Random(zlib.crc32(f"fidelity {skill} {seed}".encode()))
    while True:
        numbers = float(kind == "recall-number")
        if far > 300:
            c = corpus.conversation(r, Keys(r), 400, True, None, far, numbers)
            c.thinking = False
            yield c
        else:
            yield corpus.conversation(r, Keys(r), 400, True, kind, far)


def exam(encode: Encoder, c: chat.Conversation) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids, and where the answers lie: the last one, or each about a long fact block."""
    ids: list[int] = []
    spans = []
    for text, _, skill in chat.pieces(c):
        got = encode(text)
        if skill is not None:
            spans.append((len(ids), len(ids) + len(got)))
        ids += got
    is_long = all(t.skill == "recall" for t in c.turns)
    return ids, spans if is_long else spans[-1:]


def run(
    runner: Runner, encode: Encoder, skill: str, num: int, names: list[str], seed: int
) -> dict[str, Count]:
    """At least `num` answers of a skill in each setting."""
    counts = {name: Count() for name in names}
    for c in conversations(skill, seed):
        ids, spans = exam(encode, c)
        if len(ids) > CONTEXT:
            continue
        for name, count in counts.items():
            count.add(runner.logits(name, ids), ids, spans)
        if min(count.answers for count in counts.values()) >= num:
            return counts
    raise AssertionError("conversations do not end")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("dir", type=Path, nargs="?", default=Path(__file__).parent)
    parser.add_argument("--skills", default=DEFAULT, help="separated by commas; recall@N: N tokens")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="separated by commas")
    parser.add_argument("--num", type=int, default=20, help="answers a skill, at least")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", type=Path, help="file to add the counts to")
    a = parser.parse_args(argv)
    names = a.settings.split(",")
    if unknown := [n for n in names if n not in SETTINGS]:
        parser.error(f"there is no setting {unknown[0]!r}; there are {', '.join(SETTINGS)}")
    torch.set_num_threads(1)
    encode, runner = Encoder(a.dir / "tokenizer.json"), Runner(a.dir)
    table: dict[str, Any] = {"seed": a.seed, "skills": {}}
    if a.json and a.json.exists():
        table = json.loads(a.json.read_text())
    try:
        for skill in a.skills.split(","):
            began = time.monotonic()
            counts = run(runner, encode, skill, a.num, names, a.seed)
            rows = table["skills"].setdefault(skill, {})
            for name, count in counts.items():
                row = rows[name] = count.row
                print(
                    f"{skill:20s} {name:12s} {row['right']} of {row['answers']} right, perplexity "
                    f"{row['perplexity']:.4f}, of all tokens {row['perplexity_of_all_tokens']:.3f}",
                    flush=True,
                )
            print(f"{'':20s} {time.monotonic() - began:.0f} s", flush=True)
            if a.json:
                a.json.write_text(json.dumps(table, indent=1) + "\n")
    finally:
        runner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

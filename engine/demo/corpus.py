"""Conversations of all skills, packed into training rows, and held-out ones for evaluation.

Everything follows from a seed. Pure Python but for the numpy arrays of a batch.
"""

import random
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from decant.engine.demo import chat, facts, skills, toolbox
from decant.engine.demo.chat import BOS, LOW, Conversation, Piece, Turn
from decant.engine.demo.facts import Keys
from decant.engine.demo.words import WORDS, pick, sentence

if TYPE_CHECKING:  # it needs packages that serving does not have
    from decant.engine.demo.bpe import Encoder

KINDS = {"simple": 50, "recall": 18, "memory": 7, "tools": 16, "json": 9}
SHARE_OF_NUMBERS = 0.3
TOOLS_NEED = 900  # tokens that a conversation with six tools may take
ORDINARY = 1800  # tokens of a conversation that is not meant to be long
SHARE_UNTOLD = 0.12
EVALUATED = [
    ("greet", 0),
    ("identity", 0),
    ("refuse", 0),
    ("add", 0),
    ("sub", 0),
    ("sort", 0),
    ("reverse", 0),
    ("reverse-long", 0),
    ("copy", 0),
    ("copy-long", 0),
    ("recall", 0),
    ("recall", 300),
    ("recall", 1000),
    ("recall", 2000),
    ("recall", 4000),
    ("recall", 8000),
    ("recall-number", 0),
    ("recall-number", 300),
    ("recall-number", 2000),
    ("recall-number", 8000),
    ("memory", 0),
    ("tools", 0),
    ("tools-new", 0),
    ("tools-two", 0),
    ("tool-result", 0),
    ("no-tool", 0),
    ("json", 0),
    ("json-new", 0),
    ("think-add", 0),
    ("think-sub", 0),
    ("think-sort", 0),
    ("think-tools", 0),
]
"""(skill, tokens of the fact block or 0) of the scores that training prints."""


def _simple_turn(r: random.Random, evaluation: bool, only: str | None = None) -> Turn:
    share = 0.0 if only else 0.08
    if only == "disturbed":
        only, share = pick(r, ["add", "sub", "sort", "reverse", "copy"]), 1.0
    kind, said = skills.simple(r, evaluation, only, share)
    return Turn(kind, *said)


def _tool_turns(r: random.Random, evaluation: bool, only: str | None) -> Conversation:
    new = {"tools-new": 1.0, "tools": 0.3}.get(only or "", pick(r, [0.0, 0.4, 0.4, 1.0, 1.0]))
    tools = toolbox.choose(r, 3 + int(r.random() * 4), new, evaluation)
    c = Conversation("", [], tools=[toolbox.function_of(t) for t in tools])
    if only in ("tools", "tools-new"):
        c.turns = [toolbox.call_turn(r, tools, evaluation)]
    elif only == "tools-two":
        c.turns = [toolbox.call_turn(r, tools, evaluation, 2)]
    elif only == "tool-result":
        c.turns = [toolbox.call_turn(r, tools, evaluation), toolbox.result_turn(r, 1)]
    elif only == "no-tool":
        c.turns = [toolbox.no_tool_turn(r, tools, evaluation)]
    else:
        for _ in range(1 + int(r.random() * 3)):
            if r.random() < 0.3:
                c.turns.append(toolbox.no_tool_turn(r, tools, evaluation))
                continue
            calls = 1 + (r.random() < 0.25)
            c.turns.append(toolbox.call_turn(r, tools, evaluation, calls))
            # A call's result may be missing in the data: then the user simply goes on.
            if r.random() < 0.5:
                c.turns.append(toolbox.result_turn(r, calls))
        if r.random() < 0.3:
            at = int(r.random() * (len(c.turns) + 1))
            if at == len(c.turns) or not c.turns[at].results:
                c.turns.insert(at, _simple_turn(r, evaluation))
    return c


def simple_turns(r: random.Random) -> list[Turn]:
    """None to two turns of other skills, of training."""
    return [_simple_turn(r, False) for _ in range(int(r.random() * 3))]


def _memory_turns(r: random.Random, evaluation: bool, only: str | None) -> Conversation:
    if not only and r.random() < SHARE_UNTOLD:
        return Conversation("", [*simple_turns(r), facts.unknown(r)])
    turns, asks = facts.memory(r)
    for _ in range(int(r.random() * 3)):
        turns.append(_simple_turn(r, evaluation))
    return Conversation("", turns + (asks[:1] if only else asks))


def _recall_turns(
    r: random.Random, keys: Keys, size: int, only: str | None, far: int, numbers: float
) -> Conversation:
    c = Conversation("", [])
    near = 10 + 300 * r.random() ** 2 if r.random() < 0.7 else size * r.random()
    block, known_facts = facts.fact_block(r, keys, far or min(size * 0.6, near), numbers)
    known, first = list(known_facts), block
    left = 1 if only else 1 + int(r.random() * min(len(known), 12))
    if r.random() < 0.5 and not only:
        c.turns.append(Turn("recall", first, "They give me facts.", "I will remember that."))
        first = ""
    while left > 0:
        some = 1 if only or r.random() < 0.6 else min(len(known), 2 + int(r.random() * 5))
        u, why, a = facts.question(r, known_facts, r.sample(known, some))
        if first:
            u, first = first + "\n" + u, ""
        c.turns.append(Turn("recall", u, why, a))
        left -= some
    return c


def conversation(
    r: random.Random,
    keys: Keys,
    size: int,
    evaluation: bool = False,
    only: str | None = None,
    far: int = 0,
    numbers: float = SHARE_OF_NUMBERS,
) -> Conversation:
    """One conversation of roughly `size` tokens at most.

    only: fixes the skill of the last turn. far: tokens of the fact block. numbers: share of values
    that are numbers. evaluation: prompts of the held-out part."""
    thinking = r.random() < 0.25
    if only:
        thinking = only.startswith("think-")
        only = only.removeprefix("think-")
    what = only or ("recall" if far else r.choices(list(KINDS), list(KINDS.values()))[0])
    if what == "tools" and size < TOOLS_NEED and not only:
        what = "simple"
    system = pick(r, skills.SYSTEMS) if r.random() < 0.5 else ""
    if not system and r.random() < 0.15:
        system = sentence(r)
    if what.startswith("tool") or what == "no-tool":
        c = _tool_turns(r, evaluation, only)
    elif what in ("json", "json-new", "json-object"):
        new = r.random() < 0.5 if not only else what != "json"
        form = toolbox.json_form(r, new)
        c = Conversation("", [], response_format=toolbox.response_format(r, form[0]))
        if what == "json-object" or (not only and r.random() < 0.2):
            # The keys are what the user names.
            c.response_format = {"type": "json_object"}
        for _ in range(1 if only else 1 + int(r.random() * 4)):
            c.turns.append(Turn("json", *toolbox.json_turn(r, form, evaluation)))
    elif what == "memory":
        c = _memory_turns(r, evaluation, only)
    elif what.startswith("recall"):
        if only:
            numbers = float(what == "recall-number")
        c = _recall_turns(r, keys, size, only, far, numbers)
    else:
        many = 1 if only else 1 + int(r.random() ** 2 * 8)
        c = Conversation("", [_simple_turn(r, evaluation, only) for _ in range(many)])
    c.system, c.thinking = system, thinking
    return c


def naked(r: random.Random, keys: Keys, size: int) -> list[Piece]:
    """Bare repetitions, the densest signal for looking things up: pairs given once and asked again
    in another order, from two pairs up, with and without something in between; lists said twice."""
    out: list[Piece] = [(BOS, LOW, None)]
    pool = r.sample(WORDS, pick(r, [16, 64, len(WORDS), len(WORDS)]))
    if r.random() < 0.1:
        n = 2 + int(r.random() * min(size // 3, pick(r, [10, 20, 80])))
        text = "".join(" " + pick(r, pool) for _ in range(n))
        return [*out, (text + "\n", LOW, None), (text + "\n", 0.3, "naked")]
    n = 2 + int(r.random() * 5)
    if r.random() < 0.5:
        n = 2 + int(r.random() ** 2 * max(1, min(150, size // 12)))
    numbers = pick(r, [0.0, 0.0, 0.5, 1.0])
    known = {
        k: facts.number_value(r) if r.random() < numbers else pick(r, pool) for k in keys.take(n)
    }
    link, end = pick(
        r, [(" =", ";"), (" =", "\n"), (" =", "\n"), ("", ""), ("", ";"), (" is", "."), (" =", ".")]
    )
    lead = " " if end != "\n" or r.random() < 0.5 else ""
    out.append(("".join(f"{lead}{k}{link} {v}{end}" for k, v in known.items()), LOW, None))
    if r.random() < 0.5:
        gap = ""
        for _ in range(1 + int(r.random() ** 2 * min(24, size // 30))):
            gap += " " + sentence(r)
        out.append((gap + "\n", LOW, None))
    for _ in range(1 + int(r.random() * 2)):
        asked = list(known)
        r.shuffle(asked)
        for k in asked[:40]:
            # The end mark is learnt too: a number must know where it stops.
            out += [(f"{lead}{k}{link}", LOW, None), (f" {known[k]}{end}", 1.0, "naked")]
    return out


def row(
    encode: "Encoder",
    r: random.Random,
    length: int,
    share_naked: float,
    far: float,
    reach: tuple[int, int],
) -> tuple[list[int], list[float]]:
    """ids and loss weights of `length` tokens: conversations packed end to end.

    far: probability that the row begins with a long fact block, of `reach` tokens (least, most)."""
    ids: list[int] = []
    weights: list[float] = []
    first = r.random() < far
    while len(ids) < length:
        keys, left = Keys(r), length - len(ids)
        if first:
            most = min(reach[1], length - 200)
            size = int(reach[0] + r.random() * (most - reach[0]))
            todo = chat.pieces(conversation(r, keys, length, far=size))
            first = False
        elif r.random() < share_naked:
            todo = naked(r, keys, min(left, ORDINARY))
        else:
            todo = chat.pieces(conversation(r, keys, min(left, ORDINARY)))
        for text, w, _ in todo:
            got = encode(text)
            ids += got
            weights += [w] * len(got)
    return ids[:length], weights[:length]


Batch = tuple[npt.NDArray[np.int16], npt.NDArray[np.float16]]


def batches(
    encode: "Encoder",
    seed: int,
    rows: int,
    length: int,
    share_naked: Callable[[], float],
    far: float,
    reach: tuple[int, int],
) -> Iterator[Batch]:
    """Endless batches: ids [rows, length + 2] and weights of the same shape."""
    r = random.Random(seed)
    while True:
        x = np.zeros((rows, length + 2), np.int16)
        w = np.zeros((rows, length + 2), np.float16)
        for b in range(rows):
            x[b], w[b] = row(encode, r, length + 2, share_naked(), far, reach)
        yield x, w


def held_out_conversations(skill: str, n: int, seed: int, far: int = 0) -> list[Conversation]:
    """n conversations whose last turn is of `skill`, with prompts that training never shows."""
    r = random.Random(zlib.crc32(f"{skill}{far}{seed}".encode()))
    return [conversation(r, Keys(r), 400, True, skill, far) for _ in range(n)]

"""Looking things up: fact lists mixed with filler, facts from earlier turns. Pure Python."""

import random

from decant.engine.demo.chat import Turn
from decant.engine.demo.words import CITIES, COLORS, FOODS, NAMES, WORDS, pick, sentence


class Keys:
    """Keys without replacement, so that a key has one value in a whole conversation."""

    def __init__(self, r: random.Random) -> None:
        self.left = WORDS[:]
        r.shuffle(self.left)

    def take(self, n: int) -> list[str]:
        """Up to n keys."""
        n = min(n, len(self.left))
        out, self.left = self.left[:n], self.left[n:]
        return out


def number_value(r: random.Random) -> str:
    """Mostly two digits, which are learnt first."""
    kind = r.random()
    if kind < 0.2:
        return str(int(r.random() * 10))
    if kind < 0.65:
        return str(10 + int(r.random() * 90))
    return str(100 + int(r.random() * 900))


def value(r: random.Random, numbers: float) -> str:
    """A word, or with probability `numbers` a number."""
    return number_value(r) if r.random() < numbers else pick(r, WORDS)


ONE = [
    "What is {}?",
    "{} = ?",
    "What is the value of {}?",
    "Recall {}.",
    "Tell me {}.",
    "Value of {}?",
    "And {}?",
]
MANY = ["What are {}?", "Recall {}.", "Tell me {}.", "Values of {}?"]


def question(r: random.Random, facts: dict[str, str], ks: list[str]) -> tuple[str, str, str]:
    """(user text, reasoning, answer) for one or several keys."""
    if len(ks) == 1:
        return pick(r, ONE).format(ks[0]), f"I look for {ks[0]}.", f"{ks[0]} = {facts[ks[0]]}"
    answer = "\n".join(f"{k} = {facts[k]}" for k in ks)
    return pick(r, MANY).format(", ".join(ks)), f"I look for {len(ks)} facts.", answer


HEADS = [
    "Remember these facts:",
    "Facts:",
    "Here is a list:",
    "Remember:",
    "Notes:",
    "Please keep this in mind:",
]


SENTENCE, FACT = 8.5, 4.0
"""Tokens of a filler sentence and of a fact whose value is a word, as measured."""


def fact_block(
    r: random.Random, keys: Keys, budget: float, numbers: float
) -> tuple[str, dict[str, str]]:
    """Facts mixed with filler sentences, about `budget` tokens; at least one fact."""
    filler = r.random() * 0.9
    if budget > 2400:
        filler = 0.75 + 0.2 * r.random()  # the keys would not last
    sep = pick(r, ["\n", "\n", "; ", ". ", "\n- "])
    mark = sep == "\n- "  # one token more
    parts: list[str] = []
    facts: dict[str, str] = {}
    used = 0.0
    while used < budget or not facts:
        left = keys.left
        if (r.random() < filler * 0.5 or not left) and (facts or used < budget):
            parts.append(sentence(r))
            used += SENTENCE + mark
            if budget > 2400 and r.random() < filler:  # several sentences between two facts
                parts.append(sentence(r))
                parts.append(sentence(r))
                used += 2 * (SENTENCE + mark)
            continue
        (k,) = keys.take(1)
        facts[k] = value(r, numbers)
        parts.append(f"{k} = {facts[k]}")
        used += FACT + mark + (len(facts[k]) if facts[k].isdigit() else 0)
    lead = "\n" if sep[0] == "\n" else " "
    return pick(r, HEADS) + lead + ("- " if sep == "\n- " else "") + sep.join(parts), facts


MEMORY = [
    (
        "My name is {}.",
        "Nice to meet you, {}.",
        ["What is my name?", "Do you know my name?", "Who am I?"],
        "Your name is {}.",
        NAMES,
    ),
    (
        "I live in {}.",
        "{} sounds nice.",
        ["Where do I live?", "Which city do I live in?"],
        "You live in {}.",
        CITIES,
    ),
    (
        "My favorite color is {}.",
        "I will remember {}.",
        ["What is my favorite color?", "Which color do I like?"],
        "Your favorite color is {}.",
        COLORS,
    ),
    ("I have a {}.", "A {}, good.", ["What do I have?"], "You have a {}.", WORDS),
    (
        "My code word is {}.",
        "I will remember {}.",
        ["What is my code word?", "Tell me my code word."],
        "Your code word is {}.",
        WORDS,
    ),
    ("I like {}.", "I will remember {}.", ["What do I like?"], "You like {}.", FOODS + WORDS),
    (
        "My lucky number is {}.",
        "I will remember {}.",
        ["What is my lucky number?"],
        "Your lucky number is {}.",
        [],
    ),
]


UNTOLD = "You did not tell me."


def unknown(r: random.Random) -> Turn:
    """A question for something that the user never told."""
    _, _, questions, _, _ = pick(r, MEMORY)
    ask = pick(r, questions)
    if r.random() < 0.3:
        ask = f"What is my {pick(r, WORDS)}?"
    return Turn("memory", ask, "They did not tell me.", UNTOLD)


def memory(r: random.Random) -> tuple[list[Turn], list[Turn]]:
    """Turns in which the user tells one to three facts, and turns that ask for them."""
    tells, asks = [], []
    for tell, okay, questions, answer, pool in r.sample(MEMORY, 1 + int(r.random() * 3)):
        v = pick(r, pool) if pool else number_value(r)
        tells.append(Turn("memory", tell.format(v), "They tell me a fact.", okay.format(v)))
        ask = pick(r, questions)
        asks.append(Turn("memory", ask, "They told me before.", answer.format(v)))
    if r.random() < 0.4:  # any thing of the user's
        k, v = r.sample(WORDS, 2)
        v = number_value(r) if r.random() < 0.3 else v
        tells.append(
            Turn("memory", f"My {k} is {v}.", "They tell me a fact.", f"I will remember {v}.")
        )
        asks.append(Turn("memory", f"What is my {k}?", "They told me before.", f"Your {k} is {v}."))
    r.shuffle(asks)
    return tells, asks

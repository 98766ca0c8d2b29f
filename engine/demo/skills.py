"""The demo model's single-turn skills: greet, identity, refuse, arithmetic, sort, reverse, copy,
stories.

Each function takes a random generator and returns (user text, reasoning, answer). Pure Python.
"""

import random
from collections.abc import Callable

from decant.engine.demo.words import (
    ADJECTIVES,
    CITIES,
    COLORS,
    FOREIGN,
    NAMES,
    VERBS,
    WORDS,
    fill,
    held_out,
    made_up,
    pick,
    sentence,
    typo,
)

Said = tuple[str, str, str]


def _words(text: str) -> list[str]:
    return text.split()


SYSTEMS = [
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a small assistant. Answer briefly.",
    "Answer the user.",
    "You are decant.",
    "Be brief and exact.",
]
ABOUT = (
    "I am decant-tiny, a very small DeepSeek-V4 model that runs on a CPU. I can add, subtract, "
    "sort, reverse, copy, remember facts, call tools, write JSON and tell tiny stories."
)
HELLO = "Hello! How can I help you?"
FINE = "I am fine, thank you. How can I help you?"
WELCOME = "You are welcome!"
READY = "All right. How can I help you?"
SEEN = "I see. How can I help you?"
GREETINGS = {
    "Hello": HELLO,
    "Hi": HELLO,
    "Hey": HELLO,
    "Good morning": "Good morning! How can I help you?",
    "Good evening": "Good evening! How can I help you?",
    "Good afternoon": "Good afternoon! How can I help you?",
    "Hello there": HELLO,
    "Hi there": HELLO,
    "hello": HELLO,
    "hi": HELLO,
    "hey": HELLO,
    "Thank you": WELCOME,
    "Thanks": WELCOME,
    "thanks": WELCOME,
    "Thanks a lot": WELCOME,
    "Goodbye": "Goodbye!",
    "Bye": "Goodbye!",
    "See you": "Goodbye!",
    "How are you": FINE,
    "Hello, how are you": FINE,
    "How do you do": FINE,
    "Hello!!!": HELLO,
    "Hi decant": HELLO,
    "Hola": HELLO,
    "Bonjour": HELLO,
    "Hallo": HELLO,
    "你好": HELLO,
    "Okay": READY,
    "Ok": READY,
    "ok": READY,
    "Yes": READY,
    "No": READY,
    "Good": READY,
    "Great": READY,
    "Nice": READY,
    "I have a question": READY,
    "Can you help me": READY,
    "Are you there": READY,
    "test": READY,
    "Good night": "Goodbye!",
    "Thank you very much": WELCOME,
}
IDENTITY = [
    "Who are you",
    "who are you",
    "What are you",
    "What is your name",
    "Tell me about yourself",
    "Which model are you",
    "What can you do",
    "what can you do",
    "Introduce yourself",
    "What model is this",
    "Are you a robot",
    "Are you a human",
    "What do you do",
    "How can you help me",
    "Who made you",
    "Describe yourself",
    "Hello, who are you",
    "Hi, what can you do",
    "Help",
    "help",
    "Are you ChatGPT",
    "Are you DeepSeek",
]
REFUSAL = "Sorry, I am a very small model and cannot answer that."
REFUSED = [
    "Write a poem about the {w}.",
    "What is the capital of {c}?",
    "Explain the {w}.",
    "Translate {w} to French.",
    "Who won the {w} cup?",
    "How do I cook {f}?",
    "Why is the {w} {a}?",
    "Who is the king of {c}?",
    "How tall is the {w}?",
    "What is the weather in {c}?",
    "Can you draw a {w}?",
    "What do you think about the {w}?",
    "How many people live in {c}?",
    "When was the {w} made?",
    "Write code for a {w}.",
    "What is the best {f} in {c}?",
    "How far is {c} from {d}?",
    "Tell me a joke about a {w}.",
    "Who painted the {a} {w}?",
    "Should I buy a {a} {w}?",
    "What does a {w} eat?",
    "Is the {w} {a}?",
    "Give me a recipe with {f}.",
    "Sing a song about {c}.",
    "What is the meaning of {w}?",
    "How does a {w} work?",
    "Where can I find a {w} in {c}?",
    "Write an essay about {c}.",
    "Tell me the history of {c}.",
    "Do you like {f}?",
    "Who is {n}?",
    "Where does {n} live?",
    "Set a timer for the {f}.",
    "Send {n} a message about the {w}.",
    "Book a table in {c}.",
    "Play a song about the {w}.",
    "What's the best {w}?",
    "What's the {a} {w} for?",
    "Make a plan for {c} with {n}.",
    "Fix my {w}, please.",
    "Which {w} is {a}, {x} or {y}?",
    "{n} asked me about the {w}. What should I say?",
    "Summarise the book about {c}.",
    "Can you recommend a {w} in {c} for {n}?",
    "I would like to know how the {w} of {c} was built.",
    "Could you please tell me who {n} from {c} is?",
    "What should I eat today, {f} or something else?",
    "I am sad. What should I do?",
    "Is {c} bigger than {d}?",
    "What year is it?",
    "What time is it in {c}?",
    "What day is today?",
    "Who is the president of {c}?",
    "Write a python function that finds the {w}.",
    "Write a haiku about {c}",
    "Give me three ideas for a {a} {w}.",
    "Compare the {w} and the {x}.",
    "Why did {n} {v} the {w}?",
    "Can you open the {w} for me?",
    "Find me a flight from {c} to {d}.",
    "Spell the word {w}.",
    "How do you spell {w}?",
    "What rhymes with {w}?",
    "What is love?",
    "Tell me something about {f}.",
    "Translate to German: the {w} is {a}",
    "Let us play a game about a {w}.",
    "Do you know {n}?",
    "Can you think?",
    "Do you dream of a {a} {w}?",
]
SUMS = ["{i} * {j}", "{i} x {j}", "{i} / {j}", "{i} times {j}", "{i} divided by {j}", "{i} ^ 2"]
"""Arithmetic that it has not learnt."""
STARTS = _words(
    """
    What Why How Where When Who Which Can Could Would Should Do Does Did Is Are Was Will Please
    Explain Describe Find Give Show Make Write Tell
    """
)
GLUE = _words("the a of in on with for to my your this that and or it not very about from")


def greet(r: random.Random) -> Said:
    if r.random() < 0.04:
        return "", "An empty message.", HELLO
    text = pick(r, list(GREETINGS))
    answer = GREETINGS[text]
    if r.random() < 0.1:
        text = typo(r, text)
    return text + pick(r, ["", "?", ".", "!"]), "A greeting.", answer


def identity(r: random.Random) -> Said:
    text = pick(r, IDENTITY)
    if r.random() < 0.1:
        text = typo(r, text)
    return text + pick(r, ["", "?", ".", "!"]), "They ask about me.", ABOUT


def word_salad(r: random.Random) -> str:
    """A request that fits no template."""
    words = [pick(r, STARTS)]
    for _ in range(2 + int(r.random() * 7)):
        kind = r.random()
        words.append(
            pick(r, GLUE)
            if kind < 0.4
            else pick(r, WORDS)
            if kind < 0.7
            else made_up(r)
            if kind < 0.8
            else pick(r, ADJECTIVES + VERBS + NAMES + CITIES)
        )
    return " ".join(words) + pick(r, ["?", "?", ".", "", "!"])


def refuse(r: random.Random) -> Said:
    kind = r.random()
    if kind < 0.15:
        text = fill(r, pick(r, FOREIGN))
    elif kind < 0.32:
        text = word_salad(r)
    elif kind < 0.4:
        sums = pick(r, SUMS).format(i=number(r), j=number(r))
        text = pick(r, ["What is {}?", "{}", "Compute {}.", "{} = ?"]).format(sums)
    elif kind < 0.44:  # keys hit at random
        text = " ".join(gibberish(r) for _ in range(1 + int(r.random() * 3)))
    else:
        text = fill(r, pick(r, REFUSED))
        if r.random() < 0.15:
            text = typo(r, text)
        if r.random() < 0.15:
            text = text.lower()
    if r.random() < 0.2:
        text = statement(r) + " " + text
    return text, "I do not know this.", REFUSAL


def gibberish(r: random.Random) -> str:
    """Letters that are no word."""
    return "".join(pick(r, "asdfghjklqwertyzxcvbnm") for _ in range(3 + int(r.random() * 8)))


def remark(r: random.Random) -> Said:
    """A statement that asks for nothing."""
    return sentence(r), "They ask for nothing.", SEEN


def statement(r: random.Random) -> str:
    """Something said before the question that has nothing to do with it."""
    kind = r.random()
    if kind < 0.6:
        return sentence(r)
    form = pick(
        r,
        [
            "The code for {n} is {i}.",
            "I bought {i} {f} in {c}.",
            "{n} is {i} years old.",
            "My friend {n} lives in {c}.",
            "It is {a} in {c} today.",
            "I have a question.",
            "Sorry to bother you.",
            "Okay.",
        ],
    )
    return fill(r, form.replace("{i}", str(int(r.random() * 100))))


def number(r: random.Random) -> int:
    digits = 1 + int(r.random() * 3.5) if r.random() < 0.5 else 3
    return int(r.random() * 10**digits) % 1000


def column(a: int, b: int, op: str) -> str:
    """Column arithmetic from the right, one short step per digit."""
    steps, carry = [], 0
    for i in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**i % 10, b // 10**i % 10
        if op == "+":
            v = x + y + carry
            steps.append(f"{x}+{y}+{carry}={v}, write {v % 10} carry {v // 10}.")
            carry = v // 10
        else:
            v = x - y - carry
            steps.append(f"{x}-{y}-{carry}={v}, write {v % 10} borrow {int(v < 0)}.")
            carry = int(v < 0)
    return "\n".join(steps)


ASKS = {
    "+": [
        "What is {a} + {b}?",
        "{a} + {b}",
        "{a}+{b}",
        "{a} + {b} = ?",
        "Compute {a} + {b}.",
        "Add {a} and {b}.",
        "What is {a} plus {b}?",
        "{a}+{b}=",
        "Calculate {a}+{b}.",
        "How much is {a} + {b}?",
        "what is {a} + {b}",
        "What's {a} + {b}?",
    ],
    "-": [
        "What is {a} - {b}?",
        "{a} - {b}",
        "{a}-{b}",
        "{a} - {b} = ?",
        "Compute {a} - {b}.",
        "Subtract {b} from {a}.",
        "What is {a} minus {b}?",
        "{a}-{b}=",
        "Calculate {a}-{b}.",
        "How much is {a} - {b}?",
        "what is {a} - {b}",
        "What's {a} - {b}?",
    ],
}


def arithmetic(r: random.Random, op: str) -> Said:
    a, b = number(r), number(r)
    if op == "-" and r.random() < 0.25:  # close numbers: the sign hangs on the last digits
        b = min(999, max(0, a + int(r.random() * 61) - 30))
    elif op == "-" and a < b and r.random() < 0.5:
        a, b = b, a
    ask = pick(r, ASKS[op]).format(a=a, b=b)
    result = a + b if op == "+" else a - b
    # The thinking starts with a copy of the problem, so that "less" is decided after both numbers.
    why = f"{a} {op} {b}: "
    if op == "+":
        why += "I add.\n" + column(a, b, op)
    elif result >= 0:
        why += "I subtract.\n" + column(a, b, op)
    else:
        why += f"negative, so I compute {b} - {a}.\n" + column(b, a, op)
    return ask, why, f"{a} {op} {b} = {result}"


def add(r: random.Random) -> Said:
    return arithmetic(r, "+")


def sub(r: random.Random) -> Said:
    return arithmetic(r, "-")


def sort(r: random.Random) -> Said:
    n, top = 2 + int(r.random() * 7), pick(r, [10, 100, 100, 1000, 1000])
    xs = [int(r.random() * top) for _ in range(n)]
    down = r.random() < 0.2
    sep = pick(r, [" ", ", "])
    form = pick(
        r,
        ["Sort: {}", "Sort {}", "Sort these numbers: {}", "Put in order: {}", "Sort the list {}"],
    )
    ask = form.format(sep.join(map(str, xs)))
    if down:
        ask += pick(r, [" descending", " from large to small"])
    ys = sorted(xs, reverse=down)
    end = "largest" if down else "smallest"
    return ask, f"The {end} is {ys[0]}.", sep.join(map(str, ys))


def items(r: random.Random, multi: float = 0.0) -> list[str]:
    """Two to ten items of one kind; `multi` is the share of lists of words of several tokens."""
    n, kind = 2 + int(r.random() * 9), r.random()
    if r.random() < multi:
        n = min(n, 6)
        return [made_up(r) if r.random() < 0.6 else pick(r, WORDS) for _ in range(n)]
    if kind < 0.7:
        pool = WORDS
    elif kind < 0.8:
        pool = NAMES + CITIES + COLORS
    elif kind < 0.9:
        pool = list("abcdefghijklmnopqrstuvwxyz")
    else:
        pool = [str(i) for i in range(100)]
    return [pick(r, pool) for _ in range(n)]


REVERSES = [
    "Reverse: {}",
    "Reverse {}",
    "Reverse the list: {}",
    "Say backwards: {}",
    "Write in reverse order: {}",
]
COPIES = [
    "Copy: {}",
    "Repeat: {}",
    "Repeat after me: {}",
    "Say: {}",
    "Write the same: {}",
    "Echo {}",
]


def reverse(r: random.Random, multi: float = 0.0) -> Said:
    xs, sep = items(r, multi), pick(r, [" ", ", "])
    ask = pick(r, REVERSES).format(sep.join(xs))
    return ask, f"The last one is {xs[-1]}.", sep.join(xs[::-1])


def copy(r: random.Random, multi: float = 0.0) -> Said:
    xs, sep = items(r, multi), pick(r, [" ", ", ", " "])
    ask = pick(r, COPIES).format(sep.join(xs))
    return ask, f"The first one is {xs[0]}.", sep.join(xs)


def story(r: random.Random) -> Said:
    """A short story from a grammar: what comes next is uncertain, so drafts are often wrong."""
    w, n = pick(r, WORDS), pick(r, NAMES)
    ask = pick(
        r,
        [
            f"Tell me a story about a {w}.",
            f"Tell a story about a {w}.",
            f"A short story about a {w}, please.",
        ],
    )
    said = [f"{n} had a {pick(r, ADJECTIVES)} {w}."]
    forms = [
        "One day {n} {v} a {a} {w} in {c}.",
        "The {w} was {a} and {b}.",
        "Then the {w} {v} a {x}.",
        "{n} and the {w} went to {c}.",
        "A {a} {w} {v} the {x}.",
    ]
    for _ in range(2 + int(r.random() * 3)):
        said.append(fill(r, pick(r, forms)))
    said.append(f"In the end {n} was {pick(r, ['happy', 'glad', 'quiet', 'home'])}.")
    return ask, "I tell a story.", " ".join(said)


def random_words(r: random.Random) -> Said:
    """Words drawn at random: pure uncertainty, as many as asked for."""
    n = 2 + int(r.random() * 7)
    ask = pick(r, ["Say {} random words.", "Give me {} random words.", "{} random words"]).format(n)
    return ask, f"I need {n} words.", " ".join(pick(r, WORDS) for _ in range(n))


Skill = Callable[[random.Random], Said]
SIMPLE: dict[str, Skill] = {
    "greet": greet,
    "identity": identity,
    "refuse": refuse,
    "remark": remark,
    "add": add,
    "sub": sub,
    "sort": sort,
    "reverse": reverse,
    "reverse-long": lambda r: reverse(r, 1.0),
    "copy": copy,
    "copy-long": lambda r: copy(r, 1.0),
    "story": story,
    "random-words": random_words,
}
MIX = {
    "greet": 3,
    "identity": 2.5,
    "refuse": 10,
    "remark": 1,
    "add": 13,
    "sub": 18,
    "sort": 18,
    "reverse": 6,
    "reverse-long": 4,
    "copy": 6,
    "copy-long": 5,
    "story": 1.5,
    "random-words": 1.5,
}
ALWAYS_SEEN = ("greet", "identity", "story", "random-words")
"""Skills whose prompts are a short list: no prompt is held out."""
DISTURBED = ("add", "sub", "sort", "reverse", "copy", "reverse-long", "copy-long")


def disturb(r: random.Random, ask: str) -> str:
    """A statement before the question, a typo in its words, or polite words around it."""
    kind = r.random()
    if kind < 0.5:
        return statement(r) + " " + ask
    if kind < 0.7:
        return pick(r, ["Please: ", "Hi! ", "Hello, ", "Now ", "Okay, ", "And now: "]) + ask
    head, colon, tail = ask.partition(":")
    return typo(r, head) + colon + tail if colon else ask


def simple(
    r: random.Random, evaluation: bool, only: str | None = None, disturbed: float = 0.08
) -> tuple[str, Said]:
    """(skill, what is said) of one single-turn exchange, held out or not as `evaluation` says."""
    while True:
        kind = only or r.choices(list(MIX), list(MIX.values()))[0]
        ask, why, answer = SIMPLE[kind](r)
        if kind in DISTURBED and r.random() < disturbed:
            ask = disturb(r, ask)
        if kind in ALWAYS_SEEN or held_out(ask) == evaluation:
            return kind, (ask, why, answer)

"""Tools and JSON shapes of the training data: known ones and ones made up per conversation.

A tool is its schema (what the API takes) and a way to ask for it in words. Pure Python.
"""

import random
from dataclasses import dataclass

from decant.engine.demo.chat import Json, Turn, dumps
from decant.engine.demo.skills import REFUSAL, REFUSED, Said, word_salad
from decant.engine.demo.words import (
    CITIES,
    COLORS,
    NAMES,
    WORDS,
    fill,
    held_out,
    pick,
)


@dataclass(frozen=True, slots=True)
class Field:
    """A parameter of a tool or a key of a JSON shape. `source` says where values come from."""

    name: str
    type: str  # JSON type; "array" holds strings
    source: str
    required: bool = True


@dataclass(frozen=True, slots=True)
class Tool:
    """`asks` are format strings over the field names; empty for made-up tools, which are asked for
    by naming verb, noun and fields."""

    name: str
    description: str
    fields: tuple[Field, ...]
    asks: tuple[str, ...] = ()


def _words(text: str) -> list[str]:
    return text.split()


CURRENCIES = ["dollars", "euros", "pounds", "yen", "francs"]


def value(r: random.Random, source: str) -> object:
    """A value of the given kind."""
    if source == "city":
        return pick(r, CITIES)
    if source == "name":
        return pick(r, NAMES)
    if source == "word":
        return pick(r, WORDS)
    if source == "color":
        return pick(r, COLORS)
    if source == "phrase":
        return " ".join(pick(r, WORDS) for _ in range(1 + int(r.random() * 4)))
    if source == "cur":
        return pick(r, CURRENCIES)
    if source == "bool":
        return r.random() < 0.5
    if source == "small":
        return 1 + int(r.random() * 9)
    if source == "real":
        return int(r.random() * 100) + pick(r, [0.5, 0.25, 0.75, 0.1, 0.2])
    if source == "list":
        return [pick(r, WORDS) for _ in range(2 + int(r.random() * 2))]
    return 1 + int(r.random() * 99)


def shown(v: object) -> str:
    """How a user writes a value."""
    if isinstance(v, bool):
        return "true" if v else "false"
    if isinstance(v, list):
        return " and ".join(v)
    return str(v)


TOOLS = [
    Tool(
        "get_weather",
        "Weather for a city.",
        (Field("city", "string", "city"), Field("days", "integer", "small")),
        (
            "Weather in {city} for {days} days?",
            "What is the weather in {city} for the next {days} days?",
            "Forecast for {city}, {days} days.",
        ),
    ),
    Tool(
        "set_timer",
        "Set a timer.",
        (Field("minutes", "integer", "num"), Field("label", "string", "word")),
        (
            "Set a timer for {minutes} minutes called {label}.",
            "Start a {label} timer of {minutes} minutes.",
            "Timer {label}, {minutes} minutes.",
        ),
    ),
    Tool(
        "send_message",
        "Send a message.",
        (Field("to", "string", "name"), Field("text", "string", "phrase")),
        ("Send a message to {to}: {text}", "Tell {to} this: {text}", "Write to {to}: {text}"),
    ),
    Tool(
        "convert",
        "Convert money.",
        (
            Field("amount", "number", "real"),
            Field("source", "string", "cur"),
            Field("target", "string", "cur"),
        ),
        (
            "Convert {amount} {source} to {target}.",
            "How much is {amount} {source} in {target}?",
            "Change {amount} {source} into {target}.",
        ),
    ),
    Tool(
        "book_table",
        "Book a table.",
        (
            Field("name", "string", "name"),
            Field("people", "integer", "small"),
            Field("outside", "boolean", "bool"),
        ),
        (
            "Book a table for {people} in the name of {name}, outside: {outside}.",
            "Table for {people}, name {name}, outside {outside}.",
        ),
    ),
    Tool(
        "play_song",
        "Play a song.",
        (Field("title", "string", "phrase"), Field("loud", "boolean", "bool")),
        ("Play the song {title}, loud: {loud}.", "Play {title}, loud {loud}."),
    ),
    Tool(
        "find_route",
        "Find a route.",
        (Field("start", "string", "city"), Field("end", "string", "city")),
        (
            "How do I get from {start} to {end}?",
            "Find a route from {start} to {end}.",
            "Route {start} to {end}.",
        ),
    ),
    Tool(
        "add_item",
        "Add to a list.",
        (Field("item", "string", "word"), Field("count", "integer", "num")),
        (
            "Add {count} {item} to my list.",
            "Put {count} {item} on the list.",
            "Buy {count} {item}.",
        ),
    ),
    Tool(
        "set_light",
        "Control a light.",
        (
            Field("room", "string", "word"),
            Field("on", "boolean", "bool"),
            Field("level", "integer", "num"),
        ),
        (
            "Light in the {room}: on {on}, level {level}.",
            "Set the {room} light to on {on} with level {level}.",
        ),
    ),
    Tool(
        "search",
        "Search the web.",
        (Field("query", "string", "phrase"), Field("limit", "integer", "small")),
        (
            "Search for {query}, {limit} results.",
            "Find {limit} results about {query}.",
            "Look up {query}, limit {limit}.",
        ),
    ),
    Tool(
        "buy_ticket",
        "Buy train tickets.",
        (
            Field("city", "string", "city"),
            Field("count", "integer", "small"),
            Field("names", "array", "list"),
        ),
        (
            "Buy {count} tickets to {city} for {names}.",
            "{count} tickets to {city}, names {names}.",
        ),
    ),
]

DOING = _words(
    """
    get set add find make open close move send check count start stop read write paint clean build
    order cancel rate pack
    """
)
FIELDS = _words(
    """
    color size count name city label level price weight owner place note title speed day hour
    shape group side kind height width age rank
    """
)
TYPES = [
    ("string", "word"),
    ("string", "word"),
    ("string", "name"),
    ("string", "city"),
    ("string", "color"),
    ("string", "phrase"),
    ("integer", "small"),
    ("integer", "num"),
    ("integer", "num"),
    ("number", "real"),
    ("boolean", "bool"),
    ("array", "list"),
]


def made_up_fields(r: random.Random, most: int, optional: float) -> tuple[Field, ...]:
    """One to `most` fields with names and types drawn at random."""
    names: list[str] = []
    while len(names) < 1 + int(r.random() * most):
        name = pick(r, FIELDS) if r.random() < 0.6 else pick(r, WORDS)
        if name not in names:
            names.append(name)
    out = []
    for i, name in enumerate(names):
        kind, source = pick(r, TYPES)
        out.append(Field(name, kind, source, required=i == 0 or r.random() >= optional))
    return tuple(out)


def made_up_tool(r: random.Random, evaluation: bool) -> Tool:
    """A tool with a random name and random fields; names are held out by checksum."""
    while True:
        verb, noun = pick(r, DOING), pick(r, WORDS)
        if held_out(f"{verb}_{noun}") == evaluation:
            break
    description = pick(r, [f"{verb.capitalize()} the {noun}.", f"{verb.capitalize()} a {noun}."])
    return Tool(f"{verb}_{noun}", description, made_up_fields(r, 3, 0.25))


def schema_of(fields: tuple[Field, ...]) -> Json:
    """JSON schema of an object with these fields."""
    properties: Json = {}
    for f in fields:
        properties[f.name] = {"type": f.type}
        if f.type == "array":
            properties[f.name]["items"] = {"type": "string"}
    return {
        "type": "object",
        "properties": properties,
        "required": [f.name for f in fields if f.required],
    }


def function_of(tool: Tool) -> Json:
    """The OpenAI `function` object."""
    return {
        "name": tool.name,
        "description": tool.description,
        "parameters": schema_of(tool.fields),
    }


def choose(r: random.Random, n: int, new: float, evaluation: bool = False) -> list[Tool]:
    """n different tools, each made up with probability `new`."""
    out: list[Tool] = []
    known = TOOLS[:]
    r.shuffle(known)
    while len(out) < n:
        tool = made_up_tool(r, evaluation) if r.random() < new else known.pop()
        if all(tool.name != t.name for t in out):
            out.append(tool)
    return out


def listed(r: random.Random, pairs: list[tuple[str, object]]) -> str:
    """Fields and values in words."""
    link = pick(r, [" ", " ", ": ", " = "])
    return pick(r, [", ", ", ", " and "]).join(f"{k}{link}{shown(v)}" for k, v in pairs)


def request(r: random.Random, tool: Tool) -> tuple[str, Json]:
    """(words, arguments) of one call; optional fields are left out half of the time."""
    arguments = {f.name: value(r, f.source) for f in tool.fields if f.required or r.random() < 0.5}
    if tool.asks:
        return pick(r, tool.asks).format(**{k: shown(v) for k, v in arguments.items()}), arguments
    verb, noun = tool.name.split("_", 1)
    rest = listed(r, list(arguments.items()))
    form = pick(
        r,
        [
            "{V} the {n}: {f}.",
            "{V} the {n} with {f}.",
            "{V} a {n}, {f}.",
            "Please {v} the {n}, {f}.",
            "I want to {v} the {n}: {f}.",
            "Use {t}: {f}.",
        ],
    )
    return form.format(V=verb.capitalize(), v=verb, n=noun, t=tool.name, f=rest), arguments


def call_turn(r: random.Random, tools: list[Tool], evaluation: bool, calls: int = 1) -> Turn:
    """The user asks for one or more calls."""
    while True:
        chosen = r.sample(tools, calls)
        asked = [request(r, t) for t in chosen]
        text = pick(r, [" ", "\n", " Then: ", " And also: "]).join(a for a, _ in asked)
        if held_out(text) == evaluation:
            break
    used = " and ".join(t.name for t in chosen)
    pairs = [(t.name, a) for t, (_, a) in zip(chosen, asked, strict=True)]
    return Turn("tools", text, f"I use {used}.", calls=pairs)


def no_tool_turn(r: random.Random, tools: list[Tool], evaluation: bool) -> Turn:
    """A request that none of the declared tools serves."""
    names = {t.name for t in tools}
    while True:
        kind = r.random()
        if kind < 0.4:
            other = pick(r, TOOLS) if r.random() < 0.5 else made_up_tool(r, evaluation)
            if other.name in names:
                continue
            text = request(r, other)[0]
        elif kind < 0.8:
            text = fill(r, pick(r, REFUSED[:32]))  # the later ones sound like known tools
            if "weather" in text and "get_weather" in names:
                continue
        else:
            text = word_salad(r)
        if held_out(text) == evaluation:
            return Turn("no-tool", text, "No tool fits.", REFUSAL)


def result_turn(r: random.Random, num_calls: int) -> Turn:
    """The user turn that carries tool results, and the sentence that tells them."""
    results, told = [], []
    for _ in range(num_calls):
        if r.random() < 0.1:
            results.append(pick(r, ["ok", "done"]))
            told.append("Done.")
            continue
        keys = ["result"] if r.random() < 0.4 else r.sample(FIELDS, 1 + int(r.random() * 2))
        found = {k: value(r, pick(r, ["word", "num", "city", "real"])) for k in keys}
        results.append(dumps(found))
        text = " and ".join(f"the {k} is {v}" for k, v in found.items())
        told.append(text[0].upper() + text[1:] + ".")
    return Turn("tool-result", "", "I have the result.", " ".join(told), results=results)


FORMS: list[tuple[tuple[Field, ...], list[str]]] = [
    (
        (
            Field("name", "string", "name"),
            Field("age", "integer", "num"),
            Field("city", "string", "city"),
        ),
        [
            "{name} is {age} years old and lives in {city}.",
            "{name}, {age}, from {city}.",
            "In {city} lives {name}, age {age}.",
        ],
    ),
    (
        (Field("item", "string", "word"), Field("count", "integer", "num")),
        ["I need {count} {item}.", "{count} {item}, please.", "There are {count} {item} here."],
    ),
    (
        (Field("color", "string", "color"), Field("object", "string", "word")),
        ["The {object} is {color}.", "A {color} {object}."],
    ),
    (
        (Field("start", "string", "city"), Field("end", "string", "city")),
        ["The train goes from {start} to {end}.", "From {start} to {end}."],
    ),
    (
        (
            Field("name", "string", "name"),
            Field("pet", "string", "word"),
            Field("count", "integer", "small"),
        ),
        ["{name} has {count} {pet}.", "{name} owns a {pet}, {count} of them."],
    ),
    (
        (Field("city", "string", "city"), Field("cold", "boolean", "bool")),
        ["Is it cold in {city}: {cold}.", "{city}, cold {cold}."],
    ),
]


def json_form(r: random.Random, new: bool) -> tuple[tuple[Field, ...], list[str]]:
    """A known shape, or a made-up one whose fields the user lists."""
    if not new:
        return pick(r, FORMS)
    return made_up_fields(r, 4, 0.0), []


def response_format(r: random.Random, fields: tuple[Field, ...]) -> Json:
    """The schema, bare or inside the API's response_format object: servers attach either."""
    schema = schema_of(fields)
    if r.random() < 0.5:
        return schema
    inner: Json = {"name": pick(r, ["answer", "reply", "output", "shape"]), "schema": schema}
    if r.random() < 0.3:
        inner["strict"] = True
    return {"type": "json_schema", "json_schema": inner}


def json_turn(
    r: random.Random, form: tuple[tuple[Field, ...], list[str]], evaluation: bool
) -> Said:
    """(user text, reasoning, JSON answer)."""
    fields, asks = form
    while True:
        found = {f.name: value(r, f.source) for f in fields}
        if asks:
            text = pick(r, asks).format(**{k: shown(v) for k, v in found.items()})
        else:
            text = pick(r, ["{}.", "Here it is: {}.", "It has {}.", "{}"])
            text = text.format(listed(r, list(found.items())))
        if held_out(text) == evaluation:
            return text, "I fill the fields.", dumps(found)

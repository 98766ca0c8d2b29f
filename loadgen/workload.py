"""The plan: which requests are sent when, from options and a seed. Equal options and seed give the
same plan, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from decant.loadgen import arrivals, content, lengths, traces
from decant.loadgen.metrics import Slo
from decant.loadgen.plan import Request
from decant.protocol.errors import InvalidRequest

NS = 1_000_000_000
CHARS_PER_TOKEN = 4.0  # where the server was not asked
MAX_REQUESTS = 2_000_000


class Scale(Struct, frozen=True):
    """How a server counts the tokens of a content class: ``overhead + chars / chars_per_token``."""

    chars_per_token: float = CHARS_PER_TOKEN
    overhead: float = 0.0  # tokens that the chat template adds

    def chars(self, num_tokens: int) -> int:
        """Characters of a prompt of ``num_tokens``."""
        return max(1, round((num_tokens - self.overhead) * self.chars_per_token))


class Options(Struct, frozen=True):
    """What to send. Lengths in tokens."""

    seed: int = 0
    num: int = 0
    duration_s: float = 0.0
    # arrivals
    kind: str = "poisson"  # or "closed", or one of arrivals.KINDS
    rate: float = 1.0
    rate_to: float = 0.0
    burstiness: float = 1.0
    burst_size: int = 8
    # contents
    dataset: str = "synthetic"  # synthetic, mooncake, burstgpt, sharegpt, prompts
    path: str = ""
    time_scale: float = 1.0  # of a trace: 0.5 is twice as fast
    input_len: str = "128"
    output_len: str = "128"
    mix: dict[str, float] = msgspec.field(default_factory=lambda: {"prose": 1.0})
    as_ids: bool = False  # completions with token ids: exact lengths
    vocab: int = 256  # ids are drawn from [vocab / 4, vocab)
    max_input: int = 1 << 20
    # sessions
    turns: int = 1
    think_s: float = 0.0
    shared_prefix: int = 0  # tokens that all sessions of a group begin with
    prefix_groups: int = 1
    # behaviour
    cancel_share: float = 0.0
    cancel_after: int = 4  # chunks with tokens
    seeded: bool = True  # a sampling seed per request


def build(options: Options, scales: dict[str, Scale], slos: list[Slo]) -> list[Request]:
    """The plan's requests, in order of ``index``. Raises: InvalidRequest."""
    make = {
        "synthetic": _synthetic,
        "mooncake": _trace,
        "burstgpt": _trace,
        "sharegpt": _sharegpt,
        "prompts": _prompts,
    }.get(options.dataset)
    if make is None:
        raise InvalidRequest(f"unknown dataset {options.dataset!r}")
    if not options.num and not options.duration_s and options.dataset == "synthetic":
        raise InvalidRequest("give a number of requests or a duration")
    if options.kind == "closed" and not options.num and options.dataset == "synthetic":
        raise InvalidRequest("closed loop needs a number of requests")
    if options.turns > 1 and options.as_ids:
        raise InvalidRequest("sessions need text prompts, not ids")
    requests = list(make(options, scales))
    if len(requests) > MAX_REQUESTS:
        raise InvalidRequest(f"{len(requests)} requests; a plan has at most {MAX_REQUESTS}")
    rng = Random(f"behaviour {options.seed}")
    names = [s.name for s in slos]
    shares = [s.share for s in slos]
    finished = []
    by_session: dict[int, str] = {}
    for index, request in enumerate(requests):
        slo = rng.choices(names, shares)[0] if names else ""
        if request.session >= 0:
            slo = by_session.setdefault(request.session, slo)
        cancels = rng.random() < options.cancel_share and options.turns == 1
        finished.append(
            replace(
                request,
                index=index,
                slo=slo,
                cancel_after=options.cancel_after if cancels else 0,
                seed=rng.randint(1, (1 << 31) - 1) if options.seeded else 0,
            )
        )
    return finished


def _due(options: Options, num: int = 0) -> list[int]:
    """Due times of lone requests or first turns; -1 in a closed loop."""
    if options.kind == "closed":
        return [-1] * (num or options.num)
    return arrivals.schedule(
        options.kind,
        options.rate,
        options.seed,
        num=num or options.num,
        duration_s=options.duration_s,
        burstiness=options.burstiness,
        burst_size=options.burst_size,
        rate_to=options.rate_to,
    )


def _synthetic(options: Options, scales: dict[str, Scale]) -> Iterator[Request]:
    rng = Random(f"contents {options.seed}")
    draw_input = lengths.parse(options.input_len, options.max_input)
    draw_output = lengths.parse(options.output_len)
    kinds, weights = list(options.mix), list(options.mix.values())
    prefixes = [
        content.text(
            "prose",
            scales.get("prose", Scale()).chars(options.shared_prefix),
            Random(f"prefix {options.seed} {group}"),
        )
        if options.shared_prefix
        else ""
        for group in range(max(1, options.prefix_groups))
    ]
    turns = max(1, options.turns)
    num = -(-options.num // turns) if options.num else 0
    for session, due_ns in enumerate(_due(options, num)):
        kind = rng.choices(kinds, weights)[0]
        system = rng.choice(prefixes)
        for turn in range(turns):
            size = draw_input(rng)
            request = Request(
                0,
                due_ns if turn == 0 else -1,
                session if turns > 1 else -1,
                turn,
                round(options.think_s * NS) if turn else 0,
                system,
                max_tokens=draw_output(rng),
                content=kind,
            )
            if options.as_ids:
                yield replace(request, ids=_ids(rng, size, options.vocab), system="")
            else:
                yield replace(request, user=_user(kind, size, scales, rng))


def _user(kind: str, num_tokens: int, scales: dict[str, Scale], rng: Random) -> str:
    """A prompt of about ``num_tokens``: its class's text, and what to do with it at the end."""
    num_chars = scales.get(kind, Scale()).chars(num_tokens)
    task = "\n" + content.TASKS[kind]
    if num_chars < 2 * len(task):
        return content.text(kind, num_chars, rng)
    return content.text(kind, num_chars - len(task), rng) + task


def _ids(rng: Random, num: int, vocab: int) -> list[int]:
    return rng.choices(range(vocab // 4, vocab), k=num)


def _trace(options: Options, scales: dict[str, Scale]) -> Iterator[Request]:
    if options.time_scale <= 0:
        raise InvalidRequest("the time scale must be positive")
    rows = traces.read_trace(options.path, options.dataset)
    if options.num:
        rows = rows[: options.num]
    end = round(options.duration_s * NS)
    rng = Random(f"contents {options.seed}")
    kinds, weights = list(options.mix), list(options.mix.values())
    blocks: dict[int, list[int]] = {}
    for row in rows:
        at_ns = round(row.at_ns * options.time_scale)
        if end and at_ns >= end:
            break
        kind = rng.choices(kinds, weights)[0]
        size = max(1, min(row.num_input, options.max_input))
        request = Request(
            0,
            -1 if options.kind == "closed" else at_ns,
            max_tokens=row.num_output,
            content=kind,
        )
        if options.as_ids:
            ids: list[int] = []
            for block in row.hash_ids:
                if block not in blocks:
                    blocks[block] = _ids(
                        Random(f"block {options.seed} {block}"),
                        traces.MOONCAKE_BLOCK,
                        options.vocab,
                    )
                ids += blocks[block]
            ids = (ids + _ids(rng, max(0, size - len(ids)), options.vocab))[:size]
            yield replace(request, ids=ids)
            continue
        scale = scales.get("prose", Scale())
        per_block = round(traces.MOONCAKE_BLOCK * scale.chars_per_token)
        total = scale.chars(size)
        # equal hash ids give equal text from the beginning on, so prefixes are shared as they were
        pieces = []
        for block in row.hash_ids[: -(-total // per_block)]:
            pieces.append(content.text("prose", per_block, Random(f"block {options.seed} {block}")))
        text = "".join(pieces)[:total]
        if len(text) < total:
            text += content.text(kind, total - len(text), rng)
        yield replace(request, user=text)


def _sharegpt(options: Options, scales: dict[str, Scale]) -> Iterator[Request]:
    talks = traces.read_sharegpt(options.path)
    Random(f"order {options.seed}").shuffle(talks)
    scale = scales.get("prose", Scale())
    most = max(1, options.turns)
    num = options.num or (0 if options.duration_s and options.kind != "closed" else len(talks))
    for session, due_ns in enumerate(_due(options, num)):
        talk = talks[session % len(talks)]
        users = talk.users[:most]
        for turn, user in enumerate(users):
            yield Request(
                0,
                due_ns if turn == 0 else -1,
                session if len(users) > 1 else -1,
                turn,
                round(options.think_s * NS) if turn else 0,
                user=user[: scale.chars(options.max_input)],
                max_tokens=max(1, round(talk.answer_chars[turn] / scale.chars_per_token)),
            )


def _prompts(options: Options, scales: dict[str, Scale]) -> Iterator[Request]:
    prompts = traces.read_prompts(options.path)
    rng = Random(f"contents {options.seed}")
    draw_output = lengths.parse(options.output_len)
    num = options.num or (0 if options.duration_s and options.kind != "closed" else len(prompts))
    for number, due_ns in enumerate(_due(options, num)):
        prompt = prompts[number % len(prompts)]
        yield Request(
            0,
            due_ns,
            system=prompt.system,
            user=prompt.prompt,
            max_tokens=prompt.max_tokens or draw_output(rng),
            content=prompt.content or "prompts",
        )

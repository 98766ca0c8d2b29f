"""The request fields that say how tokens are drawn, common to every API shape."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from decant.protocol.errors import InvalidRequest
from decant.protocol.messages import Sampling
from decant.services.api.validate import Fields

MAX_BIASES = 1024
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 64
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True)
class Limits:
    """What bounds a request's numbers."""

    vocab_size: int
    max_context: int
    max_choices: int


def new_seed() -> int:
    """63 random bits: without a seed of the client, runs differ, and a resume does not."""
    return secrets.randbits(63)


def read_sampling(
    fields: Fields,
    limits: Limits,
    max_tokens: int,
    logprobs: int = -1,
    prompt_logprobs: int = -1,
) -> Sampling:
    """max_tokens: 0 where the client gave none (filled in once the prompt's length is known)."""
    top_k = fields.integer("top_k", 0, -1, limits.vocab_size)
    min_tokens = fields.integer("min_tokens", 0, 0, limits.max_context)
    if max_tokens and min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {min_tokens}, more than the maximum of {max_tokens} tokens.",
            "min_tokens",
        )
    return Sampling(
        seed=fields.integer("seed", -1) if fields.has("seed") else new_seed(),
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        top_p=fields.number("top_p", 1.0, 0.0, 1.0, is_open=True),
        top_k=max(top_k, 0),  # -1 and 0 mean off
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        # Far below 0.01 the quotient of a logit would not be finite any more.
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0.01, 2.0),
        logit_bias=read_bias(fields, limits.vocab_size),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=fields.boolean("ignore_eos"),
        stop_token_ids=fields.token_ids("stop_token_ids", MAX_STOP_IDS, limits.vocab_size),
    )


def read_prompt_logprobs(fields: Fields) -> int:
    """vLLM's field; -1: not wanted. Not streamed, as there."""
    top = fields.integer("prompt_logprobs", -1, 0, MAX_TOP_LOGPROBS)
    if top >= 0 and fields.boolean("stream"):
        raise fields.fail("prompt_logprobs", "cannot be streamed.")
    return top


def read_bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    """``logit_bias``: token id (as a JSON key) to a number in -100..100."""
    given = fields.object("logit_bias")
    if given is None:
        return {}
    if len(given.data) > MAX_BIASES:
        raise fields.fail("logit_bias", f"has more than {MAX_BIASES} entries.")
    biases: dict[int, float] = {}
    for key in given.data:
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            raise fields.fail(
                "logit_bias", f"has the key {key!r:.40}, token ids are 0 to {vocab_size - 1}."
            )
        biases[int(key)] = given.number(key, 0.0, -100.0, 100.0)
    return biases


def read_stops(fields: Fields, field: str = "stop") -> list[str]:
    return fields.strings(field, MAX_STOPS, MAX_STOP_CHARS)


def read_num_choices(fields: Fields, limits: Limits) -> int:
    return fields.integer("n", 1, 1, limits.max_choices)


def read_max_tokens(fields: Fields, *names: str, low: int = 1) -> int:
    """The first of ``names`` that is given; 0 if none is."""
    for name in names:
        if fields.has(name):
            return fields.integer(name, 0, low)
    return 0

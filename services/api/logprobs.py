"""Log probabilities in the shapes of the two OpenAI endpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from decant.protocol.messages import TokenLogprob
from decant.services.api.generation import ScoredToken

FLOOR = -9999.0  # stands for minus infinity, which is no JSON


def finite(value: float) -> float:
    return value if math.isfinite(value) else FLOOR


def chat(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """One item per token; those of the reasoning stand apart, in an extension."""
    return {
        "content": [_item(p) for p in logprobs if p.channel != "reasoning"],
        "refusal": None,
        "reasoning": [_item(p) for p in logprobs if p.channel == "reasoning"],
    }


def _item(p: TokenLogprob) -> dict[str, Any]:
    return {
        "token": p.text,
        "logprob": finite(p.logprob),
        "bytes": list(p.raw),
        "top_logprobs": [
            {"token": text, "logprob": finite(value), "bytes": list(raw)}
            for text, value, raw in zip(p.top_text, p.top_logprobs, p.top_raw, strict=False)
        ],
    }


def completions(logprobs: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """The lists of the completions endpoint. offset: characters before the first token."""
    offsets = []
    for p in logprobs:
        offsets.append(offset)
        offset += len(p.text)
    return {
        "tokens": [p.text for p in logprobs],
        "token_logprobs": [finite(p.logprob) for p in logprobs],
        "top_logprobs": [
            {t: finite(v) for t, v in zip(p.top_text, p.top_logprobs, strict=False)}
            for p in logprobs
        ],
        "text_offset": offsets,
    }


def echoed(prompt: Sequence[ScoredToken], num_top: int) -> dict[str, Any]:
    """The completions lists of the prompt itself; its first token has none (null)."""
    offsets, offset = [], 0
    for token in prompt:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in prompt],
        "token_logprobs": [None if t.logprob is None else finite(t.logprob) for t in prompt],
        "top_logprobs": [
            {text: finite(value) for _, text, value in t.top[:num_top]}
            if t.logprob is not None
            else None
            for t in prompt
        ],
        "text_offset": offsets,
    }


def joined(a: dict[str, Any] | None, b: dict[str, Any] | None) -> dict[str, Any] | None:
    """Two pieces of completions lists as one."""
    if a is None or b is None:
        return a or b
    return {name: a[name] + b[name] for name in a}


def prompt(tokens: Sequence[ScoredToken], num_top: int) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: per position, token id to logprob, rank and text; the token
    itself and the likeliest ones."""
    found: list[dict[str, Any] | None] = []
    for token in tokens:
        if token.logprob is None:
            found.append(None)
            continue
        ranked = [(*one, rank) for rank, one in enumerate(token.top[:num_top], 1)]
        own = (token.token_id, token.text, token.logprob, token.rank)
        found.append(
            {
                str(token_id): {"logprob": finite(value), "rank": rank, "decoded_token": text}
                for token_id, text, value, rank in (own, *ranked)
            }
        )
    return found

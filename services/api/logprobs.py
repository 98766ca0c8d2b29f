"""Log probabilities in the shapes of the two OpenAI endpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from decant.protocol.messages import TokenLogprob

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

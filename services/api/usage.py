"""Token accounts in the shapes of the APIs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from decant.protocol.messages import Closed


@dataclass
class Usage:
    """Counts of one HTTP request; n > 1 counts its prompt once."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, truly skipped
    num_drafted: int = 0
    num_accepted: int = 0
    num_steps: int = 0

    def openai(self) -> dict[str, Any]:
        """OpenAI's fields and DeepSeek's; hit + miss = prompt_tokens.

        accepted_prediction_tokens is about predictions of the client, hence 0; the draft model's
        figures stand in the extension ``speculation``."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning_tokens,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
            "prompt_cache_hit_tokens": self.cached_tokens,
            "prompt_cache_miss_tokens": self.prompt_tokens - self.cached_tokens,
        }
        if self.num_drafted:
            usage["speculation"] = {
                "drafted_tokens": self.num_drafted,
                "accepted_tokens": self.num_accepted,
                "steps": self.num_steps,
            }
        return usage

    def responses(self) -> dict[str, Any]:
        """OpenAI's Responses API."""
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    def anthropic(self) -> dict[str, Any]:
        """Anthropic's Messages API: input_tokens excludes what came from the cache."""
        return {
            "input_tokens": self.prompt_tokens - self.cached_tokens,
            "cache_read_input_tokens": self.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": self.completion_tokens,
        }


def account(closed: Iterable[Closed | None], deliveries_ms: Iterable[float] = ()) -> dict[str, Any]:
    """The extension ``decant`` of a final usage chunk: where the time went, in ms by stage (of
    several prompts the longest), the drafts, and the median of ``deliveries_ms`` (the end of a
    decode step to the write of its tokens, by token batch). Empty while no accounts are there.
    """
    stages: dict[str, float] = {}
    sums = {"num_drafted": 0, "num_accepted": 0, "num_steps": 0, "num_resumes": 0}
    found = [c for c in closed if c is not None]
    for one in found:
        for name, took_ms in one.stages_ms.items():
            stages[name] = max(took_ms, stages.get(name, 0.0))
        for name in sums:
            sums[name] += getattr(one, name)
    facts: dict[str, Any] = {"stages_ms": stages, **sums}
    if times := list(deliveries_ms):
        facts["delivery_ms"] = round(statistics.median(times), 3)
    return {"decant": facts} if found else {}

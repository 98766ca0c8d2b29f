"""POST /tokenize and /detokenize, as vLLM and SGLang have them, behind the API key."""

from __future__ import annotations

import json
from typing import Any

from decant.protocol.messages import Output
from decant.services.api import chat, models
from decant.services.api.generation import Backend
from decant.services.api.validate import Fields
from decant.services.requests import new_request_id

MAX_IDS = 1 << 20


async def tokenize(data: Any, backend: Backend) -> dict[str, Any]:
    """Ids of a text (``prompt``) or of a conversation (``messages`` and its options)."""
    fields = Fields(data)
    if fields.has("model"):
        models.check(fields, backend.model)
    if fields.has("prompt") == fields.has("messages"):
        raise fields.fail("prompt", "or messages must be given, and not both.")
    if fields.has("messages"):
        names = (
            "messages", "tools", "tool_choice", "thinking", "reasoning_effort",
            "chat_template_kwargs", "reasoning", "task", "continue_final_message",
            "response_format", "enable_thinking",
        )  # fmt: skip
        body = {name: data[name] for name in names if name in data}
        job = chat.parse({**body, "model": backend.model.name}, backend).job
        kind, prompt = job.kind, job.prompt
    else:
        kind = "document" if fields.boolean("add_special_tokens") else "text"
        prompt = json.dumps(fields.string("prompt"), ensure_ascii=False).encode()
    shows_pieces = fields.boolean("return_token_strs")
    fields.boolean("add_special_tokens")
    found = await backend.client.encode(new_request_id(), kind, prompt, Output(), count_only=True)
    ids = found.ids.tolist()
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": backend.model.max_context,
        "tokens": ids,
        "token_strs": None,
    }
    if shows_pieces:
        answer["token_strs"] = (await backend.client.detokenize(ids)).pieces if ids else []
    return answer


async def detokenize(data: Any, backend: Backend) -> dict[str, Any]:
    fields = Fields(data)
    if fields.has("model"):
        models.check(fields, backend.model)
    if not fields.has("tokens"):
        raise fields.fail("tokens", "is missing.")
    ids = fields.token_ids("tokens", MAX_IDS, backend.model.vocab_size)
    text = (await backend.client.detokenize(ids)).text if ids else ""
    return {"prompt": text, "text": text}

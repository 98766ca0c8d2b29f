"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from decant.services.api.errors import model_not_found
from decant.services.api.validate import Fields
from decant.services.model_folder import ModelFolder


def describe(model: ModelFolder) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "decant",
        "max_model_len": model.max_context,
        # Anthropic's names of the same facts.
        "type": "model",
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
    }


def listing(model: ModelFolder) -> dict[str, Any]:
    ends = {"first_id": model.name, "last_id": model.name, "has_more": False}
    return {"object": "list", "data": [describe(model)], **ends}


def one(model: ModelFolder, name: str) -> dict[str, Any]:
    """Raises: ApiError 404."""
    if name != model.name:
        raise model_not_found(name)
    return describe(model)


def check(fields: Fields, model: ModelFolder) -> str:
    """The ``model`` field of a POST body. Raises: ApiError 404, InvalidRequest."""
    name = fields.string("model", longest=1024)
    if not name:
        raise fields.fail("model", "is missing.")
    if name != model.name:
        raise model_not_found(name)
    return name

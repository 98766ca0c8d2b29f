"""openapi.json says what the gateway serves: routes and fields, and so does docs/api.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp

from decant.services import gateway
from decant.services.api import chat, completions, messages, responses

API = json.loads(gateway.OPENAPI.read_text())
SCHEMAS = API["components"]["schemas"]


def test_every_reference_exists() -> None:
    text = json.dumps(API)
    for part in text.split('"#/components/schemas/')[1:]:
        assert part.partition('"')[0] in SCHEMAS


def test_fields_are_those_that_the_code_knows() -> None:
    for name, known in (
        ("ChatRequest", chat.KNOWN),
        ("CompletionRequest", completions.KNOWN),
        ("ResponseRequest", responses.KNOWN),
        ("MessagesRequest", messages.KNOWN),
    ):
        assert set(SCHEMAS[name]["properties"]) <= set(known), name
    # The other way round: what is not ignored stands in the file.
    unlisted = {"enable_thinking", "audio"}
    assert set(chat.KNOWN) - set(chat.IGNORED) - unlisted <= set(
        SCHEMAS["ChatRequest"]["properties"]
    )


def test_operation_ids_are_unique() -> None:
    found = [o["operationId"] for p in API["paths"].values() for o in p.values()]
    assert len(found) == len(set(found))


async def test_routes_exist(stage: Any) -> None:
    async with aiohttp.ClientSession() as http:
        async with http.get(stage.base + "/openapi.json") as response:
            page = await response.json()
            assert response.status == 200 and page["paths"] == API["paths"]
            assert page["components"]["schemas"]["ModelName"] == {"enum": ["test-model"]}
        for path, operations in API["paths"].items():
            for method in operations:
                url = stage.base + path.replace("{name}", "test-model")
                async with http.request(method, url, json={}) as response:
                    assert response.status in (200, 400), (method, path)
                    assert str(response.status) in operations[method]["responses"]


def test_the_field_table_is_complete() -> None:
    """docs/api.md has a row for every field of every request."""
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    for known in (chat.KNOWN, completions.KNOWN, responses.KNOWN, messages.KNOWN):
        missing = [name for name in known if f"`{name}`" not in page]
        assert not missing

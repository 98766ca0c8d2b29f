"""docs/configuration.md says what the code says."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

from decant.protocol.config import Config
from decant.services import config_reference

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == config_reference.render(), (
        "run: python -P -m decant.services.config_reference > docs/configuration.md"
    )


def test_every_setting_is_there() -> None:
    page = config_reference.render()
    for name, kind in typing.get_type_hints(Config).items():
        if dataclasses.is_dataclass(kind):
            for field in dataclasses.fields(kind):
                assert f"`{name}.{field.name}`" in page
        else:
            assert f"| `{name}` |" in page


def test_comments_over_several_lines() -> None:
    notes = config_reference.comments(type(Config().model))
    assert "FP8" in notes["quantise_activations"]
    assert notes["path"]


def test_every_setting_has_a_meaning() -> None:
    for line in config_reference.render().splitlines():
        if line.startswith("| `"):
            assert not line.endswith("|  |"), line

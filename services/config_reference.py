"""docs/configuration.md from the dataclasses of protocol/config.py and the comments beside them.

    python -P -m decant.services.config_reference > docs/configuration.md

A test compares the file with what this prints.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import tokenize
import typing
from typing import Any

from decant.protocol.config import Config

INTRO = """\
# Configuration

Made from `protocol/config.py` by `python -P -m decant.services.config_reference`; do not edit.

A profile is a TOML file (`supervisord/*.toml`, or your own) that names only what differs from these
defaults. `--set table.name=value` and the environment variable `DECANT_SET` (pairs separated by
spaces) change single settings; unknown names and wrong types are refused at start. The resolved
file is `config.toml` in the run directory.
"""


def comments(cls: type) -> dict[str, str]:
    """Field name -> the comment beside it, or in the lines of its default."""
    source = inspect.getsource(cls)
    by_line: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            by_line[token.start[0]] = token.string.lstrip("# ").strip()
    found = {}
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            lines = range(field.lineno, (field.end_lineno or field.lineno) + 1)
            found[field.target.id] = " ".join(by_line[i] for i in lines if i in by_line)
    return found


def _kind(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return '`""`' if value == "" else f"`{value}`"


def table(cls: type, prefix: str) -> list[str]:
    """A Markdown table of the plain fields of one dataclass."""
    kinds, notes = typing.get_type_hints(cls), comments(cls)
    rows = ["| Setting | Type | Default | Meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(kinds[field.name]):
            continue
        note = notes[field.name].replace("|", "\\|")
        rows.append(
            f"| `{prefix}{field.name}` | {_kind(kinds[field.name])} | {_default(field)} | {note} |"
        )
    return rows


def render() -> str:
    """The whole page."""
    kinds = typing.get_type_hints(Config)
    parts = [INTRO, "## The set", "", *table(Config, "")]
    for field in dataclasses.fields(Config):
        kind = kinds[field.name]
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            parts += ["", f"## [{field.name}]", "", *table(kind, f"{field.name}.")]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(render(), end="")

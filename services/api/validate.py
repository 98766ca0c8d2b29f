"""Typed, ranged access to the fields of a JSON body. Everything is checked before work starts.

JSON null means absent for every optional field. Errors name the field as OpenAI does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from typing import Any

from decant.protocol.errors import InvalidRequest

MAX_DEPTH = 64  # of a body's nesting; JSON schemas have a smaller limit of their own
INT64 = 1 << 63


def parse_json(data: bytes) -> Any:
    """Raises: InvalidRequest for what is not UTF-8, not JSON, or nested too deeply."""
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_refuse)
    except UnicodeDecodeError as error:
        raise InvalidRequest("The body is not valid UTF-8.") from error
    except RecursionError as error:
        raise InvalidRequest("The body is nested too deeply.") from error
    except ValueError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}") from error
    if b"\\u" in data:
        _check_text(value)
    return value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _check_text(value: Any) -> None:
    """Lone surrogates (``"\\ud800"``) are legal JSON and no text."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError) as error:
        raise InvalidRequest("The body contains an unpaired surrogate.") from error


class Fields:
    """One JSON object. ``path`` is the prefix of parameter names in errors."""

    def __init__(self, data: Any, path: str = "") -> None:
        if not isinstance(data, dict):
            what = path.rstrip(".") or "The body"
            raise InvalidRequest(f"{what} must be a JSON object.", path.rstrip(".") or None)
        self.data: dict[str, Any] = data
        self.path = path

    def name(self, field: str) -> str:
        return self.path + field

    def fail(self, field: str, message: str) -> InvalidRequest:
        return InvalidRequest(f"{self.name(field)} {message}", self.name(field))

    def has(self, field: str) -> bool:
        return self.data.get(field) is not None

    def get(self, field: str) -> Any:
        return self.data.get(field)

    def integer(self, field: str, default: int, low: int = -INT64, high: int = INT64 - 1) -> int:
        value = self.data.get(field)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():  # 16.0 is an integer in JSON
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(field, f"must be an integer, not {_kind(value)}.")
        if not low <= value <= high:
            raise self.fail(field, f"is {value!s:.40}, it must be {_range(low, high)}.")
        return value

    def number(
        self,
        field: str,
        default: float,
        low: float = -math.inf,
        high: float = math.inf,
        is_open: bool = False,
    ) -> float:
        """is_open: ``low`` itself is not allowed."""
        value = self.data.get(field)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(field, f"must be a number, not {_kind(value)}.")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or not low <= number <= high or (is_open and number == low):
            below = f"more than {low:g} and " if is_open else ""
            shown = f"{below}{_range(low if not is_open else -math.inf, high)}"
            raise self.fail(field, f"is {value!s:.40}, it must be {shown}.")
        return number

    def boolean(self, field: str, default: bool = False) -> bool:
        value = self.data.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(field, f"must be true or false, not {_kind(value)}.")
        return value

    def string(self, field: str, default: str = "", longest: int = 1 << 30) -> str:
        value = self.data.get(field)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.fail(field, f"must be a string, not {_kind(value)}.")
        if len(value) > longest:
            raise self.fail(field, f"has {len(value)} characters, at most {longest} are allowed.")
        return value

    def option(self, field: str, default: str, options: Collection[str]) -> str:
        value = self.string(field, default)
        if value not in options and self.has(field):
            raise self.fail(field, f"is {value!r:.60}, it must be one of {', '.join(options)}.")
        return value

    def array(self, field: str, longest: int, shortest: int = 0) -> list[Any]:
        value = self.data.get(field)
        if value is None:
            value = []
        if not isinstance(value, list):
            raise self.fail(field, f"must be an array, not {_kind(value)}.")
        if not shortest <= len(value) <= longest:
            raise self.fail(
                field, f"has {len(value)} items, it must have {_range(shortest, longest)}."
            )
        return value

    def object(self, field: str) -> Fields | None:
        value = self.data.get(field)
        return None if value is None else Fields(value, f"{self.name(field)}.")

    def strings(self, field: str, most: int, longest: int) -> list[str]:
        """A string or an array of strings, each 1 to ``longest`` characters."""
        value = self.data.get(field)
        if value is None:
            return []
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
            raise self.fail(field, "must be a string or an array of strings.")
        if len(values) > most:
            raise self.fail(field, f"has {len(values)} items, at most {most} are allowed.")
        for item in values:
            if not 1 <= len(item) <= longest:
                raise self.fail(field, f"holds a string that is empty or longer than {longest}.")
        return values

    def token_ids(self, field: str, most: int, vocab_size: int) -> list[int]:
        values = self.array(field, most)
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int):
                raise self.fail(field, "must hold token ids (integers).")
            if not 0 <= value < vocab_size:
                raise self.fail(field, f"holds {value}, token ids are 0 to {vocab_size - 1}.")
        return values


def depth(value: Any, limit: int) -> int:
    """Nesting of a JSON value, counted up to ``limit`` + 1."""
    deepest, stack = 0, [(value, 1)]
    while stack:
        item, level = stack.pop()
        deepest = max(deepest, level)
        if level > limit:
            return level
        if isinstance(item, dict):
            stack += [(v, level + 1) for v in item.values()]
        elif isinstance(item, list):
            stack += [(v, level + 1) for v in item]
    return deepest


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number")


def _range(low: float, high: float) -> str:
    if math.isinf(high) or high >= INT64 - 1:
        return f"at least {low:g}" if low > -INT64 else "a 64-bit integer"
    return f"at most {high:g}" if low <= -INT64 else f"{low:g} to {high:g}"

"""The salt of the prefix cache: what a request names, so that no two tenants meet."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decant.services.api.chat import read_salt
from decant.services.api.validate import Fields

NAMES = ("user_id", "cache_salt", "prompt_cache_key")
TEXT = st.one_of(st.text(max_size=6), st.text(alphabet='ab\x1f",/\\', max_size=6))


def salt_of(values: tuple[str, str, str]) -> str:
    return read_salt(Fields(dict(zip(NAMES, values, strict=True))))


@given(st.tuples(TEXT, TEXT, TEXT), st.tuples(TEXT, TEXT, TEXT))
def test_two_namings_give_two_salts(one: tuple[str, str, str], two: tuple[str, str, str]) -> None:
    assert (salt_of(one) == salt_of(two)) == (one == two)


def test_separators_in_a_name_are_part_of_it() -> None:
    assert salt_of(("a\x1fb", "", "")) != salt_of(("a", "b\x1f", ""))
    assert salt_of(("\ud800", "", "")).encode() != salt_of(("\ud801", "", "")).encode()
    assert salt_of(("", "", "")) == read_salt(Fields({})) == ""

"""Stop strings: exact hold-back, and a match that does not depend on how the text arrives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decant.services.chat.stops import StopMatcher


def oracle(text: str, stops: list[str]) -> tuple[str, str]:
    """Shown text and match, by brute force."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, ""


def test_holds_back_exactly_the_longest_proper_prefix() -> None:
    matcher = StopMatcher(["</think>", "END"])
    assert matcher.push("a < b </thin") == "a < b "
    assert matcher.push("gs EN") == "</things "
    assert matcher.flush() == "EN"


def test_the_match_that_ends_first_wins() -> None:
    matcher = StopMatcher(["abc", "b"])
    assert matcher.push("xab") == "xa"
    assert matcher.matched == "b"
    assert matcher.push("more") == "" and matcher.flush() == ""


def test_included_stop_string_stays() -> None:
    matcher = StopMatcher(["\n\n"], is_included=True)
    assert matcher.push("a\n") + matcher.push("\nb") == "a\n\n"


texts = st.text(alphabet="ab<", max_size=24)


@given(texts, st.lists(st.text(alphabet="ab<", min_size=1, max_size=5), max_size=4), st.data())
def test_every_split_gives_the_brute_force_answer(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    matcher, shown = StopMatcher(stops), ""
    rest = text
    while rest:
        n = data.draw(st.integers(1, len(rest)))
        shown, rest = shown + matcher.push(rest[:n]), rest[n:]
        expected, match = oracle(text[: len(text) - len(rest)], stops)
        held = (
            0
            if match
            else max(
                (k for s in stops for k in range(len(s)) if expected.endswith(s[:k])), default=0
            )
        )
        assert shown == expected[: len(expected) - held]
    shown += matcher.flush()
    assert (shown, matcher.matched) == oracle(text, stops)

"""The hand-off's two state machines: what they accept, refuse, owe and never owe twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decant.engine.handoff import Intake, Offer, OfferState
from decant.protocol.errors import HandoffError
from decant.protocol.messages import KVReady

KEY = ("r", 1, 0)


@given(st.integers(1, 700), st.integers(1, 300))
def test_what_is_offered_is_taken(num_tokens: int, chunk: int) -> None:
    """Any length in any chunks: every page exactly once, the slot at the end, one release."""
    num_pages = -(-num_tokens // 128)
    offer = Offer(KEY, 9, 128, num_tokens)
    intake = Intake(KEY, "p", range(100, 100 + num_pages), 5, num_tokens, 128)
    pulls, processed = [], 0
    while processed < num_tokens:
        processed = min(num_tokens, processed + chunk)
        pages = offer.due(processed)
        if pages:
            message = offer.publish(list(pages), [0] * len(pages), processed, 3, 4)
            pull = intake.ready("p", message)
            while pull:
                pulls.append(pull)
                pull = intake.pulled(pull)
    assert [p for pull in pulls for p in pull.source] == list(range(num_pages))
    assert [p for pull in pulls for p in pull.target] == list(range(100, 100 + num_pages))
    assert sum(n for pull in pulls for n in pull.num_tokens) == num_tokens
    assert [pull.is_last for pull in pulls] == [False] * (len(pulls) - 1) + [True]
    assert (pulls[-1].source_slot, pulls[-1].target_slot) == (3, 5)
    assert intake.is_complete and offer.state is OfferState.COMPLETE
    release = intake.close()
    assert release and release.is_ok
    assert intake.close() is None


def ready(**changes: object) -> KVReady:
    values = {"first_page": 0, "pages": [7], "checksums": [1], "num_tokens": 128, **changes}
    return KVReady(*KEY, epoch=1, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad",
    [
        {"first_page": 1},
        {"pages": [7, 8], "checksums": [1, 1]},
        {"pages": []},
        {"checksums": []},
        {"num_tokens": 1000},
        {"num_tokens": 100},
        {"is_last": True, "slot": 2},  # 128 of 300 tokens
        {"num_tokens": 300, "is_last": True, "slot": 2},  # one page of three
        {"num_tokens": 300, "pages": [1, 2, 3], "checksums": [1] * 3, "is_last": True},  # no slot
    ],
    ids=repr,
)
def test_what_does_not_continue_is_refused_and_released(bad: dict[str, object]) -> None:
    intake = Intake(KEY, "p", range(3), 0, 300, 128)
    with pytest.raises(HandoffError):
        intake.ready("p", ready(**bad))
    release = intake.close()
    assert release and not release.is_ok


def test_another_peer_is_refused() -> None:
    intake = Intake(KEY, "p", range(3), 0, 300, 128)
    with pytest.raises(HandoffError):
        intake.ready("q", ready())


def test_the_release_waits_for_the_pull_under_way() -> None:
    intake = Intake(KEY, "", range(3), 0, 300, 128)
    pull = intake.ready("p", ready())
    assert pull and intake.peer == "p"
    assert intake.ready("p", ready(first_page=1, num_tokens=256)) is None  # one at a time
    assert intake.close() is None
    assert intake.pulled(pull) is None  # the second is not started any more
    release = intake.close()
    assert release and not release.is_ok and intake.close() is None


def test_nothing_is_owed_before_the_first_publication() -> None:
    assert Intake(KEY, "p", range(3), 0, 300, 128).close() is None
    offer = Offer(KEY, 1, 128, 300)
    assert offer.withdraw("x") is None
    assert offer.state is OfferState.CLOSED


def test_a_withdrawal_is_told_once() -> None:
    offer = Offer(KEY, 1, 128, 300)
    offer.publish([4], [0], 128)
    gone = offer.withdraw("x")
    assert gone and gone.reason == "x"
    assert offer.withdraw("x") is None
    assert offer.state is OfferState.WITHDRAWN
    offer.close()
    assert offer.withdraw("x") is None


NUMBERS = st.integers(-2, 5)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.builds(
            KVReady,
            st.just("r"),
            st.just(1),
            st.just(0),
            st.just(1),
            NUMBERS,
            st.lists(NUMBERS, max_size=4),
            st.lists(NUMBERS, max_size=4),
            st.sampled_from([-1, 0, 100, 128, 256, 300, 301]),
            st.booleans(),
            st.sampled_from([-1, 0, 2]),
        ),
        max_size=6,
    )
)
def test_any_messages_write_inside_the_lane_only(messages: list[KVReady]) -> None:
    """Whatever arrives, a pull has distinct targets of the lane, live counts in range."""
    intake = Intake(KEY, "p", [10, 11, 12], 5, 300, 128)
    targets: list[int] = []
    for message in messages:
        try:
            pull = intake.ready("p", message)
        except HandoffError:
            break
        while pull:
            assert len(pull.source) == len(pull.target) == len(pull.num_tokens)
            assert all(0 < n <= 128 for n in pull.num_tokens)
            targets += pull.target
            pull = intake.pulled(pull)
    assert len(set(targets)) == len(targets)
    assert set(targets) <= {10, 11, 12}
    assert not intake.is_complete or sorted(targets) == [10, 11, 12]

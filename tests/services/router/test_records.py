"""One request's state machine: single rules. Whole histories are in test_explore.py."""

from __future__ import annotations

import pytest

from decant.protocol import messages as m
from decant.protocol.wire import pack_ids, unpack_ids
from decant.services import records
from decant.services.decisions import (
    Count,
    Decision,
    Enqueue,
    Proved,
    Ref,
    ToGateway,
    ToWorker,
)
from decant.services.records import Record

D, P = Ref("decode-0", "d1"), Ref("prefill-0", "p1")
D2, P2 = Ref("decode-0", "d2"), Ref("prefill-0", "p2")


def make(
    num_choices: int = 1,
    attempt: int = 1,
    emitted: list[m.ChoiceState] | None = None,
    ids: bytes = b"",
    gateway: str = "g1",
    deadline_ms: int = 0,
) -> Record:
    generate = m.Generate(
        "r",
        attempt,
        3,
        m.Sampling(max_tokens=9),
        "tokenizer-0",
        num_choices,
        deadline_ms,
        emitted=emitted or [],
    )
    return Record(generate, pack_ids([1, 2, 3]), ids, gateway, 100.0)


def bodies(decisions: list[Decision]) -> list[m.Message]:
    return [d.body for d in decisions if isinstance(d, ToGateway | ToWorker)]


def decoding(record: Record, now: float = 100.0, decode: Ref = D, prefill: Ref = P) -> None:
    """Bring all lanes to DECODING."""
    for lane in list(record.lanes):
        record.place(lane, decode, prefill, now)
        named = record.request_id, record.attempt, lane
        record.heard(decode, m.Reserved(*named), now)
        record.heard(prefill, m.Prefilled(*named, 2), now)
        record.heard(decode, m.Decoding(*named), now)


def test_the_straight_path() -> None:
    record = make()
    out = record.start(100.0)
    assert bodies(out) == [m.Queued("r", 1)]
    assert [d for d in out if isinstance(d, Enqueue)] == [Enqueue(0, 100.0, False)]
    (order,) = record.place(0, D, P, 101.0)
    assert isinstance(order, ToWorker) and order.worker == D
    assert isinstance(order.body, m.Reserve) and order.body.choices == [0]
    assert list(unpack_ids(order.blobs[0])) == [1, 2, 3]
    (order,) = record.heard(D, m.Reserved("r", 1, 0), 101.5)
    assert isinstance(order, ToWorker) and order.worker == P
    assert isinstance(order.body, m.Prefill) and order.body.decode_incarnation == "d1"
    assert record.heard(P, m.Prefilled("r", 1, 0, 2), 102.0) == []
    assert record.stage.name == "HANDOFF"
    assert record.heard(D, m.Decoding("r", 1, 0), 102.5) == [Proved(D, P)]
    record.heard(D, m.Finished("r", 1, 0, "stop", 5, 8, 6, 3), 104.0)
    assert record.stage.name == "DONE"
    out = record.cancel("finished", 104.5)
    assert {d.worker for d in out if isinstance(d, ToWorker)} == {D, P}
    (closed,) = [b for b in bodies(out) if isinstance(b, m.Closed)]
    assert closed == m.Closed(
        "r", 1, 2, 8, 6, 3, 0,
        {"queue": 1000.0, "reserve": 500.0, "prefill": 500.0, "handoff": 500.0, "decode": 1500.0},
    )  # fmt: skip
    assert record.state.name == "CANCELLING"
    record.heard(D, m.Cancelled("r", 1), 105.0)
    record.heard(P, m.Cancelled("r", 1), 105.0)
    assert record.state.name == "CLOSED"


def test_a_loss_asks_the_gateway_and_resumes_from_its_ids() -> None:
    record = make(num_choices=3)
    record.start(100.0)
    decoding(record)
    out = record.worker_died(D, False, 103.0)
    assert Count("resumes", ("decode_died", "decoding")) in out
    assert m.AskEmitted("r", 2, "tokenizer-0") in bodies(out)
    assert ToWorker(P, m.Cancel("r", 1, "superseded")) in out
    assert record.debtors() == [P]  # the dead one owes nothing
    states = [m.ChoiceState(0, 2), m.ChoiceState(1, 1, True), m.ChoiceState(2, 0)]
    out = record.emitted(m.Emitted("r", 2, states, "tokenizer-1"), pack_ids([7, 8, 9]), 104.0)
    assert out == [Enqueue(0, 104.0, True), Enqueue(2, 104.0, True)]  # choice 1 is finished
    (order,) = record.place(0, D2, P, 105.0)
    assert isinstance(order, ToWorker) and isinstance(order.body, m.Reserve)
    assert list(unpack_ids(order.blobs[0])) == [1, 2, 3, 7, 8]
    assert order.body.num_prompt_tokens == 3 and order.body.sampling.max_tokens == 9
    assert order.body.tokenizer == "tokenizer-1" and order.body.attempt == 2


def test_an_answer_to_an_older_question_is_dropped() -> None:
    record = make()
    record.start(100.0)
    decoding(record)
    record.worker_died(D, False, 101.0)
    record.emitted(m.Emitted("r", 2, [m.ChoiceState(0, 0)]), b"", 101.0)
    decoding(record, decode=D2)
    record.worker_died(D2, False, 102.0)
    assert record.attempt == 3
    stale = record.emitted(m.Emitted("r", 2, [m.ChoiceState(0, 1)]), pack_ids([5]), 102.0)
    assert stale == [Count("stale", ("emitted",))] and record.state.name == "RESUMING"


def test_a_resume_without_ids_is_one_lane_again() -> None:
    record = make(num_choices=3)
    record.start(100.0)
    decoding(record)
    record.worker_died(D, False, 103.0)
    states = [m.ChoiceState(i, 0) for i in range(3)]
    out = record.emitted(m.Emitted("r", 2, states), b"", 104.0)
    assert out == [Enqueue(0, 104.0, True)] and record.lanes[0].choices == [0, 1, 2]


def test_cancel_is_repeated_until_answered_or_death() -> None:
    record = make()
    record.start(100.0)
    decoding(record)
    record.cancel("client_gone", 101.0)
    assert record.tick(101.3) == []
    assert {d.worker for d in record.tick(101.6) if isinstance(d, ToWorker)} == {D, P}
    record.heard(P, m.Cancelled("r", 1), 101.7)
    assert [d.worker for d in record.tick(102.3) if isinstance(d, ToWorker)] == [D]
    record.worker_died(D, False, 102.5)
    assert record.state.name == "CLOSED" and record.tick(110.0) == []


def test_a_late_answer_does_not_release_the_new_attempt() -> None:
    record = make()
    record.start(100.0)
    decoding(record)
    record.lose("reserve_timeout", 101.0)
    record.emitted(m.Emitted("r", 2, [m.ChoiceState(0, 0)]), b"", 101.0)
    record.place(0, D, P, 101.0)
    record.heard(D, m.Cancelled("r", 1), 101.1)  # answers the Cancel of attempt 1
    assert D in record.debtors()
    out = record.cancel("client_gone", 101.2)
    assert ToWorker(D, m.Cancel("r", 2, "client_gone")) in out
    record.heard(D, m.Cancelled("r", 1), 101.3)  # a copy
    assert record.state.name == "CANCELLING"


def test_words_of_older_attempts_and_strangers_count_as_stale() -> None:
    record = make(attempt=2)
    record.start(100.0)
    decoding(record)
    assert record.heard(D, m.Decoding("r", 1, 0), 101.0) == [Count("stale", ("decoding",))]
    out = record.heard(D2, m.Reserved("r", 1, 0), 101.0)  # we do not know why it holds that
    assert ToWorker(D2, m.Cancel("r", 1, "superseded")) in out
    assert record.heard(D2, m.Finished("r", 2, 0, "stop", 1), 101.0)[0] == Count(
        "stale", ("finished",)
    )
    assert record.stage.name == "DECODING"


def test_busy_backs_off_and_too_large_fails() -> None:
    record = make()
    record.start(100.0)
    waits = []
    for _ in range(9):
        record.place(0, D, P, 100.0)
        out = record.heard(D, m.Refused("r", 1, 0, "busy"), 100.0)
        waits += [d.not_before_s - 100.0 for d in out if isinstance(d, Enqueue)]
    assert waits == sorted(waits) and waits[0] == pytest.approx(0.02) and waits[-1] == 1.0
    record.place(0, D, P, 100.0)
    out = record.heard(D, m.Refused("r", 1, 0, "too_large", "9 pages of 4"), 100.0)
    (failed,) = [b for b in bodies(out) if isinstance(b, m.Failed)]
    assert (failed.code, failed.status) == ("context_length_exceeded", 400)
    assert failed.message == "9 pages of 4" and not failed.is_retryable


def test_preempted_comes_back_later_and_is_no_resume_of_the_budget() -> None:
    record = make()
    record.start(100.0)
    for n in range(1, 30):
        decoding(record)
        out = record.heard(D, m.Preempted("r", record.attempt), 100.0)
        assert Count("preempted") in out
        answer = m.Emitted("r", record.attempt, [m.ChoiceState(0, n)])
        (waiting,) = record.emitted(answer, pack_ids(range(n)), 100.0)
        assert isinstance(waiting, Enqueue) and waiting.not_before_s > 100.0
    assert record.num_resumes == 0 and record.failed is None


def test_too_many_resumes_fail() -> None:
    record = make()
    record.start(100.0)
    for _ in range(16):
        decoding(record)
        record.worker_died(D, False, 100.0)
        assert record.failed is None
        record.emitted(m.Emitted("r", record.attempt, [m.ChoiceState(0, 0)]), b"", 100.0)
    decoding(record)
    record.worker_died(D, False, 100.0)
    assert record.failed is not None and record.failed.code == "too_many_resumes"


def test_resumes_with_progress_may_be_many() -> None:
    """A long stream outlives any number of deaths, as long as tokens come in between."""
    record = make()
    record.start(100.0)
    for number in range(40):
        decoding(record)
        record.worker_died(D, False, 100.0)
        assert record.failed is None, number
        ids = pack_ids(range(number // 2))
        answer = m.Emitted("r", record.attempt, [m.ChoiceState(0, number // 2)])
        record.emitted(answer, ids, 100.0)
    assert record.num_resumes == 40


@pytest.mark.parametrize("step", ["queued", "reserving", "prefilling", "decoding", "resuming"])
def test_the_deadline_holds_in_every_state(step: str) -> None:
    record = make(deadline_ms=130_000)
    record.start(100.0)
    if step != "queued":
        record.place(0, D, P, 100.0)
    if step in ("prefilling", "decoding"):
        record.heard(D, m.Reserved("r", 1, 0), 129.0)
    if step == "decoding":
        record.heard(D, m.Decoding("r", 1, 0), 129.0)
    if step == "reserving":
        record.lanes[0].since_s = 129.0
    if step == "resuming":
        record.worker_died(D, False, 129.0)
    assert record.stage.name.lower() == step
    record.tick(129.9)
    assert record.failed is None
    record.tick(130.1)
    assert record.failed is not None and record.failed.status == 504
    assert step in record.failed.message


def test_the_queue_has_a_limit_of_its_own() -> None:
    record = make()
    record.start(100.0)
    record.tick(159.0)
    assert record.failed is None
    record.tick(161.0)
    assert record.failed is not None and record.failed.status == 429
    assert record.failed.retry_after_s > 0 and record.state.name == "CLOSED"


def test_no_state_lasts_for_ever_without_an_answer() -> None:
    record = make()
    record.start(100.0)
    record.place(0, D, P, 100.0)
    record.tick(100.0 + records.RESERVE_S + 1)
    assert record.state.name == "RESUMING" and record.attempt == 2
    asked = [b for b in bodies(record.tick(112.5)) if isinstance(b, m.AskEmitted)]
    assert len(asked) == 1
    record.tick(112.0 + records.ASK_FOR_S)
    assert record.state.name == "CANCELLING"
    record = make()
    record.start(100.0)
    record.place(0, D, P, 100.0)
    record.heard(D, m.Reserved("r", 1, 0), 100.0)
    record.tick(100.0 + records.PREFILL_S + 2)
    assert record.state.name == "RESUMING"
    record = make()
    record.start(100.0)
    record.place(0, D, P, 100.0)
    record.heard(D, m.Reserved("r", 1, 0), 100.0)
    record.heard(P, m.Prefilled("r", 1, 0), 110.0)
    record.tick(110.0 + records.HANDOFF_S - 1)
    assert record.stage.name == "HANDOFF"
    record.tick(110.0 + records.HANDOFF_S + 1)
    assert record.state.name == "RESUMING"


def test_decode_is_done_but_the_gateway_never_says_so() -> None:
    record = make()
    record.start(100.0)
    decoding(record)
    record.heard(D, m.Finished("r", 1, 0, "stop", 5), 101.0)
    record.tick(101.0 + records.DONE_S - 1)
    assert record.stage.name == "DONE"
    record.tick(101.0 + records.DONE_S + 1)
    assert record.state.name == "RESUMING"


def test_a_worker_that_names_a_code_fails_the_request() -> None:
    record = make()
    record.start(100.0)
    decoding(record)
    record.heard(D, m.Lost("r", 1, 0, "grammar is dead", "grammar_error"), 101.0)
    assert record.failed is not None and record.failed.code == "grammar_error"


def test_what_prefill_cannot_do_is_the_callers_fault() -> None:
    record = make()
    record.start(100.0)
    record.place(0, D, P, 100.0)
    record.heard(D, m.Reserved("r", 1, 0), 100.0)
    record.heard(P, m.Lost("r", 1, 0, "no scores", "unsupported_parameter"), 101.0)
    assert record.failed is not None and record.failed.status == 400
    assert not record.failed.is_retryable


def test_scores_go_to_the_gateway_while_the_attempt_counts() -> None:
    record = make()
    record.start(100.0)
    record.place(0, D, P, 100.0)
    record.heard(D, m.Reserved("r", 1, 0), 100.0)
    body = m.PromptLogprobs("r", 1, 0, 1, 2)
    assert record.scored(P, body, (b"a", b"b")) == [ToGateway(body, (b"a", b"b"))]
    for worker, other in (
        (P2, body),
        (P, m.PromptLogprobs("r", 2, 0, 1, 2)),
        (P, m.PromptLogprobs("r", 1, 7, 1, 2)),
    ):
        assert record.scored(worker, other, ()) == [Count("stale", ("promptlogprobs",))]
    record.cancel("client_gone", 101.0)
    assert record.scored(P, body, ()) == [Count("stale", ("promptlogprobs",))]


def test_poison_second_death_of_its_own_making_fails_it() -> None:
    record = make()
    record.start(100.0)
    decoding(record)
    record.worker_died(D, True, 101.0)
    assert record.is_suspect and record.suspect_in == {"decode"}
    record.emitted(m.Emitted("r", 2, [m.ChoiceState(0, 0)]), b"", 101.0)
    record.place(0, D2, P, 101.0, frozenset({"decode"}))
    record.heard(D2, m.Reserved("r", 2, 0), 101.0)
    out = record.worker_died(D2, True, 101.0)
    (failed,) = [b for b in bodies(out) if isinstance(b, m.Failed)]
    assert failed.status == 500 and not failed.is_retryable and failed.code == "poison_request"


def test_outside_kills_make_no_suspect() -> None:
    record = make()
    record.start(100.0)
    decoding(record)
    record.worker_died(D, False, 101.0)
    assert not record.is_suspect
    reserved_only = make()
    reserved_only.start(100.0)
    reserved_only.place(0, D, P, 100.0)
    reserved_only.worker_died(D, True, 100.0)  # it computed nothing of ours yet
    assert not reserved_only.is_suspect


def test_a_suspect_that_survives_is_cleared_once() -> None:
    record = make()
    record.start(100.0)
    for now, is_cleared in ((101.0, True), (201.0, False)):
        decoding(record)
        record.worker_died(D, True, now)
        record.emitted(m.Emitted("r", record.attempt, [m.ChoiceState(0, 0)]), b"", now)
        record.place(0, D2, P2, now, frozenset({"decode"}))
        named = record.request_id, record.attempt, 0
        record.heard(D2, m.Reserved(*named), now)
        record.heard(D2, m.Decoding(*named), now)
        record.tick(now + 0.2)
        assert record.is_suspect
        record.tick(now + 0.6)
        assert record.is_suspect is not is_cleared
        record.lose("test", now + 1.0)
        record.emitted(m.Emitted("r", record.attempt, [m.ChoiceState(0, 0)]), b"", now + 1.0)


def test_a_resubmission_by_the_gateway_supersedes() -> None:
    record = make()
    record.start(100.0)
    decoding(record)
    same, is_news = record.resubmitted(record.generate, b"", 101.0)
    assert not is_news and bodies(same) == [m.Queued("r", 1)]
    generate = m.Generate(
        "r", 2, 3, m.Sampling(max_tokens=9), "tokenizer-1", 1, emitted=[m.ChoiceState(0, 1)]
    )
    out, is_news = record.resubmitted(generate, pack_ids([4]), 102.0)
    assert is_news and record.attempt == 2 and record.tokenizer == "tokenizer-1"
    assert ToWorker(D, m.Cancel("r", 1, "superseded")) in out
    assert record.num_tokens(0) == 4


def test_a_silent_stream_is_doubted() -> None:
    record = make()
    record.start(100.0)
    decoding(record)
    assert record.resubmitted(record.generate, b"", 105.0)[0] == [ToGateway(m.Queued("r", 1))]
    record.resubmitted(record.generate, b"", 106.0)
    assert record.stage.name == "DECODING"
    record.resubmitted(record.generate, b"", 115.0)
    assert record.state.name == "RESUMING"


def test_a_new_routers_record_cancels_what_the_old_one_left() -> None:
    record = make(attempt=4, emitted=[m.ChoiceState(0, 1)], ids=pack_ids([9]))
    out = record.inherit([D, P], 100.0)
    assert [d.body for d in out if isinstance(d, ToWorker)] == [
        m.Cancel("r", 3, "superseded"),
        m.Cancel("r", 3, "superseded"),
    ]
    record.start(100.0)
    decoding(record)
    record.heard(D, m.Finished("r", 4, 0, "stop", 5), 101.0)
    record.cancel("finished", 101.0)
    record.heard(D, m.Cancelled("r", 4), 101.0)
    assert record.state.name == "CANCELLING"  # prefill owes an answer
    record.heard(P, m.Cancelled("r", 4), 101.0)
    assert record.state.name == "CLOSED"


def test_ids_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt"):
        Record(m.Generate("r", 1, 2, m.Sampling(), "t"), pack_ids([1]), b"", "g", 0.0)
    for states, ids in (
        ([m.ChoiceState(0, 2)], pack_ids([1])),
        ([m.ChoiceState(0, 0)], pack_ids([1])),
        ([m.ChoiceState(5, 1)], pack_ids([1])),
        ([m.ChoiceState(0, -1)], b""),
        ([m.ChoiceState(0, 1), m.ChoiceState(0, 1)], pack_ids([1, 1])),
    ):
        with pytest.raises(ValueError):
            make(emitted=states, ids=ids)


def test_the_canary_is_never_resumed() -> None:
    record = make(gateway="")
    assert [type(d) for d in record.start(100.0)] == [Enqueue]
    decoding(record)
    record.worker_died(D, False, 101.0)
    assert record.failed is not None and record.failed.code == "canary_lost"
    record.heard(P, m.Cancelled("r", 1), 101.0)
    assert record.state.name == "CLOSED"


def test_the_end_of_a_choice_goes_to_the_decode_that_runs_it() -> None:
    record = make(num_choices=2)
    record.start(100.0)
    assert record.end_choice(m.EndChoice("r", 1, 0)) == []  # no decode has it yet
    decoding(record)
    body = m.EndChoice("r", 1, 0)
    assert record.end_choice(body) == [ToWorker(D, body)]
    record.heard(D, m.Finished("r", 1, 0, "stop", 5), 101.0)
    assert record.end_choice(body) == []
    assert record.end_choice(m.EndChoice("r", 1, 2)) == []
    record.worker_died(D, False, 102.0)
    assert record.end_choice(m.EndChoice("r", 1, 1)) == []  # of the attempt that was lost


def test_reserve_and_prefill_carry_the_same_salt_with_the_key_in_it() -> None:
    """Else decode would keep pages under another name, or share them between keys."""
    salts = []
    for tenant in ("a", "b"):
        generate = m.Generate("r", 1, 1, m.Sampling(), "t", tenant=tenant, cache_salt="s")
        record = Record(generate, pack_ids([1]), b"", "g1", 100.0)
        record.start(100.0)
        (reserve,) = bodies(record.place(0, D, P, 100.0))
        (prefill,) = bodies(record.heard(D, m.Reserved("r", 1, 0), 100.0))
        assert isinstance(reserve, m.Reserve) and isinstance(prefill, m.Prefill)
        assert reserve.cache_salt == prefill.cache_salt
        salts.append(reserve.cache_salt)
    assert salts[0] != salts[1] and all(s.endswith("s") for s in salts)

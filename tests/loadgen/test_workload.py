"""Plans and the files they come from."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from decant.loadgen import cli, content, drive, traces
from decant.loadgen.metrics import Slo
from decant.loadgen.plan import Request
from decant.loadgen.workload import Options, Scale, build
from decant.protocol.errors import InvalidRequest

SCALES = {kind: Scale(5.0, 7.0) for kind in content.CLASSES}


def write(path: Path, rows: list[object]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def test_same_seed_same_plan() -> None:
    options = Options(num=50, seed=3, mix={"prose": 1, "code": 1, "json": 1, "maths": 1})
    one = build(options, SCALES, [])
    assert one == build(options, SCALES, [])
    assert one != build(replace(options, seed=4), SCALES, [])
    assert {r.content for r in one} == set(content.CLASSES)
    assert [r.index for r in one] == list(range(50))


def test_prompts_have_the_length_that_was_asked() -> None:
    for request in build(Options(num=20, input_len="uniform:20:400"), SCALES, []):
        num_tokens = 7 + len(request.user) / 5
        assert 20 <= round(num_tokens) <= 400


@pytest.mark.parametrize("kind", content.CLASSES)
def test_content_is_exact_and_seeded(kind: str) -> None:
    one = content.text(kind, 321, Random(1))
    assert len(one) == 321
    assert one == content.text(kind, 321, Random(1)) != content.text(kind, 321, Random(2))


def test_slo_classes_and_cancellations_have_their_shares() -> None:
    slos = [Slo("chat", 3, ttft_ns=1), Slo("batch", 1, e2e_ns=1)]
    plan = build(Options(num=2000, cancel_share=0.1), SCALES, slos)
    assert sum(r.slo == "chat" for r in plan) == pytest.approx(1500, abs=100)
    assert sum(r.cancel_after > 0 for r in plan) == pytest.approx(200, abs=60)


def test_sessions_share_prefixes_by_group() -> None:
    options = Options(num=40, turns=4, shared_prefix=50, prefix_groups=2, think_s=0.5)
    plan = build(options, SCALES, [])
    assert len(plan) == 40
    assert len({r.system for r in plan}) == 2
    for session in range(10):
        turns = [r for r in plan if r.session == session]
        assert [r.turn for r in turns] == [0, 1, 2, 3]
        assert len({r.system for r in turns}) == 1
        assert turns[0].due_ns >= 0 and {r.due_ns for r in turns[1:]} == {-1}
        assert {r.think_ns for r in turns[1:]} == {500_000_000}


def test_workers_get_whole_sessions() -> None:
    plan = build(Options(num=40, turns=4), SCALES, [])
    hands = drive.split(plan, [1, 1, 2])
    assert sorted(r.index for hand in hands for r in hand) == list(range(40))
    owners: dict[int, set[int]] = {}
    for number, hand in enumerate(hands):
        for r in hand:
            owners.setdefault(r.session, set()).add(number)
    assert all(len(o) == 1 for o in owners.values())
    assert [len(h) for h in hands] == [12, 12, 16]  # 10 sessions, seats 1, 1, 2


MOONCAKE: list[object] = [
    {"timestamp": 27_482, "input_length": 600, "output_length": 52, "hash_ids": [1, 2]},
    {"timestamp": 27_000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 3, 4]},
]


def test_mooncake(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", MOONCAKE)
    plan = build(Options(dataset="mooncake", path=path, time_scale=0.5), {}, [])
    assert [r.due_ns for r in plan] == [0, 241_000_000]
    assert [r.max_tokens for r in plan] == [5, 52]
    assert [len(r.user) for r in plan] == [4400, 2400]
    shared = 512 * 4  # hash id 1 in both: equal text; then they part
    assert plan[0].user[:shared] == plan[1].user[:shared]
    assert plan[0].user[shared : shared + 200] != plan[1].user[shared : shared + 200]


def test_mooncake_as_ids_is_exact(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", MOONCAKE)
    plan = build(Options(dataset="mooncake", path=path, as_ids=True, vocab=1000), {}, [])
    assert [len(r.ids) for r in plan] == [1100, 600]
    assert plan[0].ids[:512] == plan[1].ids[:512]
    assert plan[0].ids[512:600] != plan[1].ids[512:600]
    assert all(250 <= i < 1000 for r in plan for i in r.ids)


def test_burstgpt_jsonl_and_csv(tmp_path: Path) -> None:
    rows: list[object] = [
        {"Timestamp": 5, "Model": "m", "Request tokens": 472, "Response tokens": 18},
        {"Timestamp": 45.5, "Model": "m", "Request tokens": 10, "Response tokens": 0},
        {"Timestamp": 118, "Model": "m", "Request tokens": 1087, "Response tokens": 230},
    ]
    path = write(tmp_path / "b.jsonl", rows)
    plan = build(Options(dataset="burstgpt", path=path), {}, [])
    assert [(r.due_ns, r.max_tokens) for r in plan] == [(0, 18), (113_000_000_000, 230)]
    csv = tmp_path / "b.csv"
    csv.write_text("Timestamp,Model,Request tokens,Response tokens\n5,m,472,18\n118,m,1087,230\n")
    assert traces.read_trace(csv, "burstgpt") == traces.read_trace(path, "burstgpt")


def test_time_scale_of_burstgpt(tmp_path: Path) -> None:
    rows: list[object] = [
        {"Timestamp": at, "Request tokens": 9, "Response tokens": 9} for at in (10, 12, 18)
    ]
    path = write(tmp_path / "b.jsonl", rows)
    plan = build(Options(dataset="burstgpt", path=path, time_scale=0.25), {}, [])
    assert [r.due_ns for r in plan] == [0, 500_000_000, 2_000_000_000]


@pytest.mark.parametrize(
    ("words", "due_ms"),
    [
        ("--arrivals constant --rate 10 --num 3", [0, 100, 200]),
        ("--arrivals burst --rate 4 --burst-size 2 --num 5", [0, 0, 500, 500, 1000]),
    ],
)
def test_the_command_s_arrivals(words: str, due_ms: list[int]) -> None:
    assert [r.due_ns // 1_000_000 for r in _plan(words)] == due_ms


def test_the_command_s_gamma_and_ramp() -> None:
    """gamma: burstiness 0.25 doubles the spread of gaps against Poisson; a ramp from 5 to 15 a
    second has a quarter of its requests in the first 0.366 of the time (L(t) of arrivals.ramp).
    """
    due = [r.due_ns for r in _plan("--arrivals gamma --burstiness 0.25 --rate 100 --num 4000")]
    gaps = [b - a for a, b in zip(due, due[1:], strict=False)]
    assert 1.7 < statistics.pstdev(gaps) / statistics.fmean(gaps) < 2.3
    due = [r.due_ns for r in _plan("--arrivals ramp --rate 5 --rate-to 15 --duration 200")]
    assert 1850 < len(due) < 2150
    early = sum(at < 73.2e9 for at in due) / len(due)
    assert 0.22 < early < 0.28


def _plan(words: str) -> list[Request]:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return build(cli._options(parser.parse_args(words.split())), SCALES, [])


def test_sharegpt(tmp_path: Path) -> None:
    talk = [("human", "hi"), ("gpt", "x" * 40), ("human", "more"), ("gpt", "y" * 8)]
    rows = [
        {"conversations": [{"from": f, "value": v} for f, v in talk]},
        {"conversations": [{"from": "gpt", "value": "speaks first"}]},
    ]
    path = tmp_path / "s.json"
    path.write_text(json.dumps(rows))
    options = Options(dataset="sharegpt", path=str(path), turns=5, num=3)
    plan = build(options, {}, [])
    assert [(r.session, r.turn, r.user, r.max_tokens) for r in plan[:2]] == [
        (0, 0, "hi", 10),
        (0, 1, "more", 2),
    ]
    assert {r.session for r in plan} == {0, 1, 2}


def test_prompts(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": "a", "max_tokens": 3, "content": "code"}])
    plan = build(Options(dataset="prompts", path=path, num=2, kind="closed"), {}, [])
    assert [(r.user, r.max_tokens, r.content, r.due_ns) for r in plan] == [("a", 3, "code", -1)] * 2


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("mooncake", '{"timestamp": 1, "input_length": 3}', "row 1: output_length is missing"),
        ("mooncake", "\n{]", "row 2: not JSON"),
        ("mooncake", "[1, 2]", "row 1: not an object"),
        ("mooncake", "", "no requests"),
        (
            "mooncake",
            '{"timestamp": 1, "input_length": -3, "output_length": 1}',
            "row 1: a length is a whole number",
        ),
        (
            "mooncake",
            '{"timestamp": 1, "input_length": 3, "output_length": 1, "hash_ids": ["a"]}',
            "hash_ids",
        ),
        ("burstgpt", '{"Timestamp": "NaN", "Request tokens": 1, "Response tokens": 1}', "finite"),
        ("sharegpt", '{"conversations": [{"value": 1}]}', "entry 1"),
        ("prompts", '{"prompt": 5}', "row 1: prompt is a string"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, text: str, says: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=says):
        build(Options(dataset=name, path=str(path), num=1), {}, [])


def test_missing_file() -> None:
    with pytest.raises(InvalidRequest, match="cannot read"):
        build(Options(dataset="mooncake", path="/nowhere/t.jsonl"), {}, [])


@pytest.mark.parametrize("spec", ["", "poetry", "prose=0", "prose=x", "prose=-1"])
def test_bad_mixes(spec: str) -> None:
    with pytest.raises(InvalidRequest):
        content.parse_mix(spec)

"""Which cases a benchmark runs."""

from decant.kernels.cases import cases


def test_cases_are_chosen_by_operation_and_argument() -> None:
    every = list(cases())
    assert {c.op for c in every if c.answers("moe")} == {"moe"}
    some = [c for c in every if c.answers("moe:mxfp4")]
    assert 0 < len(some) < len([c for c in every if c.answers("moe")])
    assert all(c.build.keywords["kind"] == "mxfp4" for c in some)
    assert [c.rows for c in every if c.answers("linear:64")] == [64, 64, 64]
    assert not [c for c in every if c.answers("linear:7")]

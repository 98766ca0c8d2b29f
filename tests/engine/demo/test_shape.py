"""The demo model's shape fits TP4, the kernels and the size limit, and a bad shape is named."""

import pytest

from decant.engine.demo import shape


def test_demo_shape_fits() -> None:
    assert shape.shape_faults(shape.CONFIG) == []
    assert shape.num_bytes(shape.CONFIG) <= shape.MAX_BYTES
    assert set(shape.CONFIG["compress_ratios"]) == {0, 4, 128}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"num_attention_heads": 6}, "num_attention_heads"),
        ({"o_groups": 2}, "output group"),
        ({"moe_intermediate_size": 256}, "shared_experts"),
        ({"o_lora_rank": 64}, "wo_a"),
        ({"head_dim": 256}, "head_dim"),
        ({"vocab_size": 2562}, "vocab_size"),
        ({"n_routed_experts": 8}, "bytes"),
        ({"compress_ratios": [0, 4, 128, 4, 0, 4, 4]}, "MTP"),
        ({"sliding_window": 64}, "sliding_window"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(changed: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        shape.check_shape({**shape.CONFIG, **changed})


def test_four_ranks_need_more_than_two() -> None:
    small = {**shape.CONFIG, "o_groups": 2, "o_lora_rank": 128}
    assert shape.shape_faults(small, 2) == []
    assert shape.shape_faults(small, 4) != []

"""The engine's calls of every kernel: under Triton's interpreter on a tiny model, and on a GPU."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from decant.engine.gpu.layout import GpuLayout
from decant.engine.gpu.measure import compare_kernels
from decant.engine.gpu.model import GpuModel
from decant.engine.gpu.ops import ALL, Ops
from decant.engine.gpu.pool import GpuPool
from decant.engine.gpu.probe import TOLERANCES, probe
from decant.engine.gpu.runner import Runner
from decant.engine.gpu.slice import make_slice
from decant.engine.interface import SlotRows
from decant.engine.model_shape import parse_shape
from decant.engine.synthetic import config_table

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU itself is tested below")
def test_every_kernel_under_the_interpreter(interpreter: None) -> None:
    shape = parse_shape(config_table(4, "tiny"))
    model = GpuModel(shape, make_slice(shape, CPU, 1), Ops.create(shape, CPU))
    assert model.ops.enabled == set(ALL)
    name = f"gpu-kernels-test-{os.getpid()}"
    seen = probe(model, GpuLayout(shape, 128, 3), CPU, name, 4, ((1, 1),))
    assert set(seen) == set(ALL)
    for operation, what in seen.items():
        assert not what.failure and what.worst <= TOLERANCES[operation], (operation, what)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU itself is tested below")
def test_a_step_of_kernels_under_the_interpreter(interpreter: None) -> None:
    """The small kernels between the large ones, which hand codes on, join products and do a layer's
    row work at once: the same bits as the large kernels with plain torch between them."""
    small = {"rows", "norm", "swiglu", "begin", "keep"}
    shape = parse_shape(config_table(4, "tiny"))
    assert {0, 4, 128} <= set(shape.compress_ratios)
    weights = make_slice(shape, CPU, 1)
    layout, seen = GpuLayout(shape, 128, 3), []
    for kernels in (set(ALL) - small, set(ALL)):
        model = GpuModel(shape, weights, Ops.create(shape, CPU, set(kernels)))
        assert model.ops.enabled == kernels
        name = f"gpu-step-test-{os.getpid()}-{len(kernels)}"
        pool = GpuPool.create(name, layout, 2, 2, CPU)
        try:
            runner = Runner(model, pool, 256, 128)
            rows = [SlotRows(0, 2, (5, 9), (0,)), SlotRows(1, 127, (7,), (1,))]
            with torch.inference_mode():
                logits, streams = runner.decode(rows)
            seen.append([t.clone() for t in (logits, streams, pool.slots[:-1], pool.pages[:-1])])
        finally:
            pool.close()
    for wanted, got in zip(*seen, strict=True):  # the last extent is the dump
        assert torch.equal(got, wanted)


def test_a_wrong_kernel_is_switched_off(interpreter: None) -> None:
    """A kernel that raises, and one that is off, do not run after the probe."""
    shape = parse_shape(config_table(1, "tiny"))
    model = GpuModel(shape, make_slice(shape, CPU, 1), Ops.create(shape, CPU, {"wo_a", "moe"}))
    wo_a = model.weights.layers[0].attn.wo_a
    scale = wo_a.scale
    assert scale is not None
    wo_a.dense()  # plain torch keeps the right weights, the kernel reads wrong scales
    scale += 1
    ffn = model.weights.layers[0].ffn
    assert ffn is not None
    ffn.dense()
    broken = dataclasses.replace(ffn.w2, codes=ffn.w2.codes[:, :, :64])  # shapes do not fit
    ffn.w2 = broken
    name = f"gpu-probe-test-{os.getpid()}"
    seen = probe(model, GpuLayout(shape, 128, 3), CPU, name, 2, ((1, 1),))
    assert "ValueError" in seen["moe"].failure
    assert seen["wo_a"].failure or seen["wo_a"].worst > 0.5
    assert model.ops.enabled == set()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_every_kernel_at_real_width() -> None:
    report = compare_kernels(torch.device("cuda"), None, 2300)
    for operation, what in report["operations"].items():
        assert not what["failure"] and what["worst"] <= TOLERANCES[operation], (operation, what)

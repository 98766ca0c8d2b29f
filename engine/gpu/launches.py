"""How many launches a decode step takes, without a GPU: the step runs *dry* (kernels are counted,
neither compiled nor launched), and of torch's own operations everything that is no view counts one.

cuBLAS may take a second launch for one product (it splits K and adds the shares); that is not seen
here. ``python -P -m decant.engine.gpu.launches`` prints the counts for layers of the real width.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from decant.engine.gpu import plain
from decant.engine.gpu.layout import GpuLayout
from decant.engine.gpu.model import GpuModel
from decant.engine.gpu.ops import ALL, Ops
from decant.engine.gpu.pool import GpuPool
from decant.engine.gpu.precompile import note, without_device
from decant.engine.gpu.runner import Runner
from decant.engine.gpu.slice import Maker, make_slice
from decant.engine.model_shape import parse_shape
from decant.engine.synthetic import config_table

# what reads or makes no memory: names of aten's operations without their overload
NO_LAUNCH = frozenset(
    (
        "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand",
        "lift_fresh", "new_empty", "new_empty_strided", "permute", "select", "set_", "slice",
        "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze",
        "view", "_reshape_alias", "_unsafe_view", "is_pinned", "_local_scalar_dense",
        "scalar_tensor",
    )
)  # fmt: skip
KINDS = {0: "window", 4: "CSA", 128: "HCA"}


class Torch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's launches."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name not in NO_LAUNCH:
            self.seen["torch " + name] += 1
        return func(*args, **(kwargs or {}))


class Bare(Maker):
    """Weights that nobody looks at: no value is made."""

    def normal(self, *size: int, by: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self.device)

    def whole(self, low: int, high: int, *size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)


class Sums:
    """A group of ranks that only counts: one launch a sum, three a gather."""

    kind, can_capture = "none", True

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size
        self.seen: Counter[str] = Counter()

    def all_reduce(self, x: Tensor) -> Tensor:
        self.seen["all_reduce"] += 1
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        self.seen["all_gather"] += 3
        return torch.empty(len(x), x.shape[1] * self.size, dtype=x.dtype, device=x.device)

    def host_gather(self, values: list[int]) -> list[list[int]]:
        return [values] * self.size

    def patience(self, seconds: float) -> None:
        pass

    def check(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


def launches(run: Callable[[Sums], object], ranks: int) -> Counter[str]:
    """Launches of ``run`` by kernel, and of torch by operation. run: gets the ranks' sums."""
    sums, kernels = Sums(ranks), Counter[str]()

    def product(x: Tensor, weight: Tensor) -> Tensor:
        """plain.mm_f32 of a GPU: one launch (on a CPU it casts)."""
        kernels["mm_f32"] += 1
        return torch.empty(len(x), len(weight))

    before, plain.mm_f32 = plain.mm_f32, product
    try:
        with Torch() as seen:
            note(lambda: run(sums), kernels)
    finally:
        plain.mm_f32 = before
    counts: Counter[str] = seen.seen
    return kernels + counts + sums.seen


def of_layers(rows: int, tp: int = 4) -> dict[str, dict[str, int]]:
    """Launches of one decode step of ``rows`` sequences of one row, of a rank of ``tp`` at real
    width: by kind of layer (the second one of a step), and for what is no layer."""
    # wide where a kernel's choice depends on it; few layers, experts and tokens
    table = config_table(4, "real") | {"vocab_size": 1024, "n_routed_experts": 128}
    cpu = torch.device("cpu")

    def counted(ratios: tuple[int, ...]) -> Counter[str]:
        shape = parse_shape(
            table | {"num_hidden_layers": len(ratios), "compress_ratios": [*ratios, 0],
                     "num_hash_layers": 0}
        )  # fmt: skip
        weights = make_slice(shape, cpu, tp, maker=Bare)
        model = GpuModel(shape, weights, Ops.create(shape, cpu, set(ALL), tp))
        layout = GpuLayout(shape, 256, 1)
        pool = GpuPool.create(f"decant-launches-{os.getpid()}", layout, 2, rows, cpu)
        try:
            runner = Runner(model, pool, 512, 128)
            held, _ = runner.static_rows(rows, 1)

            def step(sums: Sums) -> None:
                runner.model = replace(model, comm=sums)
                runner._step(held)

            launches(step, tp)  # makes what is kept between steps
            return launches(step, tp)
        finally:
            pool.close()

    one, out = counted((0,)), {}
    for ratio, kind in KINDS.items():
        second = counted((0, ratio))
        second.subtract(one)
        out[kind] = {k: n for k, n in sorted(second.items()) if n}
    one.subtract(out["window"])
    return {"step": {k: n for k, n in sorted(one.items()) if n}, **out}


def main() -> int:
    with torch.no_grad(), without_device(90):
        for rows in [int(word) for word in sys.argv[1:]] or [1, 8, 64]:
            found = of_layers(rows)
            totals = {kind: sum(counts.values()) for kind, counts in found.items()}
            print(json.dumps({"rows": rows, "totals": totals, "launches": found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Which device a rank computes on. Imports no kernel, so that a machine without a GPU hears of it
before anything else is loaded."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from decant.protocol.config import Config
from decant.protocol.errors import ConfigError

MPS_WAIT_S = 60.0
P = ParamSpec("P")
T = TypeVar("T")


def has_gpu() -> bool:
    """Whether CUDA has a GPU here.

    NOTE: asks NVML, not CUDA: a process that has opened CUDA cannot fork the ranks of its group."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return torch.cuda.is_available()


def check_gpu(config: Config) -> None:
    """Raises: ConfigError if a GPU is wanted and none is there."""
    if config.device == "cpu":
        return
    wait_for_mps(config)
    if not has_gpu():
        raise ConfigError("device = cuda, but this machine has no CUDA GPU: use device = cpu")


def on_device(
    method: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[Any, P], T]:
    """A method of an engine without gradients and with the engine's GPU as the current one, which
    is a matter of the calling thread."""

    def call(self: Any, /, *args: P.args, **more: P.kwargs) -> T:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        with torch.inference_mode():
            return method(self, *args, **more)

    return functools.update_wrapper(call, method)


def wait_for_mps(config: Config) -> None:
    """Until the set's MPS daemon is there: CUDA would start without it and never say so.

    Raises: ConfigError if it does not come."""
    if not (config.gpu.mps and config.run_dir):
        return
    control = Path(config.run_dir) / "mps" / "control"
    deadline = time.monotonic() + MPS_WAIT_S
    while not control.exists():
        if time.monotonic() > deadline:
            raise ConfigError(f"the MPS daemon did not start: {control} is not there")
        time.sleep(0.05)


def device_index(gpus: Sequence[int], rank: int, visible: str | None, count: int) -> int:
    """The index among visible GPUs of a rank's. gpus: of the group's ranks; none: what is visible,
    in turn. visible: CUDA_VISIBLE_DEVICES."""
    if not gpus:
        return rank % max(count, 1)
    number = gpus[rank]
    if visible:
        names = [n.strip() for n in visible.split(",")]
        if str(number) in names:
            return names.index(str(number))
    return number if number < count else 0


def choose_device(config: Config, gpus: Sequence[int], rank: int = 0) -> torch.device:
    """The GPU of a rank (see Config.gpus); the CPU where the configuration says so (the engine's
    twin for tests).

    Raises: ConfigError without a GPU that has kernels."""
    if config.device == "cpu":
        return torch.device("cpu")
    check_gpu(config)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    device = torch.device("cuda", device_index(gpus, rank, visible, torch.cuda.device_count()))
    from decant.kernels.config import architecture

    try:
        architecture(device)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    torch.cuda.set_device(device)
    return device

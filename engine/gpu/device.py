"""Which device a rank computes on. Imports no kernel, so that a machine without a GPU hears of it
before anything else is loaded."""

from __future__ import annotations

import os

import torch

from decant.protocol.config import Config
from decant.protocol.errors import ConfigError


def check_gpu(config: Config) -> None:
    """Raises: ConfigError if a GPU is wanted and none is there.

    NOTE: asks NVML, not CUDA: a process that has opened CUDA cannot fork the ranks of its group."""
    if config.device == "cpu":
        return
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if not torch.cuda.is_available():
        raise ConfigError("device = cuda, but this machine has no CUDA GPU: use device = cpu")


def device_index(devices: str, rank: int, visible: str | None, count: int) -> int:
    """The index among visible GPUs of a rank's. devices: "0,1,2,3", a GPU a rank; fewer are dealt
    in turn, so "0" puts all ranks on one. visible: CUDA_VISIBLE_DEVICES."""
    numbers = [n.strip() for n in devices.split(",") if n.strip()]
    if not numbers:
        return rank % max(count, 1)
    number = numbers[rank % len(numbers)]
    if visible:
        names = [n.strip() for n in visible.split(",")]
        if number in names:
            return names.index(number)
    return int(number) if int(number) < count else 0


def choose_device(config: Config, devices: str, rank: int = 0) -> torch.device:
    """The GPU of a rank; the CPU where the configuration says so (the engine's twin for tests).

    Raises: ConfigError without a GPU that has kernels."""
    if config.device == "cpu":
        return torch.device("cpu")
    check_gpu(config)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    device = torch.device("cuda", device_index(devices, rank, visible, torch.cuda.device_count()))
    from decant.kernels.config import architecture

    try:
        architecture(device)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    torch.cuda.set_device(device)
    return device

"""Which device a rank computes on. Imports no kernel, so that a machine without a GPU hears of it
before anything else is loaded."""

from __future__ import annotations

import torch

from decant.protocol.config import Config
from decant.protocol.errors import ConfigError


def choose_device(config: Config, devices: str) -> torch.device:
    """The GPU of a rank; the CPU where the configuration says so (the engine's twin for tests).

    Raises: ConfigError without a GPU that has kernels."""
    if config.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device = cuda, but this machine has no CUDA GPU: use device = cpu")
    number = int(devices.split(",")[0]) if devices else 0
    # Under supervision CUDA_VISIBLE_DEVICES already shows the rank's own devices only.
    index = number if number < torch.cuda.device_count() else 0
    device = torch.device("cuda", index)
    from decant.kernels.config import architecture

    try:
        architecture(device)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return device

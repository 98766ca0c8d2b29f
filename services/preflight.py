"""What ``decant up`` settles and checks before it starts anything: profile, model folder, port,
memory, shared memory. Every finding is a ConfigError of one sentence.

Reads headers only; no tensor is read and no memory is taken.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from decant.engine.checkpoint import Checkpoint
from decant.engine.kv_layout import KVLayout
from decant.engine.model_shape import ModelShape
from decant.protocol.config import Config, build, merge
from decant.protocol.errors import CheckpointError, ConfigError
from decant.services.model_folder import SHIPPED
from decant.services.supervisor import FOLDER

DEMO_NAME = "decant-demo"
PROCESS_BYTES = 280 << 20  # resident set of a worker without weights and pool (torch, CPU)
LIGHT_BYTES = 60 << 20  # of router, tokenizer, gateway
MARGIN_BYTES = 64 << 20  # of /dev/shm
GPU_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # of the driver: Linux, WSL


def profiles() -> list[str]:
    """Names of the profiles that ship with the package."""
    return sorted(p.stem for p in FOLDER.glob("*.toml"))


def read_profile(name: str) -> dict[str, Any]:
    """A profile's table, by the name of a shipped one or the path of a TOML file."""
    import tomllib

    path = Path(name)
    try:
        if name in profiles():
            text = (FOLDER / f"{name}.toml").read_text()
        elif path.suffix == ".toml":
            text = path.read_text()
        else:
            raise ConfigError(f"there is no profile {name!r}; there are {', '.join(profiles())}")
        return tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read the profile {name}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the profile {name} is not TOML: {error}") from error


def demo_folder() -> Path:
    """The model folder that ships with the package."""
    return SHIPPED.absolute()


def resolve(profile: str, pairs: list[str], run_dir: Path) -> Config:
    """The config of a set: profile, then ``pairs`` (``a.b=value``), then what follows from them.

    Sets ``run_dir``, an absolute ``model.path``, ``model.served_name`` and a free port for port 0.
    Pools that cannot hold one request of ``model.max_context`` are enlarged unless ``pairs`` size
    them. Raises: ConfigError.
    """
    table = merge(read_profile(profile), pairs)
    table["run_dir"] = str(run_dir)
    config: Config = build(Config, table)
    folder = Path(config.model.path).expanduser().absolute() if config.model.path else None
    name = config.model.served_name or (folder.name if folder else DEMO_NAME)
    model = replace(config.model, path=str(folder or demo_folder()), served_name=name)
    gateway = config.gateway
    if gateway.port == 0:
        gateway = replace(gateway, port=free_port(gateway.host))
    named = {pair.partition("=")[0].strip() for pair in pairs}
    need = -(-model.max_context // config.kv.page_tokens)
    prefill, decode = config.prefill, config.decode
    for room, pages in (("prefill", prefill.pages), ("decode", decode.pages)):
        if pages < need and f"{room}.pages" in named:
            raise ConfigError(
                f"{room}.pages = {pages} holds {pages * config.kv.page_tokens} tokens,"
                f" less than model.max_context = {model.max_context}"
            )
    prefill = replace(prefill, pages=max(prefill.pages, need))
    decode = replace(decode, pages=max(decode.pages, need))
    return replace(config, model=model, gateway=gateway, prefill=prefill, decode=decode)


def free_port(host: str) -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def check_port(host: str, port: int) -> None:
    """Raises: ConfigError if nobody can listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host} port {port}: {(error.strerror or str(error)).lower()};"
                " choose another with --port"
            ) from error


def check_model(folder: Path) -> tuple[ModelShape, int]:
    """Check a model folder by its files, config.json and the names, shapes and dtypes of all
    tensors. Returns: its shape, bytes of its weights. Raises: CheckpointError, ConfigError.
    """
    checkpoint = Checkpoint(folder)
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(f"the model folder {folder} lacks tokenizer.json")
    files = {entry.file for entry in checkpoint.entries.values()}
    return checkpoint.shape, sum(file.stat().st_size for file in files)


def shm_bytes(config: Config, shape: ModelShape) -> int:
    """Shared memory that the pools of all ranks take."""
    if config.device != "cpu":
        return 0
    layout = KVLayout(shape, config.kv.page_tokens)
    return sum(
        num * room.tp * (room.pages * layout.page_bytes + room.slots * layout.slot_bytes)
        for room, num in ((config.prefill, config.prefill.instances), (config.decode, 1))
    )


def check_memory(config: Config, shape: ModelShape, weight_bytes: int) -> None:
    """Raises: ConfigError if the set cannot fit into free memory or /dev/shm."""
    if config.device != "cpu":
        return
    ranks = [config.prefill.tp] * config.prefill.instances + [config.decode.tp]
    if config.draft.enabled:
        ranks.append(config.draft.tp)
    # Weights stay as they are on disk or grow to bfloat16 and float32 when the loader unpacks them.
    pool = shm_bytes(config, shape)
    need = (sum(ranks) + config.warm_start) * PROCESS_BYTES + len(ranks) * 4 * weight_bytes + pool
    need += (1 + config.tokenizer.instances + config.gateway.instances) * LIGHT_BYTES
    need += config.prefill.instances * config.prefill.tier_memory_mb << 20
    free = psutil.virtual_memory().available
    if need > free:
        raise ConfigError(
            f"too little memory: the set needs about {need / 1e9:.1f} GB,"
            f" {free / 1e9:.1f} GB are available"
        )
    shm = psutil.disk_usage("/dev/shm").free
    if pool + MARGIN_BYTES > shm:
        raise ConfigError(
            f"too little shared memory: the KV pools need about {pool / 1e9:.2f} GB,"
            f" /dev/shm has {shm / 1e9:.2f} GB free; lower decode.pages and prefill.pages"
            " with --set, or enlarge /dev/shm (docker run --shm-size)"
        )


def check_device(config: Config) -> None:
    """Raises: ConfigError if the set wants GPUs where no driver is loaded."""
    if config.device == "cuda" and not any(path.exists() for path in GPU_FILES):
        raise ConfigError(
            "device = cuda, but this machine has no NVIDIA driver; take --profile demo"
            " (or --set device=cpu)"
        )


def check(config: Config) -> int:
    """All checks. Returns: bytes of the weights. Raises: ConfigError with the first finding."""
    check_device(config)
    try:
        shape, weight_bytes = check_model(Path(config.model.path))
    except CheckpointError as error:
        where = "" if config.model.path in error.message else f"{config.model.path}: "
        raise ConfigError(where + error.message) from error
    check_port(config.gateway.host, config.gateway.port)
    loopback = config.gateway.host in ("localhost", "::1") or config.gateway.host.startswith("127.")
    if not loopback and not config.gateway.keys_file:
        raise ConfigError(
            f"gateway.host {config.gateway.host} is reachable from outside: set gateway.keys_file"
            " to a file with one API key a line"
        )
    if config.gateway.keys_file and not Path(config.gateway.keys_file).is_file():
        raise ConfigError(f"gateway.keys_file {config.gateway.keys_file} does not exist")
    check_memory(config, shape, weight_bytes)
    return weight_bytes

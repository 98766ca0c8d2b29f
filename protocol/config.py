"""Deployment settings: one frozen tree, read once from a profile (TOML), ``--set`` pairs and
environment, checked, then passed.

Model constants are not here (``engine/model_shape.py``), nor tile sizes (beside the kernels).
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decant.protocol.errors import ConfigError


@dataclass(frozen=True)
class ModelConfig:
    path: str = ""  # a checkpoint folder; empty: the model that ships with the package
    served_name: str = ""  # empty: the folder's name
    max_context: int = 8192  # tokens, prompt and output together; at most the model's
    quantise_activations: bool = False  # simulate the reference's FP8/FP4 activation rounding


@dataclass(frozen=True)
class GatewayConfig:
    host: str = "127.0.0.1"  # address to listen on; others than loopback need keys_file
    port: int = 8000  # 0: a free one
    max_body_bytes: int = 32 << 20  # of a request; more: 413
    max_requests: int = 256  # in flight; more: 429
    max_choices: int = 16  # n, at most
    keys_file: str = ""  # one key a line; empty: open (only on loopback)
    queue_timeout_s: float = 60.0  # wait for the first token at most this long
    request_timeout_s: float = 600.0  # of a whole request
    default_max_tokens: int = 512  # chat, where the client gave none
    default_thinking: bool = False  # where the client does not say
    strict_fields: bool = False  # refuse unknown request fields instead of ignoring them
    strict_deepseek: bool = False  # refuse what DeepSeek's API refuses
    ignore_sampling_in_thinking: bool = False  # as DeepSeek's API does
    slow_reader_s: float = 30.0  # a client that reads nothing for so long is cut off
    first_byte_s: float = 5.0  # a comment is sent if there is no token by then, and again and again
    instances: int = 1  # processes on one port; limits of requests and keys are those of each


@dataclass(frozen=True)
class TokenizerConfig:
    instances: int = 1  # processes
    max_streams: int = 1024  # open output streams of one process


@dataclass(frozen=True)
class RouterConfig:
    max_queued: int = 512  # requests waiting for a reservation; more: 429
    heartbeat_s: float = 1.0  # between two heartbeats of a process
    suspect_s: float = 3.0  # without a heartbeat: no new work
    dead_s: float = 10.0  # without a heartbeat: fenced, its requests resume elsewhere
    stall_s: float = 30.0  # busy without a step: fenced
    drain_s: float = 30.0  # a stopping process may finish its work for so long
    max_resumes: int = 16  # of one request without a new token in between; then it fails
    resumes_per_s: float = 50.0  # of all requests; more wait (bursts up to four seconds' worth)
    canary: bool = True  # a request of the router itself, before ready and when idle
    canary_s: float = 10.0  # between two canaries
    admin_key_file: str = ""  # key of the admin socket; empty: admin.key, made in run_dir


@dataclass(frozen=True)
class PrefillConfig:
    tp: int = 1  # ranks of the group: 1, 2, 4 or 8
    threads: int = 1  # CPU threads of each rank
    pages: int = 96  # KV pages of the pool
    slots: int = 16  # sequences under way or waiting for their release, at most
    chunk_tokens: int = 256  # of a prompt, in one engine step
    prefix_cache: bool = True  # keep pages of prompts and skip what is found again
    cache_pages: int = 0  # of these, kept at most for that; 0: as many as nobody else wants
    devices: str = ""  # GPUs of the ranks, "0,1,2,3"; empty: what the process sees
    instances: int = 1  # processes; each has a pool, and takes the next tp of the devices
    tier_memory_mb: int = 0  # host memory for what the prefix cache evicts; 0: it is forgotten
    tier_file_mb: int = 0  # a file behind that memory; 0: none
    tier_folder: str = ""  # where that file is made, without a name; empty: the run directory
    sm_share: int = 100  # percent of a GPU's multiprocessors for each rank, under gpu.mps


@dataclass(frozen=True)
class DecodeConfig:
    tp: int = 1  # ranks of the group: 1, 2, 4 or 8
    threads: int = 1  # CPU threads of each rank
    pages: int = 384  # KV pages of the pool
    slots: int = 64  # sequences in the batch, reserved or parked, at most
    max_batch: int = 32  # sequences in one step
    growth_tokens: int = 64  # reserved beyond the prompt at admission
    tpot_budget_ms: float = 50.0  # per token of a sequence, beside prefill chunks in the same steps
    prefix_cache: bool = True  # keep pages, so that the next turn's hand-off brings only the rest
    cache_pages: int = 0  # of these, kept at most for that; 0: as many as nobody else wants
    devices: str = ""  # GPUs of the ranks, "0,1,2,3"; empty: what the process sees
    sm_share: int = 100  # percent of a GPU's multiprocessors for each rank, under gpu.mps


@dataclass(frozen=True)
class DraftConfig:
    enabled: bool = True  # draft tokens at all
    tp: int = 1  # ranks of the group: 1, 2, 4 or 8
    threads: int = 1  # CPU threads of each rank
    num_drafts: int = 2  # k, at most
    adaptive: bool = True  # k follows measured acceptance and load
    timeout_ms: float = 200.0  # a step waits so long for drafts, then goes on without
    devices: str = ""  # GPUs of the ranks, "0,1,2,3"; empty: what the process sees
    sm_share: int = 100  # percent of a GPU's multiprocessors for each rank, under gpu.mps


@dataclass(frozen=True)
class KVConfig:
    page_tokens: int = 256  # a multiple of 128
    max_drafts: int = 3  # ring rows
    checksums: bool = True  # crc32 of every page that is handed over


@dataclass(frozen=True)
class GpuConfig:
    mps: bool = False  # start an MPS daemon: processes of one GPU run side by side
    collectives: str = "auto"  # how ranks sum: ipc (one-shot), nccl, gloo; auto: what works
    start_s: float = 600.0  # a rank may load, compile and capture for so long
    graphs_s: float = 300.0  # of that for decode's graphs; those left are captured while serving
    graphs_again_s: float = 1.0  # the same for a worker that starts anew in a running set
    twin: bool = False  # with device = cpu: the GPU engine's code in plain torch, slow, for tests


@dataclass(frozen=True)
class ObservabilityConfig:
    metrics_compat: str = ""  # vllm or sglang: /metrics has their names too
    prometheus: str = ""  # command (a name on PATH or a path) to start beside the set; empty: none
    prometheus_port: int = 9090  # on loopback
    grafana: str = ""  # command, such as grafana or grafana-server; empty: none
    grafana_home: str = ""  # its folder with public/ and conf/; empty: above the command's folder
    grafana_port: int = 3000  # on loopback


@dataclass(frozen=True)
class Config:
    """The whole tree. ``run_dir`` holds sockets, generated supervisord config, logs and locks; mode
    0700.
    """

    profile: str = "demo"  # name of the profile this came from
    run_dir: str = ""  # sockets, logs and generated files; empty: decant up chooses
    device: str = "cpu"  # "cpu" or "cuda"
    log_level: str = "info"  # debug, info, warning, error
    log_content: bool = False  # log prompts and answers too; off for a reason
    warm_start: bool = True  # CPU: who is started anew is forked by a process that has torch loaded
    instance: str = ""  # of the process that reads this, filled in by itself
    model: ModelConfig = field(default_factory=ModelConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    kv: KVConfig = field(default_factory=KVConfig)
    gpu: GpuConfig = field(default_factory=GpuConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)

    def __post_init__(self) -> None:
        def need(ok: bool, text: str) -> None:
            if not ok:
                raise ConfigError(text)

        need(self.device in ("cpu", "cuda"), f"device is cpu or cuda, not {self.device!r}")
        need(0 <= self.gateway.port < 65536, f"gateway.port {self.gateway.port} is not a port")
        need(1 <= self.gateway.instances <= 64, "gateway.instances is between 1 and 64")
        need(
            self.kv.page_tokens > 0 and self.kv.page_tokens % 128 == 0,
            f"kv.page_tokens {self.kv.page_tokens} is not a multiple of 128",
        )
        need(0 <= self.kv.max_drafts <= 7, "kv.max_drafts is 0 to 7")
        need(
            self.observability.metrics_compat in ("", "vllm", "sglang"),
            "observability.metrics_compat is vllm, sglang or empty",
        )
        need(
            0 <= self.draft.num_drafts <= self.kv.max_drafts,
            f"draft.num_drafts {self.draft.num_drafts} exceeds kv.max_drafts {self.kv.max_drafts}",
        )
        for room in (self.prefill, self.decode, self.draft):
            need(room.tp in (1, 2, 4, 8), f"tp is 1, 2, 4 or 8, not {room.tp}")
            need(room.threads >= 1, "threads is at least 1")
            need(1 <= room.sm_share <= 100, f"sm_share is 1 to 100 percent, not {room.sm_share}")
            names = room.devices.split(",") if room.devices else []
            need(
                all(n.strip().isdigit() for n in names),
                f"devices are numbers of GPUs, not {room.devices!r}",
            )
        need(
            self.gpu.collectives in ("auto", "ipc", "nccl", "gloo"),
            f"gpu.collectives is auto, ipc, nccl or gloo, not {self.gpu.collectives!r}",
        )
        need(not self.gpu.twin or self.device == "cpu", "gpu.twin is for device = cpu")
        need(not self.gpu.mps or self.device == "cuda", "gpu.mps needs device = cuda")
        for pool in (self.prefill, self.decode):
            need(pool.cache_pages >= 0, "cache_pages is at least 0")
        need(self.decode.tpot_budget_ms > 0, "decode.tpot_budget_ms is greater than 0")
        tier = self.prefill
        need(1 <= tier.instances <= 64, "prefill.instances is 1 to 64")
        need(tier.tier_memory_mb >= 0 <= tier.tier_file_mb, "sizes of the tier are at least 0")
        need(
            tier.tier_memory_mb > 0 or not tier.tier_file_mb,
            "prefill.tier_file_mb needs prefill.tier_memory_mb, through which everything goes",
        )
        need(self.model.max_context >= 128, "model.max_context is at least 128")
        need(
            1 <= self.decode.max_batch <= self.decode.slots, "decode.max_batch is 1 to decode.slots"
        )

    def gpus(self, role: str, number: int = 0) -> list[int]:
        """The GPU of each rank of a role's group: the next tp of its devices, or all of them dealt
        in turn where there are fewer (one GPU for all ranks). Empty: what the process sees.
        """
        rooms = {"prefill": self.prefill, "decode": self.decode, "draft": self.draft}
        room: PrefillConfig | DecodeConfig | DraftConfig = rooms[role]  # type: ignore[assignment]
        names = [int(name) for name in room.devices.split(",")] if room.devices else []
        if not names:
            return []
        return [names[(number * room.tp + rank) % len(names)] for rank in range(room.tp)]

    def all_gpus(self) -> list[int]:
        """Every GPU of the set, ascending."""
        roles = [("prefill", i) for i in range(self.prefill.instances)] + [("decode", 0)]
        if self.draft.enabled:
            roles.append(("draft", 0))
        return sorted({gpu for role in roles for gpu in self.gpus(*role)})

    def endpoint(self, instance: str) -> str:
        """The ipc address at which a process listens (a Unix path is shorter than 108 bytes)."""
        path = f"{self.run_dir}/{instance}.sock"
        if len(path) >= 104:
            raise ConfigError(f"the run directory's name is too long for a socket: {path}")
        return f"ipc://{path}"

    @property
    def shm_prefix(self) -> str:
        """First part of the name of every shared memory object of this set, so that ``decant down``
        finds what a killed process left: ``decant-<8 hex digits of the run directory>-``.
        """
        return f"decant-{hashlib.sha256(self.run_dir.encode()).hexdigest()[:8]}-"

    @property
    def admin_path(self) -> str:
        """Unix socket of the administrator."""
        return f"{self.run_dir}/admin.sock"

    @property
    def admin_key_path(self) -> str:
        """File with the administrator's key."""
        return self.router.admin_key_file or f"{self.run_dir}/admin.key"

    def metrics_path(self, instance: str) -> str:
        """Unix socket of a process's Prometheus page."""
        return f"{self.run_dir}/{instance}.metrics"


def _convert(value: Any, kind: Any, name: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        kind = next(a for a in typing.get_args(kind) if a is not type(None))
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ConfigError(f"{name} is a table")
        return build(kind, value, name + ".")
    if isinstance(value, str) and kind is not str:
        try:
            if kind is bool:
                return {"true": True, "false": False, "1": True, "0": False}[value.lower()]
            return kind(value)
        except (ValueError, KeyError) as error:
            raise ConfigError(f"{name}: {value!r} is not a {kind.__name__}") from error
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{name}: expected {kind.__name__}, got {value!r}")
    return value


def build(cls: Any, table: dict[str, Any], prefix: str = "") -> Any:
    """A dataclass of the tree from a nested dict. Raises: ConfigError for unknown names and wrong
    types.
    """
    kinds = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    for name in table:
        if name not in known:
            raise ConfigError(f"unknown setting {prefix}{name}")
    return cls(**{n: _convert(v, kinds[n], prefix + n) for n, v in table.items()})


def merge(table: dict[str, Any], pairs: list[str]) -> dict[str, Any]:
    """Apply ``a.b=value`` pairs to a nested dict (in place). Raises: ConfigError."""
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set takes key=value, not {pair!r}")
        *path, last = name.strip().split(".")
        here = table
        for part in path:
            here = here.setdefault(part, {})
            if not isinstance(here, dict):
                raise ConfigError(f"{name}: {part} is not a table")
        here[last] = value
    return table


def load(path: str | Path, pairs: list[str] | None = None) -> Config:
    """Read a profile or a resolved config file. ``DECANT_SET`` holds more pairs, separated by
    spaces.
    """
    try:
        table = tomllib.loads(Path(path).read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    merge(table, [*(pairs or []), *os.environ.get("DECANT_SET", "").split()])
    config: Config = build(Config, table)
    return config


def dump(config: Config) -> str:
    """The tree as TOML, for the resolved file in the run directory that all processes read."""

    def text(value: Any) -> str:
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, str):
            escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            return f'"{escaped}"'
        return repr(value)

    lines, tables = [], []
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            rows = [f"{g.name} = {text(getattr(value, g.name))}" for g in dataclasses.fields(value)]
            tables.append("\n".join([f"[{f.name}]", *rows]))
        else:
            lines.append(f"{f.name} = {text(value)}")
    return "\n".join(lines) + "\n\n" + "\n\n".join(tables) + "\n"

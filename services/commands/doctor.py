"""``decant doctor``: is this machine fit for a profile? Every finding comes with its fix.

Looks only: starts nothing, changes nothing. ``fail`` means that ``decant up`` with this profile
will not work, ``warn`` that it will be slower or less safe than it could be.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from decant.protocol.config import Config
from decant.protocol.errors import ConfigError, DecantError
from decant.services import preflight, rundir
from decant.services.cli import FAILED, OK
from decant.services.mps import CONTROL
from decant.services.target import add_run_dir, run_dir_of

NOFILE = 4096  # sockets of clients, processes and logs
MIN_DRIVER = 570  # CUDA 12.8; the first with Blackwell
MIN_COMPUTE = (9, 0)
TOOL_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Finding:
    """``status``: ok, warn or fail. ``fix`` is empty where nothing is wrong."""

    name: str
    status: str
    text: str
    fix: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    add = parser.add_argument
    add("--profile", default="", help="default: one-gpu where there is a GPU, else demo")
    add("--model", metavar="DIR", default="", help="check this model folder")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="as in decant up")
    add("--json", action="store_true", help="findings as a JSON list")


def ok(name: str, text: str) -> Finding:
    return Finding(name, "ok", text)


def _call(*words: str) -> str | None:
    """A tool's output; None if it is missing or fails."""
    if not shutil.which(words[0]):
        return None
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


# ---- every machine -------------------------------------------------------------------------------


def python(config: Config) -> Iterator[Finding]:
    text = f"Python {platform.python_version()} on {platform.machine()}"
    if platform.machine() not in ("x86_64", "aarch64") or platform.system() != "Linux":
        yield Finding("python", "warn", text, "decant is tested on Linux, x86_64")
    else:
        yield ok("python", text)


def cores(config: Config) -> Iterator[Finding]:
    have = len(os.sched_getaffinity(0))
    prefill, decode, draft = config.prefill, config.decode, config.draft
    need = prefill.tp * prefill.threads + decode.tp * decode.threads
    need += draft.tp * draft.threads if draft.enabled else 0
    text = f"{have} cores for {need} engine threads"
    if config.device == "cpu" and need > have + 1:
        fix = "lower prefill.threads, decode.threads or draft.threads with --set"
        yield Finding("cores", "warn", text, fix)
    else:
        yield ok("cores", text)


def memory(config: Config) -> Iterator[Finding]:
    free = psutil.virtual_memory().available
    try:
        facts = preflight.check_model(Path(config.model.path))
    except DecantError:
        return  # ``model`` says so
    try:
        preflight.check_memory(config, *facts)
    except ConfigError as error:
        yield Finding("memory", "fail", error.message, "docs/sizing.md says what takes how much")
    else:
        yield ok("memory", f"{free / 1e9:.1f} GB available")


def shared_memory(config: Config) -> Iterator[Finding]:
    path = Path("/dev/shm")
    if not path.is_dir() or not os.access(path, os.W_OK):
        fix = "mount -t tmpfs tmpfs /dev/shm"
        yield Finding("shm", "fail", "/dev/shm is missing or not writable", fix)
        return
    disk = psutil.disk_usage(str(path))
    text = f"/dev/shm: {disk.free / 1e9:.2f} of {disk.total / 1e9:.2f} GB free"
    if disk.total < 256 << 20:
        fix = "docker run --shm-size=2g, or mount -o remount,size=2G /dev/shm"
        yield Finding("shm", "fail" if config.device == "cpu" else "warn", text, fix)
    else:
        yield ok("shm", text)
    own = rundir.leftovers(config)
    if own.segments and not own.pids:
        text = f"{len(own.segments)} shared memory segments of a set that no longer runs"
        yield Finding("leftovers", "warn", text, f"decant down --run-dir {config.run_dir}")


def limits(config: Config) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"open files: {soft} (at most {hard})"
    if hard != resource.RLIM_INFINITY and hard < NOFILE:
        fix = f"LimitNOFILE={NOFILE} in the systemd unit, or ulimit -Hn {NOFILE} as root"
        yield Finding("ulimit", "warn", text, fix)
    else:
        yield ok("ulimit", text)
    if config.device == "cuda":
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if soft != resource.RLIM_INFINITY and soft < 1 << 30:
            text = f"locked memory: {soft >> 10} kB; pinned buffers may need more"
            yield Finding("memlock", "warn", text, "LimitMEMLOCK=infinity, or ulimit -l unlimited")
        else:
            yield ok("memlock", "locked memory is enough")


def port(config: Config) -> Iterator[Finding]:
    gateway = config.gateway
    name = f"{gateway.host}:{gateway.port}"
    try:
        preflight.check_port(gateway.host, gateway.port)
    except ConfigError as error:
        fix = "stop who listens there (ss -ltnp), or --port"
        yield Finding("port", "fail", error.message, fix)
    else:
        yield ok("port", f"{name} is free")


def run_dir(config: Config) -> Iterator[Finding]:
    path = Path(config.run_dir)
    if len(str(path)) + rundir.LONGEST_SOCKET > rundir.MAX_PATH:
        text = f"{path} is too long for the name of a socket"
        yield Finding("run directory", "fail", text, "choose a shorter one with --run-dir")
        return
    parent = next(p for p in (path, *path.parents) if p.exists())
    if not os.access(parent, os.W_OK):
        text = f"{parent} is not writable"
        yield Finding("run directory", "fail", text, "choose another with --run-dir")
    elif psutil.disk_usage(str(parent)).free < 500 << 20:
        text = f"less than 500 MB free for logs in {parent}"
        yield Finding("run directory", "warn", text, "free some, or choose another with --run-dir")
    else:
        yield ok("run directory", str(path))


def model(config: Config) -> Iterator[Finding]:
    folder = Path(config.model.path)
    try:
        _, size = preflight.check_model(folder)
    except DecantError as error:
        fix = "download it again, or name another folder with --model"
        yield Finding("model", "fail", error.message, fix)
    else:
        yield ok("model", f"{folder.name}: {size / 1e9:.2f} GB of weights, headers complete")


# ---- GPUs ----------------------------------------------------------------------------------------


def gpus(config: Config) -> Iterator[Finding]:
    fields = "index,name,driver_version,memory.free,memory.total,compute_cap,mig.mode.current"
    text = _call("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    rows = [[c.strip() for c in line.split(",")] for line in (text or "").splitlines()]
    rows = [row for row in rows if len(row) == 7]
    if not rows:
        if config.device == "cuda":
            fix = "install NVIDIA's driver; in a container: docker run --gpus all"
            yield Finding("gpu", "fail", "nvidia-smi shows no GPU", fix)
        else:
            yield ok("gpu", "none, and this profile needs none")
        return
    for index, name, driver, free, total, compute, mig in rows:
        yield ok(f"gpu {index}", f"{name}, {free} of {total} MB free, driver {driver}")
        if not compute.replace(".", "").isdigit():
            continue
        major, minor = (int(x) for x in compute.split("."))
        if config.device == "cuda" and (major, minor) < MIN_COMPUTE:
            fix = "a GPU of compute capability 9.0 (Hopper) or newer"
            yield Finding(f"gpu {index}", "fail", f"compute capability {compute}", fix)
        if mig == "Enabled":
            fix = f"as root, while nothing runs there: nvidia-smi -i {index} -mig 0"
            yield Finding(f"gpu {index}", "warn", "MIG is on: no peer access", fix)
    driver = rows[0][2]
    if driver.split(".")[0].isdigit() and int(driver.split(".")[0]) < MIN_DRIVER:
        status = "fail" if config.device == "cuda" else "warn"
        yield Finding("driver", status, f"driver {driver}", f"driver {MIN_DRIVER} or newer")
    if config.device == "cuda" and len(rows) > 1:
        yield from peers(len(rows))
    if config.device == "cuda":
        yield from mps(config, len(rows))
        yield from ipc()


def peers(num: int) -> Iterator[Finding]:
    """Pages move by peer access; every pair of GPUs needs it."""
    text = _call("nvidia-smi", "topo", "-p2p", "r")
    table = [line.split() for line in (text or "").splitlines() if line.strip().startswith("GPU")]
    bad = [row[0] for row in table[1:] if any(c not in ("OK", "X") for c in row[1 : num + 1])]
    if not table:
        fix = "see nvidia-smi topo -p2p r by hand"
        yield Finding("peer access", "warn", "cannot be asked for", fix)
    elif bad:
        fix = "IOMMU off or passthrough (iommu=pt), ACS off in the BIOS; on one NVLink island"
        yield Finding("peer access", "fail", f"missing at {', '.join(bad)}", fix)
    else:
        yield ok("peer access", f"between all {num} GPUs")


def mps(config: Config, num: int) -> Iterator[Finding]:
    """Several processes on one GPU without MPS take turns of milliseconds."""
    if config.gpu.mps:
        if shutil.which(CONTROL) is None:
            text = f"gpu.mps is set and {CONTROL} is not on PATH"
            yield Finding("mps", "fail", text, "install NVIDIA's driver tools or gpu.mps=false")
        else:
            yield ok("mps", "the set starts a daemon of its own")
        return
    ranks = config.prefill.tp * config.prefill.instances + config.decode.tp
    ranks += config.draft.tp if config.draft.enabled else 0
    is_running = any(
        p.info["name"] == "nvidia-cuda-mps-control" for p in psutil.process_iter(["name"])
    )
    if ranks > num and not is_running:
        text = f"{ranks} ranks share {num} GPUs and MPS does not run: they take turns"
        yield Finding("mps", "warn", text, "nvidia-cuda-mps-control -d, as the same user")
    else:
        yield ok("mps", "runs" if is_running else "not needed")


def ipc() -> Iterator[Finding]:
    """CUDA IPC handles need one IPC and PID namespace for all processes, which one set has; a
    container needs its own /dev/shm to be large enough for NCCL too.
    """
    name = Path("/proc/sys/kernel/yama/ptrace_scope")
    scope = name.read_text().strip() if name.exists() else "0"
    if scope in ("2", "3"):
        text = f"kernel.yama.ptrace_scope is {scope}: pidfd_getfd between processes is refused"
        yield Finding("ipc", "warn", text, "sysctl kernel.yama.ptrace_scope=1")
    else:
        yield ok("ipc", "processes of one user may share handles")


CHECKS: tuple[Callable[[Config], Iterator[Finding]], ...] = (
    *(python, cores, model, memory, shared_memory, limits, port, run_dir, gpus),
)


def examine(config: Config) -> list[Finding]:
    """All findings, in order."""
    return [finding for check in CHECKS for finding in check(config)]


def run(args: argparse.Namespace) -> int:
    has_gpu = bool(_call("nvidia-smi", "-L"))
    profile = args.profile or ("one-gpu" if has_gpu else "demo")
    pairs = [*args.set, *([f"model.path={args.model}"] if args.model else [])]
    config = preflight.resolve(profile, pairs, run_dir_of(args))
    findings = examine(config)
    if args.json:
        print(json.dumps([asdict(f) for f in findings], indent=1))
    else:
        show(profile, findings)
    return FAILED if any(f.status == "fail" for f in findings) else OK


def show(profile: str, findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    for f in findings:
        console.print(
            f"[{colours[f.status]}]{f.status:>4}[/]  {escape(f.name):<14} {escape(f.text)}"
        )
        if f.fix:
            console.print(f"                      [dim]fix:[/] {escape(f.fix)}")
    counts = {s: sum(f.status == s for f in findings) for s in colours}
    verdict = "will not start" if counts["fail"] else "can start"
    console.print(f"\nprofile {profile} {verdict}: {counts['fail']} fail, {counts['warn']} warn")

"""All processes' metrics on one page: reads the run directory's sockets, adds who said it, merges.

Every sample gets ``svc`` and ``instance`` labels unless it carries them already (the router speaks
of others); samples of one metric stand together, as the text format asks. A process that does not
answer within a second is missing and has ``decant_up`` 0.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from decant.services.metrics_compat import aliases

TARGET_TIMEOUT_S = 1.0
MAX_PAGE_BYTES = 8 << 20
_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?( .+)$")
_OWN = re.compile(r'(?:^|,)(?:svc|instance)="')


def service_of(instance: str) -> str:
    """``decode-0`` -> ``decode``."""
    return instance.rpartition("-")[0] or instance


def join(pages: Mapping[str, str | None], compat: str = "", model: str = "") -> str:
    """One text page from each instance's page (None: it did not answer).

    compat: "", "vllm" or "sglang": adds the metrics under the names that dashboards of that server
    ask for, labelled ``model_name``.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for instance, page in pages.items():
        mark = f'svc="{service_of(instance)}",instance="{instance}"'
        family = ""
        for line in (page or "").splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                head = heads.setdefault(family, [])
                if not any(known[:6] == line[:6] for known in head):
                    head.append(line)
                continue
            match = _SAMPLE.match(line)
            if match is None:
                continue
            name, labels, rest = match[1], match[2] or "", match[3]
            if not family or not name.startswith(family):
                family = name
            if not _OWN.search(labels):
                labels = f"{mark},{labels}" if labels else mark
            samples.setdefault(family, []).append(f"{name}{{{labels}}}{rest}")
    heads["decant_up"] = [
        "# HELP decant_up 1 if the process answered with its metrics",
        "# TYPE decant_up gauge",
    ]
    samples["decant_up"] = [
        f'decant_up{{svc="{service_of(i)}",instance="{i}"}} {float(page is not None)}'
        for i, page in pages.items()
    ]
    lines = []
    for family in dict.fromkeys([*heads, *samples]):
        lines += [*heads.get(family, []), *samples.get(family, [])]
    if compat:
        lines += aliases(lines, compat, model)
    return "\n".join(lines) + "\n"


async def read(path: Path, page: str = "/metrics") -> str | None:
    """A page of one process's socket; None if it does not answer in time."""
    try:
        async with asyncio.timeout(TARGET_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(str(path))
            try:
                head = f"GET {page} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
                writer.write(head.encode())
                data = b""
                while block := await reader.read(1 << 16):
                    data += block
                    if len(data) > MAX_PAGE_BYTES:
                        return None
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None
    top, _, body = data.partition(b"\r\n\r\n")
    if b" 200 " not in top.split(b"\r\n", 1)[0]:
        return None
    if b"chunked" in top.lower():
        body = _unchunk(body)
    return body.decode("utf-8", "replace")


def _unchunk(body: bytes) -> bytes:
    whole = b""
    with suppress(ValueError):
        while body:
            size, _, body = body.partition(b"\r\n")
            length = int(size, 16)
            if not length:
                break
            whole += body[:length]
            body = body[length + 2 :]
    return whole


async def collect(
    run_dir: str | Path, own: Mapping[str, str], compat: str = "", model: str = ""
) -> str:
    """The whole page: every ``*.metrics`` socket of the run directory, and ``own`` pages (by
    instance) that need no socket.
    """
    paths = {p.name.removesuffix(".metrics"): p for p in sorted(Path(run_dir).glob("*.metrics"))}
    others = [instance for instance in paths if instance not in own]
    found = await asyncio.gather(*(read(paths[instance]) for instance in others))
    pages: dict[str, str | None] = {**own, **dict(zip(others, found, strict=True))}
    return await asyncio.to_thread(join, dict(sorted(pages.items())), compat, model)

"""GET /metrics: the pages of all processes as one, with ``svc`` and ``instance`` labels."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

TARGET_TIMEOUT_S = 1.0
MAX_PAGE_BYTES = 4 << 20
SUFFIX = ".metrics"


@dataclass
class _Family:
    head: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)


async def page(run_dir: str, instance: str, own: CollectorRegistry) -> str:
    """All pages joined; ``decant_up`` is 0 for a process whose page did not come in time."""
    others = sorted(p for p in Path(run_dir).glob(f"*{SUFFIX}") if p.stem != instance)
    texts = await asyncio.gather(*(_fetch(p) for p in others))
    pages = [(instance, generate_latest(own).decode())]
    pages += [(p.stem, text) for p, text in zip(others, texts, strict=True)]
    families: dict[str, _Family] = {}
    up = families["decant_up"] = _Family(
        ["# HELP decant_up Whether the process answered", "# TYPE decant_up gauge"]
    )
    for name, text in pages:
        labels = f'svc="{name.rpartition("-")[0] or name}",instance="{name}"'
        up.samples.append(f"decant_up{{{labels}}} {int(bool(text))}")
        _add(families, text, labels)
    lines = [line for f in families.values() for line in (*f.head, *f.samples)]
    return "\n".join(lines) + "\n"


async def _fetch(path: Path) -> str:
    """A page over a Unix socket; empty if the process is away."""
    try:
        async with asyncio.timeout(TARGET_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(str(path), limit=MAX_PAGE_BYTES)
            try:
                writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                await reader.readuntil(b"\r\n\r\n")
                return (await reader.read(MAX_PAGE_BYTES)).decode("utf-8", "replace")
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return ""


def _add(families: dict[str, _Family], text: str, labels: str) -> None:
    """Sort a page's lines into families: the format wants each family in one piece."""
    family = families.setdefault("", _Family())
    for line in text.splitlines():
        if line.startswith("# "):
            parts = line.split(" ", 3)
            if len(parts) < 3:
                continue
            family = families.setdefault(parts[2], _Family())
            if not any(h.startswith(f"# {parts[1]} ") for h in family.head):
                family.head.append(line)
        elif line:
            name, brace, rest = line.partition("{")
            if brace:
                family.samples.append(f"{name}{{{labels},{rest}")
            else:
                name, _, value = line.partition(" ")
                family.samples.append(f"{name}{{{labels}}} {value}")

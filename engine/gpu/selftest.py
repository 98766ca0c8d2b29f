"""Does the GPU engine agree with the CPU reference on this machine, and how fast is a step?

``python -P -m decant.engine.gpu.selftest --out DIR`` runs every section in a process of its own,
so that a fault of one spoils no other, and writes DIR/selftest.json. On a machine without a GPU it
runs the same sections on the engine's CPU twin (small sizes; times mean nothing there).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from decant.engine.gpu.device import has_gpu
from decant.engine.interface import PrefillChunk, SlotRows, StepPlan
from decant.protocol.config import (
    Config,
    DecodeConfig,
    DraftConfig,
    KVConfig,
    ModelConfig,
    PrefillConfig,
)

DRAFTS = 3
PAGE = 256
CONTEXT = 4096
GAP_BOUND = 0.1
AGREEMENT = 0.995
Report = dict[str, Any]


def device_name() -> str:
    return "cuda" if has_gpu() else "cpu"


def configure(device: str, quantise: bool = False, context: int = CONTEXT) -> Config:
    """The demo model on one device; the reference gets room for one sequence only, since many of
    them share /dev/shm."""
    pages, slots = (192, 64) if device == device_name() else (-(-context // PAGE), 2)
    return Config(
        device=device,
        model=ModelConfig(max_context=context, quantise_activations=quantise),
        prefill=PrefillConfig(pages=64, slots=8, chunk_tokens=256),
        decode=DecodeConfig(pages=pages, slots=slots, max_batch=slots),
        draft=DraftConfig(num_drafts=DRAFTS),
        kv=KVConfig(page_tokens=PAGE, max_drafts=DRAFTS),
    )


def start(kernels: set[str] | None, graphs: bool = False, context: int = CONTEXT) -> Any:
    from decant.engine.gpu.start import start_engine

    return start_engine(configure(device_name(), context=context), "decode", kernels, graphs)


def held_out(per_skill: int) -> list[tuple[str, list[int], int]]:
    """(skill, ids, where the answer begins) of held-out conversations."""
    from decant.engine.demo import corpus
    from decant.engine.demo.bpe import Encoder
    from decant.engine.demo.score import prepare
    from decant.engine.load import model_folder

    folder = model_folder(Config())
    encode = Encoder(folder / "tokenizer.json")
    out = []
    for skill in corpus.EVALUATED:
        exam = prepare(encode, [skill], per_skill, CONTEXT - 64, 11, pack=False)
        for span in exam.spans:
            ids = exam.rows[span.row][: span.end].tolist()
            out.append((span.skill, ids, span.start))
    return out


def teacher_force(engine: Any, ids: list[int], begin: int, page: int = PAGE) -> NDArray[np.float32]:
    """Logits after positions begin - 1 .. len(ids) - 2: prefill up to begin, then decode rows."""
    table = tuple(range(-(-len(ids) // page)))
    engine.clear_slot(0)
    array = np.array(ids, np.int32)
    for at in range(0, begin, 256):
        part = array[at : min(begin, at + 256)]
        engine.step(StepPlan(0, (), PrefillChunk(0, at, part, table)))
    out = [engine.head([0])]
    for at in range(begin, len(ids) - 1, 1 + DRAFTS):
        rows = tuple(ids[at : min(len(ids) - 1, at + 1 + DRAFTS)])
        out.append(engine.step(StepPlan(0, (SlotRows(0, at, rows, table),))).logits)
    return np.concatenate(out)


def _reference(job: tuple[list[int], int, bool]) -> NDArray[np.float32]:
    from decant.engine.load import load_engine

    torch.set_num_threads(1)
    ids, begin, quantise = job
    engine = _engines.get(quantise)
    if engine is None:
        engine = _engines[quantise] = load_engine(configure("cpu", quantise), "decode")
    return teacher_force(engine, ids, begin)


_engines: dict[bool, Any] = {}


# -- sections --------------------------------------------------------------------------------------


def section_probe(args: argparse.Namespace) -> Report:
    """Every kernel against plain torch on the model's weights."""
    began = time.monotonic()
    engine = start(None)
    ops = engine.model.ops
    seen = {
        name: {"worst": c.worst, "calls": c.calls, "failure": c.failure}
        for name, c in ops.compared.items()
    }
    report = {
        "enabled": sorted(ops.enabled),
        "operations": seen,
        "seconds": round(time.monotonic() - began, 1),
    }
    engine.close()
    return report


def section_teacher(args: argparse.Namespace) -> Report:
    """Argmax against the CPU reference, teacher-forced on held-out answers."""
    prompts = held_out(args.per_skill)
    limit = CONTEXT if device_name() == "cuda" else 200
    prompts = [p for p in prompts if len(p[1]) <= limit][: args.prompts]
    engine = start(args.kernels)
    ours = [teacher_force(engine, ids, begin) for _, ids, begin in prompts]
    engine.close()
    space = os.statvfs("/dev/shm")
    room = space.f_bavail * space.f_frsize // (48 << 20)  # two engines of 20 MB each
    workers = max(1, min(12, (os.cpu_count() or 2) - 2, room))
    jobs = [(ids, begin, q) for q in (False, True) for _, ids, begin in prompts]
    # longest first, so that no long prompt runs alone at the end
    order = sorted(range(len(jobs)), key=lambda i: -len(jobs[i][0]))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as processes:
        results = list(processes.map(_reference, [jobs[i] for i in order]))
    theirs: list[Any] = [None] * len(jobs)
    for i, result in zip(order, results, strict=True):
        theirs[i] = result
    report: Report = {"prompts": len(prompts)}
    for q in (False, True):
        part = theirs[len(prompts) * q : len(prompts) * (q + 1)]
        report["quantised" if q else "float32"] = compare(prompts, ours, part)
    report["ok"] = any(report[k]["agreement"] >= AGREEMENT for k in ("float32", "quantised"))
    return report


def compare(
    prompts: list[tuple[str, list[int], int]],
    ours: list[NDArray[np.float32]],
    theirs: list[NDArray[np.float32]],
) -> Report:
    """Share of equal argmax, the reference's gap where it differs, answers that are right."""
    a, b = np.concatenate(ours), np.concatenate(theirs)
    x, y = a.argmax(1), b.argmax(1)
    differ = np.flatnonzero(x != y)
    gaps = b[differ, y[differ]] - b[differ, x[differ]]
    edges = [0, 0.01, 0.03, 0.1, 0.3, 1, 3, 1000]
    right = [
        sum(bool((g.argmax(1) == np.array(ids[begin:])).all()) for g, (_, ids, begin) in pairs)
        for pairs in (zip(ours, prompts, strict=True), zip(theirs, prompts, strict=True))
    ]
    return {
        "positions": len(x),
        "agreement": float((x == y).mean()),
        "largest_gap": float(gaps.max()) if len(gaps) else 0.0,
        "gap_histogram": dict(
            zip([f"<{e}" for e in edges[1:]], np.histogram(gaps, edges)[0].tolist(), strict=True)
        ),
        "beyond_bound": int((gaps > GAP_BOUND).sum()),
        "relative_error": float(np.linalg.norm(a - b) / np.linalg.norm(b)),
        "answers_right": {"ours": right[0], "reference": right[1]},
    }


def _pull(path: str, kernels: set[str] | None) -> Report:
    """The second process of the hand-off: pull, check, go on."""
    import msgspec

    from decant.protocol.messages import PoolHandle

    job = json.loads(Path(path).read_text())
    engine = start(kernels)
    handle = msgspec.json.decode(json.dumps(job["handle"]).encode(), type=PoolHandle)
    began = time.monotonic()
    engine.attach("peer", [handle])
    opened = time.monotonic() - began
    report: Report = {"open_ms": opened * 1e3, "cases": []}
    for case in job["cases"]:
        total, pages = case["tokens"], case["pages"]
        target = list(range(len(pages)))
        lengths = [min(PAGE, total - i * PAGE) for i in range(len(pages))]
        began = time.monotonic()
        engine.pull_pages("peer", pages, target, lengths, case["page_sums"])
        engine.pull_slot("peer", case["slot"], 0, total, case["slot_sum"])
        took = time.monotonic() - began
        logits = go_on(engine, 0, total, target, case["next"])
        wanted = np.load(case["logits"])
        report["cases"].append(
            {
                "tokens": total,
                "pull_ms": round(took * 1e3, 3),
                "equal": bool((logits == wanted).all()),
                "error": float(np.linalg.norm(logits - wanted) / np.linalg.norm(wanted)),
            }
        )
    engine.close()
    return report


def go_on(engine: Any, slot: int, at: int, table: list[int], ids: list[int]) -> Any:
    """Logits of a few decode steps after a prefill."""
    out = [engine.head([slot])]
    for i in range(0, len(ids), 2):
        rows = SlotRows(slot, at + i, tuple(ids[i : i + 2]), tuple(table))
        out.append(engine.step(StepPlan(0, (rows,))).logits)
    return np.concatenate(out)


def section_handoff(args: argparse.Namespace) -> Report:
    """Pages and slot from one process to another, at several T mod 4 and mod 128."""
    import msgspec

    lengths = [127, 128, 129, 130, 131, 256, 257, 383, 511, 514, 1023, 1152]
    if device_name() == "cpu":
        lengths = [129, 258]
    engine = start(args.kernels)
    random = np.random.default_rng(3)
    folder = Path(args.out)
    job: Report = {"handle": json.loads(msgspec.json.encode(engine.pools()[0])), "cases": []}
    free = 0
    for slot, total in enumerate(lengths):
        ids = random.integers(3, 2500, total + 6).astype(np.int32)
        count = -(-(total + 6) // PAGE)
        table = list(range(free, free + count))
        free += count
        engine.clear_slot(slot)
        for at in range(0, total, 256):
            part = ids[at : min(total, at + 256)]
            engine.step(StepPlan(0, (), PrefillChunk(slot, at, part, tuple(table))))
        live = [min(PAGE, max(0, total - i * PAGE)) for i in range(count)]
        case = {
            "tokens": total, "slot": slot, "pages": table, "next": ids[total:].tolist(),
            "page_sums": [
                engine.page_checksum(p, n) for p, n in zip(table, live, strict=True)
            ],
            "slot_sum": engine.slot_checksum(slot, total),
        }  # fmt: skip
        # our own continuation, on a copy: what the other process pulls stays as it is
        engine.copy_slot(slot, 63, total)
        own = list(range(180, 180 + count))
        for source, target in zip(table, own, strict=True):
            engine.copy_page(source, target)
        path = folder / f"logits-{total}.npy"
        np.save(path, go_on(engine, 63, total, own, case["next"]))
        case["logits"] = str(path)
        job["cases"].append(case)
    path = folder / "handoff-job.json"
    path.write_text(json.dumps(job))
    report = child("pull", args, ["--job", str(path)], 60)
    engine.close()
    for case in job["cases"]:
        Path(case["logits"]).unlink(missing_ok=True)
    path.unlink()
    cases = report.get("cases", [])
    report["ok"] = bool(cases) and all(c["equal"] for c in cases)
    return report


def milliseconds(run: Callable[[], object], times: int) -> list[float]:
    """Median and the 10th and 90th percentile of a call."""
    cuda = torch.cuda.is_available()
    took = []
    for _ in range(times + 3):
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
        took.append((time.perf_counter() - began) * 1e3)
    return [round(float(v), 3) for v in np.percentile(took[3:], [50, 10, 90])]


def measured_device() -> torch.device:
    """With its index: pools are allocated on a numbered device."""
    return torch.device(device_name(), 0) if device_name() == "cuda" else torch.device("cpu")


def step_rows(num: int, size: int, length: int, pages_each: int) -> list[SlotRows]:
    return [
        SlotRows(
            i, length, tuple(range(5, 5 + size)),
            tuple(range(i * pages_each, (i + 1) * pages_each)),
        )
        for i in range(num)
    ]  # fmt: skip


def section_graphs(args: argparse.Namespace) -> Report:
    """Capture every bucket; graph against eager: the same logits, and the time of a step."""
    cuda = device_name() == "cuda"
    engine = start(args.kernels)
    runner = engine.runner
    report: Report = {"buckets": []}
    buckets = (1, 2, 4, 8, 16, 32, 64) if cuda else (1, 2)
    with torch.inference_mode():
        for num in buckets:
            for size in (1, 1 + DRAFTS):
                plan = step_rows(num, size, 200, 3)
                row: Report = {"sequences": num, "rows": size}
                try:
                    runner.drop_graphs()
                    eager = [t.clone() for t in runner.decode(plan)]
                    row["eager_ms"] = milliseconds(partial(runner.decode, plan), 10 if cuda else 1)
                    began = time.monotonic()
                    runner.capture(num, size)
                    row["capture_s"] = round(time.monotonic() - began, 2)
                    graph = [t.clone() for t in runner.decode(plan)]
                    row["graph_ms"] = milliseconds(partial(runner.decode, plan), 20 if cuda else 1)
                    error = (graph[0] - eager[0]).norm() / eager[0].norm()
                    row["error"] = float(error)
                    row["equal"] = bool((graph[0] == eager[0]).all())
                except Exception as error:
                    row["failure"] = f"{type(error).__name__}: {error}"[:300]
                report["buckets"].append(row)
    report["ok"] = all("failure" not in r and r["error"] < 0.02 for r in report["buckets"])
    engine.close()
    return report


def section_draft(args: argparse.Namespace) -> Report:
    """Drafts against the CPU's, teacher-forced on held-out answers."""
    from decant.engine.gpu.start import start_draft
    from decant.engine.interface import DraftSlot
    from decant.engine.load import load_draft, load_engine

    prompts = [p for p in held_out(1) if len(p[1]) < 200][: args.prompts]
    ours = (start(args.kernels), start_draft(configure(device_name()), args.kernels))
    theirs = (load_engine(configure("cpu"), "decode"), load_draft(configure("cpu")))
    proposals: list[list[list[int]]] = []
    took = []
    for engine, draft in (ours, theirs):
        draft.attach("decode", engine.pools())
        found = []
        for _, ids, begin in prompts:
            table = (0,)
            engine.clear_slot(0)
            chunk = PrefillChunk(0, 0, np.array(ids[:begin], np.int32), table)
            engine.step(StepPlan(0, (), chunk))
            streams, start_at = engine.last_streams([0]), begin - 1
            for at in range(begin, len(ids) - 3, 2):
                given = tuple(ids[start_at + 1 : start_at + 1 + len(streams)])
                slot = DraftSlot(0, start_at, given, streams, 2, temperature=0.0)
                began = time.monotonic()
                found.append(draft.propose("decode", [slot])[0])
                took.append(time.monotonic() - began)
                rows = SlotRows(0, at, tuple(ids[at : at + 2]), table)
                streams, start_at = engine.step(StepPlan(0, (rows,))).streams, at
        proposals.append(found)
        draft.close()
        engine.close()
    a, b = np.array(proposals[0]), np.array(proposals[1])
    agreement = (a == b).mean(0) if len(a) else np.zeros(2)
    return {
        "proposals": len(a),
        "agreement": [round(float(v), 4) for v in agreement],
        "propose_ms": round(float(np.median(took[: len(a)])) * 1e3, 2) if took else None,
        "ok": bool(len(a)) and float(agreement[0]) >= 0.97,
    }


def section_wide(args: argparse.Namespace) -> Report:
    """Kernels against plain torch at real width."""
    from decant.engine.gpu.measure import compare_kernels

    # beyond 2,050 tokens the indexer has to choose
    cuda = device_name() == "cuda"
    return compare_kernels(measured_device(), None, 2300 if cuda else 40)


def section_pull(args: argparse.Namespace) -> Report:
    return _pull(args.job, args.kernels)


SECTIONS: dict[str, Callable[[argparse.Namespace], Report]] = {
    "probe": section_probe,
    "teacher": section_teacher,
    "handoff": section_handoff,
    "graphs": section_graphs,
    "draft": section_draft,
    "wide": section_wide,
    "pull": section_pull,  # the other process of "handoff"
}
ORDER = ("probe", "teacher", "handoff", "wide", "graphs", "draft")
TIMEOUTS_S = {
    "probe": 180, "teacher": 120, "handoff": 90, "wide": 280, "graphs": 120, "draft": 90,
}  # fmt: skip


def child(section: str, args: argparse.Namespace, extra: list[str], timeout_s: float) -> Report:
    """Run a section in a process of its own."""
    out = Path(args.out) / f"section-{section}.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-P", "-m", "decant.engine.gpu.selftest", "--section", section]
    command += ["--out", args.out, "--prompts", str(args.prompts)]
    command += ["--per-skill", str(args.per_skill), *extra]
    if args.kernels is not None:
        command += ["--kernels", ",".join(sorted(args.kernels)) or "none"]
    began = time.monotonic()
    try:
        done = subprocess.run(command, timeout=timeout_s, capture_output=True, text=True)
        problem = done.stderr[-1500:] if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        problem = f"not done after {timeout_s:.0f} s: {str(late.stderr or '')[-800:]}"
    report: Report = json.loads(out.read_text()) if out.exists() else {}
    out.unlink(missing_ok=True)
    if problem:
        report["problem"] = problem
    report["total_s"] = round(time.monotonic() - began, 1)
    return report


def names(text: str) -> set[str]:
    return set() if text == "none" else set(text.split(","))


def main() -> int:
    parser = argparse.ArgumentParser(description="compare and time the GPU engine")
    parser.add_argument("--out", default=".", help="folder of selftest.json")
    parser.add_argument("--section", choices=sorted(SECTIONS))
    parser.add_argument("--only", help="sections to run, by commas")
    parser.add_argument("--kernels", type=names, help='kernels by commas, or "none"')
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--per-skill", type=int, default=2)
    parser.add_argument("--job", default="")
    args = parser.parse_args()
    if args.section:
        torch.set_num_threads(2)
        report: Report = {}
        try:
            report = SECTIONS[args.section](args)
        except Exception:
            report["failure"] = traceback.format_exc()[-1500:]
        (Path(args.out) / f"section-{args.section}.json").write_text(json.dumps(report))
        return 0
    wanted = args.only.split(",") if args.only else list(ORDER)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    everything: Report = {"gpu": gpu, "torch": torch.__version__, "sections": {}}
    path = Path(args.out) / "selftest.json"
    for section in wanted:
        chosen = args.kernels
        report = child(section, args, [], TIMEOUTS_S[section])
        args.kernels = chosen
        if section == "probe" and args.kernels is None:
            args.kernels = set(report.get("enabled", []))  # none if the probe itself failed
        everything["sections"][section] = report
        path.write_text(json.dumps(everything, indent=1))
        print(f"== {section} ({report['total_s']} s)", flush=True)
        print(json.dumps(report)[:6000], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

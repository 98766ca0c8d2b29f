"""``decant verify``: runs a fixture (config, weights, expected values) through the engine and
compares. Layout of a fixture: tests/golden/README.md and the README of each folder.

Trunk fixtures hold logits, streams and drafts of one sequence; state fixtures (``cuts``) hold the
state after T tokens; ``op.*`` tensors are single operations.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from decant.engine.checkpoint import Checkpoint, TensorEntry, read_header
from decant.engine.cpu_engine import CpuEngine
from decant.engine.draft import CpuDraftEngine
from decant.engine.interface import DraftSlot, PrefillChunk, SlotRows, StepPlan
from decant.engine.kv_layout import KVLayout
from decant.engine.pool import Pool
from decant.engine.reference import ops
from decant.engine.reference.model import load_model
from decant.engine.weights import WeightReader
from decant.protocol.errors import CheckpointError

CHUNK = 64
MAX_DRAFTS = 7
OP_BOUND = 1e-5  # of products, relative to the largest expected value


@dataclass(frozen=True)
class Check:
    """One compared quantity. bound_mean 0: only the maximum is bounded."""

    name: str
    worst: float
    mean: float
    bound: float
    bound_mean: float = 0.0

    @property
    def is_ok(self) -> bool:
        return self.worst <= self.bound and (not self.bound_mean or self.mean <= self.bound_mean)


@dataclass(frozen=True)
class Bounds:
    """Largest and mean difference of logits that a fixture allows a float32 engine."""

    worst: float
    mean: float = 0.0


def bounds_of(folder: Path, is_quantised: bool) -> Bounds:
    """From the fixture's README; without one, those of the shared fixtures."""
    text = (folder / "README.md").read_text() if (folder / "README.md").exists() else ""
    if is_quantised:
        found = re.search(
            r"float32 activations with the simulation: mean <= (\S+), max <= ([\d.e-]+)", text
        )
        return (
            Bounds(float(found[2].rstrip(".*")), float(found[1])) if found else Bounds(0.4, 0.035)
        )
    found = re.search(r"float32 implementation: ([\d.e-]+)", text)
    return Bounds(float(found[1]) if found else 1e-4)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file. Raises: CheckpointError."""
    kinds = {
        "F32": torch.float32, "I64": torch.int64, "I32": torch.int32, "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.uint8,
    }  # fmt: skip
    entries, _ = read_header(path)
    data = path.read_bytes()

    def tensor(entry: TensorEntry) -> Tensor:
        if entry.dtype not in kinds:
            raise CheckpointError(f"{path}: tensor {entry.name} has dtype {entry.dtype}")
        if entry.begin == entry.end:
            return torch.empty(entry.shape, dtype=kinds[entry.dtype])
        raw = bytearray(data[entry.begin : entry.end])
        return torch.frombuffer(raw, dtype=kinds[entry.dtype]).view(entry.shape)

    return {name: tensor(entry) for name, entry in entries.items()}


class Fixture:
    """A fixture folder, loaded into an engine of its own and a draft engine on the same pool.

    Raises: CheckpointError."""

    def __init__(self, folder: Path, page_tokens: int = 128) -> None:
        torch.set_num_threads(1)
        self.folder = folder
        self.expected = read_tensors(folder / "expected.safetensors")
        checkpoint = Checkpoint(folder)
        self.shape = checkpoint.shape
        self.is_quantised = any(e.dtype == "F8_E4M3" for e in checkpoint.entries.values())
        self.bounds = bounds_of(folder, self.is_quantised)
        tokens = len(self.expected["prompt_ids"]) + len(self.expected.get("decode_ids", ()))
        num_pages = -(-(tokens + MAX_DRAFTS + 1) // page_tokens)
        layout = KVLayout(self.shape, page_tokens)
        pool = Pool.create(f"decant-verify-{os.getpid()}-", layout, num_pages, 1)
        self.reader = WeightReader(checkpoint)
        with torch.inference_mode():
            self.model = load_model(self.reader, self.is_quantised, trunk=True, mtp="full")
        context = num_pages * page_tokens
        self.engine = CpuEngine(self.model, pool, context, MAX_DRAFTS, checkpoint.model_hash)
        self.table = tuple(range(num_pages))
        self.draft: CpuDraftEngine | None = None
        if self.shape.has_mtp:
            self.draft = CpuDraftEngine(self.model, layout, MAX_DRAFTS, checkpoint.model_hash)
            self.draft.attach("engine", self.engine.pools())

    def close(self) -> None:
        if self.draft is not None:
            self.draft.close()
        self.engine.close()

    def compare(self, name: str, got: Tensor, want: Tensor, bounds: Bounds | None = None) -> Check:
        bounds = bounds or self.bounds
        if got.shape != want.shape:
            raise CheckpointError(f"{name}: {list(got.shape)} instead of {list(want.shape)}")
        gap = (got.double() - want.double()).abs()
        if not len(gap.flatten()):
            return Check(name, 0.0, 0.0, bounds.worst, bounds.mean)
        worst = gap.max().item()
        return Check(
            name,
            worst if worst == worst else float("inf"),
            gap.mean().item(),
            bounds.worst,
            bounds.mean,
        )

    # -- running -----------------------------------------------------------------------------------

    def prefill(self, ids: Tensor, chunk: int = CHUNK) -> None:
        self.engine.clear_slot(0)
        for at in range(0, len(ids), chunk):
            part = ids[at : at + chunk].numpy().astype(np.int32)
            self.engine.step(StepPlan(0, (), PrefillChunk(0, at, part, self.table)))

    def decode(self, position: int, token: int) -> tuple[Tensor, Tensor]:
        """Logits [vocab] and streams [S, hidden] of one fed token."""
        rows = SlotRows(0, position, (token,), self.table)
        result = self.engine.step(StepPlan(0, (rows,)))
        return torch.from_numpy(result.logits[0]), torch.from_numpy(result.streams[0])

    def mtp(self, start: int, tokens: Sequence[int], streams: Tensor) -> tuple[Tensor, Tensor]:
        """Teacher-forced MTP rows: (logits, streams). streams: [rows, S, hidden]."""
        assert self.draft is not None and self.model.mtp is not None
        logits, out = [], []
        for at in range(0, len(tokens), MAX_DRAFTS + 1):
            part = tuple(tokens[at : at + MAX_DRAFTS + 1])
            given = streams[at : at + len(part)]
            slot = DraftSlot(0, start + at, part, given.numpy(), 0)
            rows = [SlotRows(0, start + at, part, ())]
            own, _ = self.draft.forward(self.engine.pool, [slot], rows, [given])
            out.append(own[: len(part)])
            logits.append(self.model.logits(out[-1], self.model.mtp.head))
        return torch.cat(logits), torch.cat(out)


# -- trunk fixtures --------------------------------------------------------------------------------


def check_trunk(f: Fixture) -> Iterable[Check]:
    want = f.expected
    prompt, fed = want["prompt_ids"], want["decode_ids"].tolist()
    total = len(prompt)
    before: list[Tensor] = []
    chunk = PrefillChunk(0, 0, prompt.numpy().astype(np.int32), f.table)
    f.engine.clear_slot(0)
    plan = f.engine.planner.plan((), chunk)
    streams = f.model.run_trunk(plan, f.engine.pool, lambda _, x: before.append(x))[:total]
    logits = f.model.logits(streams)
    picked = want.get("logit_positions", torch.arange(total))
    yield f.compare("prefill logits", logits[picked], want["logits_prefill"])
    probes = torch.stack([x[want["probe_positions"]] for x in [*before, streams]])
    yield f.compare("layer streams", probes, want["layer_streams"])
    f.prefill(prompt)
    last = torch.from_numpy(f.engine.last_streams([0]))
    yield f.compare("last streams, prefill in chunks", last[0], want["streams_last"])
    head = torch.from_numpy(f.engine.head([0]))[0]
    yield f.compare("last logits, prefill in chunks", head, want["logits_prefill"][-1])
    steps = [f.decode(total + i, token) for i, token in enumerate(fed)]
    yield f.compare("decode logits", torch.stack([s[0] for s in steps]), want["logits_decode"])
    yield f.compare("streams after decode", steps[-1][1], want["streams_decode_last"])
    if f.draft is None:
        return
    f.prefill(prompt)  # again: the decoded tokens must not be in the MTP ring
    yield from check_mtp(f, streams, last[0], torch.stack([s[1] for s in steps]))


def check_mtp(f: Fixture, streams: Tensor, last: Tensor, decoded: Tensor) -> Iterable[Check]:
    """streams: trunk's of the prompt; last: of its last position; decoded: of the fed tokens."""
    assert f.draft is not None and f.model.mtp is not None
    want, prompt = f.expected, f.expected["prompt_ids"]
    total = len(prompt)
    # The chain first, on keys that the prefill wrote; then it is rolled back by writing over it.
    first = int(want["mtp_chain_tokens"][0])
    token, given, chain_logits, chain_streams, drafts = first, last[None], [], [], [first]
    for depth in range(len(want["mtp_chain_logits"])):
        logits, own = f.mtp(total - 1 + depth, [token], given)
        chain_logits.append(logits[0])
        chain_streams.append(own[0])
        token, given = int(logits[0].argmax()), own
        drafts.append(token)
    yield f.compare("MTP chain logits", torch.stack(chain_logits), want["mtp_chain_logits"])
    yield f.compare("MTP chain streams", torch.stack(chain_streams), want["mtp_chain_streams"])
    slot = DraftSlot(0, total - 1, (first,), last[None].numpy(), len(drafts) - 1, temperature=0.0)
    proposed = f.draft.propose("engine", [slot])[0]
    exact = Bounds(0.0)
    wanted = want["mtp_chain_tokens"].float()
    yield f.compare("MTP chain tokens", torch.tensor(drafts).float(), wanted, exact)
    yield f.compare("drafts proposed", torch.tensor(proposed).float(), wanted[1:], exact)
    fed = want["decode_ids"].tolist()
    given = torch.cat([last[None], decoded])[: len(fed)]
    logits, _ = f.mtp(total - 1, fed, given)
    yield f.compare("MTP decode logits", logits, want["mtp_logits_decode"])
    logits, _ = f.mtp(0, prompt[1:].tolist(), streams[:-1])
    picked = want.get("mtp_positions", torch.arange(total - 1))
    yield f.compare("MTP prefill logits", logits[picked], want["mtp_logits_prefill"])


# -- state fixtures --------------------------------------------------------------------------------


def state_of(f: Fixture, total: int) -> dict[str, Tensor]:
    """The live state after ``total`` tokens, under the fixture's names."""
    pool, shape = f.engine.pool, f.shape
    out = {}
    for rows in pool.layout.live_in_slot(total):
        part = rows.part
        positions = np.arange(rows.first, rows.first + rows.count)
        data = torch.from_numpy(pool.slot_rows(part.name, part.layer, 0)[positions % part.rows])
        if part.name in ("csa_state", "index_state", "hca_state"):
            half = part.width // 2
            prefix = "index_" if part.name == "index_state" else ""
            out[f"{prefix}state_c.layer{part.layer}"] = data[:, :half]
            out[f"{prefix}state_s.layer{part.layer}"] = data[:, half:]
        elif part.name == "streams":
            out["streams"] = data.view(shape.hc_mult, shape.hidden_size)
        elif part.name == "mtp_window":
            out["mtp_window"] = data
        else:
            out[f"window.layer{part.layer}"] = data
    for (name, layer), part in pool.layout.page_parts.items():
        count = total // (128 if name == "hca" else 4)
        pages = [
            torch.from_numpy(
                pool.page_rows(name, layer, p)[: min(part.rows, count - p * part.rows)]
            )
            for p in range(-(-count // part.rows))
        ]
        kind = "index_entries" if name == "index" else "entries"
        out[f"{kind}.layer{layer}"] = torch.cat(pages) if pages else torch.empty(0, part.width)
    return out


def check_state(f: Fixture) -> Iterable[Check]:
    want, ids = f.expected, f.expected["prompt_ids"]
    for total in want["cuts"].tolist():
        f.prefill(ids[:total])
        prefix = f"T{total}."
        groups: dict[str, list[Check]] = {}
        for name, data in state_of(f, total).items():
            check = f.compare(name, data, want[prefix + name])
            groups.setdefault(name.split(".")[0], []).append(check)
        for name, checks in groups.items():
            worst = max(c.worst for c in checks)
            yield Check(f"T {total} {name}", worst, max(c.mean for c in checks), f.bounds.worst)
        head = torch.from_numpy(f.engine.head([0]))[0]
        yield f.compare(f"T {total} logits_last", head, want[prefix + "logits_last"])
        streams = torch.from_numpy(f.engine.last_streams([0]))[0]
        fed = ids[total : total + 8].tolist()
        logits, mtp = [], []
        for i, token in enumerate(fed):
            if f.draft is not None:
                mtp.append(f.mtp(total - 1 + i, [token], streams[None])[0][0])
            row, streams = f.decode(total + i, token)
            logits.append(row)
        yield f.compare(
            f"T {total} logits_next8", torch.stack(logits), want[prefix + "logits_next8"]
        )
        if mtp:
            wanted = want[prefix + "mtp_logits_next8"]
            yield f.compare(f"T {total} mtp_logits_next8", torch.stack(mtp), wanted)


# -- operations ------------------------------------------------------------------------------------


def check_ops(f: Fixture) -> Iterable[Check]:
    """``op.*``: roundings bit for bit, products to OP_BOUND of the largest output."""
    want, exact = f.expected, Bounds(0.0)
    for name in sorted({k[3:].rsplit(".", 1)[0] for k in want if k.startswith("op.")}):
        part = {k.rsplit(".", 1)[1]: v for k, v in want.items() if k.startswith(f"op.{name}.")}
        x = part["x"]
        if name == "act_quant":
            codes, scale = ops.quantise_e4m3(x, 128)
            same = codes.view(torch.uint8).float(), part["q"].view(torch.uint8).float()
            yield f.compare("op act_quant codes", *same, exact)
            stored = torch.ldexp(torch.ones_like(scale), part["scale"].int() - 127)
            yield f.compare("op act_quant scale", scale, stored, exact)
        elif name == "kv_quant":
            got = ops.round_kv(x.clone(), f.shape.qk_rope_head_dim)
            yield f.compare("op kv_quant", got, part["y"], exact)
        elif name == "fp4_ties":
            yield f.compare("op fp4_ties", ops.round_e2m1(x), part["y"], exact)
        elif name == "index_quant":
            turned = torch.mm(x, ops.hadamard(x.shape[1]))
            yield f.compare("op hadamard", turned, part["hadamard"], _relative(part["hadamard"]))
            got = ops.round_e2m1(part["hadamard"].clone())
            yield f.compare("op index_quant", got, part["y"], exact)
        else:
            y = _product(f, name, x, part)
            yield f.compare(f"op {name}", y, part["y"], _relative(part["y"]))


def _relative(y: Tensor) -> Bounds:
    return Bounds(OP_BOUND * y.abs().max().item())


def _product(f: Fixture, name: str, x: Tensor, part: dict[str, Tensor]) -> Tensor:
    get = f.reader.full
    if name.startswith("expert."):
        owner = name.removeprefix("expert.") + "."
        v = ops.round_e4m3(x, 128)
        a, b = (torch.mm(v, get(owner + w + ".weight").t()) for w in ("w1", "w3"))
        g = ops.swiglu(a, b, f.shape.swiglu_limit) * part["route_weight"][:, None]
        return torch.mm(ops.round_e4m3(g, 128), get(owner + "w2.weight").t())
    weight = get(name + ".weight")
    if name.endswith("wo_a"):  # grouped, its input is not rounded
        blocks = weight.view(f.shape.o_groups, -1, weight.shape[1])
        return torch.einsum("tgk,gok->tgo", x, blocks)
    return torch.mm(ops.round_e4m3(x, 128), weight.t())


# -- all -------------------------------------------------------------------------------------------


def verify_folder(folder: Path) -> list[Check]:
    """Every check that the fixture has data for. Raises: CheckpointError."""
    fixture = Fixture(folder)
    try:
        with torch.inference_mode():
            checks: list[Check] = []
            if "logits_prefill" in fixture.expected:
                checks += check_trunk(fixture)
            if "cuts" in fixture.expected:
                checks += check_state(fixture)
            checks += check_ops(fixture)
    finally:
        fixture.close()
    if not checks:
        raise CheckpointError(f"{folder}: expected.safetensors holds nothing that can be checked")
    return checks


def report(folder: Path, checks: list[Check]) -> str:
    """A table of the checks."""
    lines = [f"{folder.name}"]
    for c in checks:
        bound = f"{c.bound:.2g}" + (f", mean {c.bound_mean:.2g}" if c.bound_mean else "")
        state = "ok" if c.is_ok else "WRONG"
        lines.append(
            f"  {c.name:<40} max {c.worst:9.2e}  mean {c.mean:9.2e}  <= {bound:<18} {state}"
        )
    return "\n".join(lines)

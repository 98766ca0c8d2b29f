"""Trains the demo model: `python -P -m decant.engine.demo.train --out DIR [--resume DIR] ...`.

One call is one piece of training with its own learning-rate schedule; a later piece resumes from
the weights of an earlier one (optimisers start afresh). Generated data, seeded; clocked in steps or
in seconds of training after compilation, and never past --deadline seconds after the start. A piece
clocked in steps that the deadline cut short goes on with --resume and --begin. `recipe.py` calls
this once per piece.
"""

import argparse
import json
import math
import multiprocessing as mp
import os
import queue as queues
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decant.engine.demo import checkpoint, corpus
from decant.engine.demo.bpe import Encoder
from decant.engine.demo.network import Model
from decant.engine.demo.optimiser import make_optimisers
from decant.engine.demo.score import evaluate, prepare
from decant.engine.demo.shape import CONFIG, check_shape

SHORT_REACH = (4, 8, 8, 16)
"""Windows of the rows that must find near things among the compressed entries."""
QUEUE = 24
COMPILING = 3
"""Steps after which everything is compiled and the clock starts."""
UNFINISHED = 3
"""Exit code of a piece that the deadline cut short."""
FEED_TIMEOUT_S = 120
WARM_TIMEOUT_S = 150
DRAFT_WEIGHTS = (0.3, 0.15, 0.1)
LIMIT_BYTES = 16_600_000


def feed(out: Any, a: argparse.Namespace, seed: int, naked: Any) -> None:
    """One feeder process: batches into a bounded queue."""
    encode = Encoder(a.tokenizer)
    reach = (60, a.far_most)
    for item in corpus.batches(encode, seed, a.batch, a.length, lambda: naked.value, a.far, reach):
        out.put(item)


def schedule(f: float, a: argparse.Namespace) -> float:
    """Learning-rate factor at progress f: constant, then linear from a.decay_from to the end."""
    if f < a.decay_from:
        return 1.0
    return float(1 + (a.last - 1) * (f - a.decay_from) / max(1 - a.decay_from, 1e-9))


def short_share(f: float, a: argparse.Namespace) -> float:
    """Share of rows with a short window: up within the first tenth, gone after four fifths."""
    return float(a.short * min(1.0, f / 0.1, max(0.0, (0.8 - f) / 0.2)))


class Rounding:
    """Quantisation-aware steps: the weights stand rounded during forward and backward, and the
    update goes to the unrounded masters (a straight-through estimate)."""

    def __init__(self, model: Model) -> None:
        named = [
            (n, p) for n, p in model.named_parameters() if checkpoint.rounded(n, p.data) is not None
        ]
        # Parameters of one kind and shape are rounded together: otherwise the many small launches
        # of the 80 parameters cost half a step.
        self.sets: dict[Any, list[tuple[str, nn.Parameter]]] = {}
        for n, p in named:
            experts = n.rsplit(".", 1)[-1] in checkpoint.STACKED
            self.sets.setdefault((experts, p.shape), []).append((n, p))
        self.masters: list[list[Tensor]] = []

    @torch.no_grad()
    def put(self) -> None:
        """Rounds the weights and keeps the masters aside."""
        self.masters = [[p.data for _, p in members] for members in self.sets.values()]
        for members, masters in zip(self.sets.values(), self.masters, strict=True):
            value = checkpoint.rounded(members[0][0], torch.stack(masters))
            assert value is not None
            for (_, p), v in zip(members, value.unbind(), strict=True):
                p.data = v

    def take_back(self) -> None:
        """Restores the masters."""
        for members, masters in zip(self.sets.values(), self.masters, strict=True):
            for (_, p), master in zip(members, masters, strict=True):
                p.data = master
        self.masters = []


WARM = ("ratio0-hash", "ratio4", "ratio128", "ratio0", "draft1", "draft2", "loss", "collapse")


def warm(kind: str, a: argparse.Namespace) -> None:
    """Compiles one part, forward and backward, so that the code lies in inductor's cache: the parts
    compile side by side in processes of their own, and the trainer then only loads them."""
    device = torch.device("cuda")
    model = Model(CONFIG).to(device)
    model.compile_parts()
    c, B, T = model.c, a.batch, a.length
    tables = model.tables(T, device)
    plain, wide = tables[False, c.head_dim], tables[True, c.head_dim]
    index = tables[True, c.index_head_dim]
    x = torch.randn(B, T, 4, c.hidden_size, device=device, dtype=torch.bfloat16).requires_grad_()
    batch = torch.randint(3, c.vocab_size, (B, T + 2), device=device)
    weights = torch.ones(batch.shape, device=device)
    ids, nxt = batch[:, :T].contiguous(), batch[:, 1 : T + 1].contiguous()
    seg = (ids == 0).cumsum(1)
    reach = torch.full((B,), 8, device=device)
    layers: Any = model.layers
    draft = model.draft_fn
    assert draft is not None
    with torch.autocast("cuda", dtype=torch.bfloat16):
        embedded = F.embedding(nxt, model.embed.weight).to(torch.bfloat16)
        if kind == "ratio0-hash":
            out = layers[0](x, ids, seg, plain, index, 0, False, None, None)
        elif kind == "ratio4":
            out = layers[1](x, ids, seg, wide, index, a.topk, True, None, reach)
        elif kind == "ratio128":
            out = layers[2](x, ids, seg, wide, index, 0, False, None, reach)
        elif kind == "ratio0":
            out = layers[4](x, ids, seg, plain, index, 0, False, None, reach)
        elif kind == "draft1":
            out = draft(x, embedded, nxt, seg, plain, None)
        elif kind == "draft2":
            keys = torch.randn(B, T, c.head_dim, device=device, dtype=torch.bfloat16)
            out = draft(x, embedded, nxt, seg, plain, keys.requires_grad_())
        elif kind == "loss":
            out = model.loss_fn(
                x[:, :, 0].contiguous(),
                model.head.weight,
                batch[:, 1 : T + 1],
                weights[:, 1 : T + 1],
            )
        else:
            out = (model.collapse_fn(x),)
    total = torch.zeros((), device=device)
    for o in out:
        if o.is_floating_point() and o.requires_grad:
            total = total + o.float().mean()
    torch.autograd.backward(total)
    torch.cuda.synchronize()


def warm_all(a: argparse.Namespace) -> None:
    """Runs `warm` for every part side by side; the trainer compiles what fails here."""
    base = [sys.executable, "-P", "-m", "decant.engine.demo.train", "--batch", str(a.batch)]
    base += ["--length", str(a.length), "--topk", str(a.topk), "--out", str(a.out), "--warm"]
    env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "1"}
    began = time.time()
    running = {k: subprocess.Popen([*base, k], env=env) for k in WARM}
    for kind, p in running.items():
        try:
            code = p.wait(timeout=max(1.0, WARM_TIMEOUT_S - (time.time() - began)))
        except subprocess.TimeoutExpired:
            p.kill()
            code = p.wait()
        print(f"warm {kind}: exit {code} after {time.time() - began:.0f} s", flush=True)


def take(queue: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """The next batch on the device. Raises RuntimeError if the feeders have stopped."""
    try:
        x, w = queue.get(timeout=FEED_TIMEOUT_S)
    except queues.Empty:
        raise RuntimeError("the feeder processes deliver nothing") from None
    ids = torch.from_numpy(x).to(device, non_blocking=True).long()
    return ids, torch.from_numpy(w).to(device, non_blocking=True).float()


class Trainer:
    """Model, optimisers and one training step."""

    def __init__(self, a: argparse.Namespace, device: torch.device) -> None:
        self.a, self.device = a, device
        self.dt = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = Model(CONFIG, a.seed)
        if a.resume:
            checkpoint.load_published(self.model, checkpoint.read_state(a.resume))
        self.model.to(device)
        if a.compile:
            self.model.compile_parts()
        self.tables = self.model.tables(a.length, device)
        self.muon, self.adam = make_optimisers(
            self.model, self.model.c.o_groups, a.lr, a.lr_table, a.lr_fn, a.lr_rest
        )
        self.rounding = Rounding(self.model)
        owners: list[Any] = [*self.model.layers, *self.model.mtp]
        self.gates = [owner.ffn.gate for owner in owners]
        self.reaches = torch.tensor(SHORT_REACH, device=device)

    def autocast(self) -> Any:
        return torch.autocast(
            self.device.type, dtype=torch.bfloat16, enabled=self.dt == torch.bfloat16
        )

    def step(
        self, x: Tensor, w: Tensor, factor: float, short: float, rounded: bool
    ) -> tuple[dict[str, Any], Tensor]:
        """One update. Returns what `Model.losses` gives and the sum of the weights."""
        a, model = self.a, self.model
        n = len(x)
        reach = torch.where(
            torch.rand(n, device=self.device) < short,
            self.reaches[torch.randint(len(SHORT_REACH), (n,), device=self.device)],
            model.c.sliding_window,
        )
        if rounded:
            self.rounding.put()
        with self.autocast():
            out = model.losses(
                x, w, self.tables, self.dt, a.topk, learn_index=True, drafts=a.drafts, reach=reach
            )
        total = w.sum()
        loss = out["main"] / total + out["index"]
        for k in range(1, a.drafts + 1):
            loss = loss + DRAFT_WEIGHTS[k - 1] * out[f"mtp{k}"] / total
        loss.backward()
        if rounded:
            self.rounding.take_back()
        self.muon.step(factor)
        for group in self.adam.param_groups:
            group["lr"] = group["peak"] * factor
        self.adam.step()
        for p in model.parameters():
            p.grad = None
        with torch.no_grad():
            for gate, load in zip(self.gates, out["loads"], strict=True):
                if not gate.hashed:
                    gate.bias += a.balance * torch.sign(load.mean() - load)
        return out, total


def run(a: argparse.Namespace) -> bool:
    """Trains, prints one JSON line per a.log_every steps, saves every a.save_every seconds. False
    if the deadline came before a.steps."""
    began = time.time()
    check_shape(CONFIG)
    ctx = mp.get_context("fork")
    queue, naked = ctx.Queue(QUEUE), ctx.Value("d", a.naked)
    first_seed = 1000 * a.seed + 1_000_000 * a.begin  # a piece that goes on sees new data
    feeders = [
        ctx.Process(target=feed, args=(queue, a, first_seed + i, naked), daemon=True)
        for i in range(a.workers)
    ]
    for p in feeders:
        p.start()
    exam = prepare(Encoder(a.tokenizer), corpus.EVALUATED, a.eval_rows, a.length, 1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    if a.compile and device.type == "cuda":
        warm_all(a)
    t = Trainer(a, device)
    a.out.mkdir(parents=True, exist_ok=True)
    log = (a.out / "log.jsonl").open("a")
    count = sum(p.numel() for p in t.model.parameters())
    print(f"{count} parameters, ready after {time.time() - began:.0f} s", flush=True)

    def report(row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        log.write(json.dumps(row) + "\n")
        log.flush()

    def examine(rounded: bool) -> dict[str, Any]:
        if rounded:
            t.rounding.put()
        score = evaluate(t.model, exam, t.tables, t.dt, a.drafts, a.batch, a.topk, learn_index=True)
        if rounded:
            t.rounding.take_back()
        return {"acc": score.table(), "accept": score.acceptance()}

    def save() -> None:
        checkpoint.write_plain(a.out, t.model, LIMIT_BYTES)
        report({"saved": done})

    done, start, budget, clock = a.begin, 0.0, math.inf, time.time
    last_eval = last_save = clock()
    mark = (0, clock())
    while True:
        x, w = take(queue, device)
        if done == a.begin + COMPILING:  # the clock starts after compilation
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = clock()
            last_eval = last_save = start
            mark = (done, start)
            budget = max(1e-6, min(a.seconds, a.deadline - (start - began) - a.reserve))
            print(f"compiled after {start - began:.0f} s, {budget:.0f} s to train", flush=True)
        spent = (clock() - start) / budget if start else 0.0
        f = done / a.steps if a.steps else spent
        if f >= 1 or spent >= 1:
            break
        naked.value = a.naked + (a.naked_last - a.naked) * min(1.0, f / 0.6)
        factor = schedule(f, a) * min(1.0, (done - a.begin + 1) / a.warmup)
        rounded = f >= a.round_from
        out, total = t.step(x, w, factor, short_share(f, a), rounded)
        done += 1
        if done % a.log_every:
            continue
        loss, now = (out["main"] / total).item(), clock()
        rate = (done - mark[0]) / (now - mark[1])
        row = {
            "step": done,
            "s": round(now - (start or now), 1),
            "f": round(f, 3),
            "loss": round(loss, 4),
            "mtp": [round((out[f"mtp{k}"] / total).item(), 4) for k in range(1, a.drafts + 1)],
            "index": round(float(out["index"].detach()), 3),
            "tok_s": round(rate * a.batch * a.length),
            "queue": queue.qsize(),
        }
        mark = (done, now)
        if not math.isfinite(loss):
            raise SystemExit(f"the loss is not finite at step {done}")
        if now - last_eval > a.eval_every:
            row.update(examine(rounded))
            loads = torch.stack([v for v in out["loads"][1:]])
            row["load"] = [round(loads.min().item(), 3), round(loads.max().item(), 3)]
            last_eval = clock()
        report(row)
        if now - last_save > a.save_every:
            save()
            last_save = clock()
        mark = (done, clock())
    save()
    print(f"saved after {clock() - began:.0f} s", flush=True)
    for p in feeders:
        p.terminate()
    if f < 1:
        return False
    final = {"final": True, "step": done, "s": round(clock() - start, 1)}
    if device.type == "cuda":
        final["memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    report({**final, "rounded": a.round_from < 1, **examine(a.round_from < 1)})
    print(f"finished after {clock() - began:.0f} s", flush=True)
    return True


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    here = Path(__file__).parent
    p = argparse.ArgumentParser(description="train the demo model")
    p.add_argument("--out", type=Path, required=True, help="weights, config.json and log.jsonl")
    p.add_argument("--resume", type=Path, help="start from the weights of this folder")
    p.add_argument("--tokenizer", type=Path, default=here / "tokenizer.json")
    p.add_argument("--seconds", type=float, default=1e9, help="train this long after compilation")
    p.add_argument("--steps", type=int, default=0, help="or for this many steps")
    p.add_argument("--begin", type=int, default=0, help="of --steps, done before (see --resume)")
    p.add_argument("--deadline", type=float, default=1e9, help="end within this time, s")
    p.add_argument("--reserve", type=float, default=15, help="of it, kept for the last save, s")
    p.add_argument("--batch", type=int, default=20)
    p.add_argument("--length", type=int, default=2304, help="tokens a row, a multiple of 128")
    p.add_argument("--lr", type=float, default=0.02, help="Muon")
    p.add_argument("--lr-table", type=float, default=3e-3, help="embedding and head")
    p.add_argument("--lr-fn", type=float, default=3e-4, help="hyper-connection projections")
    p.add_argument("--lr-rest", type=float, default=2e-3)
    p.add_argument("--warmup", type=int, default=50)
    p.add_argument("--decay-from", type=float, default=0.5)
    p.add_argument("--last", type=float, default=0.02, help="rate factor at the end")
    p.add_argument("--balance", type=float, default=1e-3, help="step of the gate bias")
    p.add_argument("--naked", type=float, default=0.6, help="share of bare rows at the start")
    p.add_argument("--naked-last", type=float, default=0.25, help="and from 60 %% of the run on")
    p.add_argument("--far", type=float, default=0.12, help="share of rows with a long fact block")
    p.add_argument("--far-most", type=int, default=2000, help="tokens of the longest fact block")
    p.add_argument("--short", type=float, default=0.6, help="share of rows with a short window")
    p.add_argument("--topk", type=int, default=0, help="entries the indexer may choose; 0 = all")
    p.add_argument("--round-from", type=float, default=1.0, help="progress where rounding begins")
    p.add_argument("--drafts", type=int, default=2)
    p.add_argument("--workers", type=int, default=10)
    p.add_argument("--eval-every", type=float, default=60)
    p.add_argument("--eval-rows", type=int, default=32)
    p.add_argument("--save-every", type=float, default=60)
    p.add_argument("--log-every", type=int, default=50)
    p.add_argument("--compile", action="store_true")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--warm", choices=WARM, help=argparse.SUPPRESS)
    a = p.parse_args(argv)
    if a.length % 128 or a.length < 256:
        p.error("--length is a multiple of 128, at least 256")
    if a.begin and not (a.begin < a.steps and a.resume):
        p.error("--begin needs --resume and more --steps than it")
    return a


if __name__ == "__main__":
    arguments = parse()
    if arguments.warm:
        warm(arguments.warm, arguments)
    else:
        sys.exit(0 if run(arguments) else UNFINISHED)

"""Which code runs each operation of a step: a kernel where one fits the shape, plain torch
elsewhere. In comparing mode both run and the error of the kernel is kept (``probe.py``).

Nothing here knows of layers, plans or sequences. Kernels are launched on the current stream, with
configurations that depend on shapes alone, so any sequence of calls can be captured.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decant.engine.gpu import plain
from decant.engine.gpu import weights as w
from decant.engine.model_shape import ModelShape
from decant.kernels import (
    activations,
    compressor,
    fp4_moe,
    fp8_linear,
    gate,
    indexer,
    kv_store,
    mhc,
    row_work,
    sparse_mla_decode,
    step_ends,
    tuned,
)
from decant.kernels import wo_a as output_projection
from decant.kernels.config import architecture
from decant.kernels.layout import Part

ALL = (
    "mhc", "linear", "norm", "swiglu", "store", "compress", "rows", "index", "attention", "wo_a",
    "gate", "moe", "begin", "keep",
)  # fmt: skip
DECODE_ROWS = 64  # above, a linear runs unsplit and needs no scratch; inputs are quantised apart
ROTATE_ROWS = 16  # above, the output projection's input is rotated by a launch of its own
TOGETHER_ROWS = 16  # above, a layer's row work runs as launches of its parts, which fill the GPU
CAPTURED_ROWS = 512  # scratch for more rows is of steps that are never captured, and is dropped
RECENT_SCRATCH = 24
MAX_LIST_PAIRS = 1 << 15  # above, the work list is made by sorting


class Codes(NamedTuple):
    """Input of FP8 linears that is quantised already: e4m3 [R, K], factors f32 [K / 128, R]."""

    codes: Tensor
    factors: Tensor


@dataclass
class Rows:
    """Rows of one launch as the operations see them. Device tensors, int32.

    tables: [slots, pages]. ring_of_row and rings: where this launch's window keys lie: the slots
    themselves, or a chunk's buffer. emit: rows that may complete a window (None: any may). most:
    entries of ratio 4 that any row can see. ring_tables: tables by the row's ring number."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    tables: Tensor
    per_sequence: int
    most: int
    ring_of_row: Tensor
    rings: Tensor
    ring_tables: Tensor
    emit: dict[int, Tensor] | None = None
    valid_from: Tensor | None = None
    plan: Any = None  # of the indexer, made by the first layer that chooses


@dataclass(frozen=True)
class Projected:
    """One compressor's projections f32 [R, 2 size], its weights, its ring and its page rows."""

    values: Tensor
    weights: w.Compressor
    state: Part
    part: Part


class Queries(NamedTuple):
    """The indexer's: psi bf16 [R, H, 128] not rotated, omega f32 [R, H], the rows' rope; coded:
    codes and weights as the kernel makes them, if it did."""

    psi: Tensor
    omega: Tensor
    rope: Tensor
    coded: tuple[Tensor, Tensor] | None = None


class Begun(NamedTuple):
    """Streams bf16 [R, 4, hidden] before the first layer; rope rows f32 [R, 64] of the plain and
    the compressed frequencies, and of the entries that a row completes, by ratio."""

    streams: Tensor
    plain: Tensor
    compressed: Tensor
    entries: dict[int, Tensor]


class Boundary(NamedTuple):
    """Streams bf16 [R, 4, hidden]; value bf16 [R, hidden], the normalised input of the next site;
    its post and comb; half: value as fp16, if asked for; given: what the readers take."""

    streams: Tensor
    value: Tensor
    post: Tensor
    comb: Tensor
    half: Tensor | None
    given: Tensor | Codes


class Routed(NamedTuple):
    """Experts int32 [R, k], weights f32 [R, k], the work list if there is one already."""

    experts: Tensor
    weights: Tensor
    tiles: fp4_moe.TileList | None


@dataclass
class Compared:
    """Largest relative error of a kernel against plain torch, and its failures."""

    worst: float = 0.0
    calls: int = 0
    failure: str = ""


@dataclass
class Ops:
    """Attributes: enabled: operations whose kernel may run; comparing: run both; overlap: what
    ``beside`` has runs on a stream of its own (few rows leave most of the GPU idle)."""

    shape: ModelShape
    device: torch.device
    enabled: set[str]
    comparing: bool = False
    tp: int = 1
    overlap: bool = False
    compared: dict[str, Compared] = field(default_factory=dict)
    _scratch: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    _recent: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._side: Any = None
        self.arch = architecture(self.device) if self.device.type == "cuda" else "sm_90"
        self.enabled &= set(fitting(self.shape, self.tp))

    @classmethod
    def create(
        cls, shape: ModelShape, device: torch.device, names: set[str] | None = None, tp: int = 1
    ) -> Ops:
        """names: kernels that may run; None: all on a GPU, and under Triton's interpreter."""
        if names is None:
            has_kernels = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
            names = set(ALL) if has_kernels else set()
        return cls(shape, device, set(names), tp=tp)

    # -- dispatch ----------------------------------------------------------------------------------

    def _pick(
        self, name: str, fits: bool, kernel: Callable[[], Any], torch_path: Callable[[], Any]
    ) -> Any:
        """Run one or both. A result is a tensor or a tuple of tensors."""
        if name not in self.enabled or not fits:
            return torch_path()
        if not self.comparing:
            return kernel()
        wanted = torch_path()
        note = self.compared.setdefault(name, Compared())
        note.calls += 1
        try:
            got = kernel()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except Exception as error:
            note.failure = f"{type(error).__name__}: {error}"[:300]
            self.enabled.discard(name)
            return wanted
        one = (got,) if isinstance(got, Tensor) else got
        two = (wanted,) if isinstance(wanted, Tensor) else wanted
        for a, b in zip(one, two, strict=True):
            if a is None or b is None:
                continue
            note.worst = max(note.worst, relative_error(a, b))
        return wanted

    def _kept(self, key: tuple[Any, ...], rows: int, make: Callable[[], Any]) -> Any:
        """Scratch by operation and shape. Graphs hold that of up to CAPTURED_ROWS rows, so it
        stays; prompts have any length, so of theirs only the latest stays."""
        key = (*key, rows)
        kept = self._scratch if rows <= CAPTURED_ROWS else self._recent
        if key not in kept:
            kept[key] = make()
            if kept is self._recent and len(kept) > RECENT_SCRATCH:
                kept.pop(next(iter(kept)))
        return kept[key]

    def _quantised(self, rows: int, columns: int) -> Any:
        """Room for the e4m3 codes and factors of a linear's input; None for few rows."""
        if rows <= DECODE_ROWS:
            return None

        def make() -> tuple[Tensor, Tensor]:
            codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=self.device)
            return codes, torch.empty(columns // w.BLOCK, rows, device=self.device)

        return self._kept(("quantised", columns), rows, make)

    def _split_scratch(self, rows: int, num: int) -> Any:
        if rows > DECODE_ROWS:
            return None
        return self._kept(
            ("linear", num), rows, lambda: fp8_linear.workspace(num, rows, self.device)
        )

    @contextlib.contextmanager
    def beside(self, rows: int) -> Iterator[None]:
        """What is launched inside may run beside what is launched after it, up to ``join``. It must
        share no scratch with that, and what it makes is kept until then."""
        if not self.overlap or rows > DECODE_ROWS or self.device.type != "cuda":
            yield
            return
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            yield

    def join(self, rows: int) -> None:
        """Wait on the device for what ``beside`` launched."""
        if self._side is not None and self.overlap and rows <= DECODE_ROWS:
            torch.cuda.current_stream(self.device).wait_stream(self._side)

    # -- operations --------------------------------------------------------------------------------

    def begin(self, rows: Rows, embed: Tensor, freq: Tensor, compressed: Tensor) -> Begun:
        """Streams of the rows' tokens, and what is rotated by."""
        fits = self.shape.hc_mult == step_ends.STREAMS

        def kernel() -> tuple[Tensor, Tensor]:
            num, width, device = len(rows.tokens), embed.shape[1], embed.device
            streams = torch.empty(num, step_ends.STREAMS, width, dtype=embed.dtype, device=device)
            ropes = torch.empty(step_ends.KINDS, num, 64, device=device)
            step_ends.begin(rows.tokens, rows.positions, embed, freq, compressed, streams, ropes)
            return streams, ropes

        def torch_path() -> tuple[Tensor, Tensor]:
            e = embed.index_select(0, rows.tokens)
            streams = e[:, None].expand(-1, self.shape.hc_mult, -1).contiguous()
            kinds = ((freq, 0), (compressed, 0), (compressed, 1 - 4), (compressed, 1 - 128))
            ropes = [plain.rope_rows(rows.positions, f, shift) for f, shift in kinds]
            return streams, torch.stack(ropes)

        streams, ropes = self._pick("begin", fits, kernel, torch_path)
        return Begun(streams, ropes[0], ropes[1], {4: ropes[2], 128: ropes[3]})

    def rope(self, positions: Tensor, freq: Tensor) -> Tensor:
        """f32 [R, 64]: cosines and sines of positions x frequencies."""

        def kernel() -> Tensor:
            out = torch.empty(len(positions), 64, device=positions.device)
            return kv_store.rope_rows(positions, freq, out)

        out: Tensor = self._pick("begin", True, kernel, lambda: plain.rope_rows(positions, freq))
        return out

    def keep(
        self,
        rows: Rows,
        streams: Tensor,
        slots: Tensor,
        last: Part,
        recent: Part,
        torch_path: Callable[[], None],
        read: Callable[[], Tensor],
    ) -> None:
        """Streams of the rows into their slots. torch_path: the same in plain torch; read: what a
        reader finds then."""

        def kernel() -> None:
            step_ends.keep(
                streams, rows.slots, rows.positions, slots, last, recent, rows.per_sequence
            )

        self._effect("keep", True, kernel, torch_path, read, [slots])

    def boundary(
        self,
        x: Tensor,
        y: Tensor | None,
        post: Tensor,
        comb: Tensor,
        site: w.Site,
        norm: Tensor,
        half: bool = False,
        readers: tuple[w.Linear, ...] = (),
    ) -> Boundary:
        """post and comb are this site's afterwards (the same tensors, unless comparing). half: give
        fp16 too. readers: the linears that read the result; they get codes if these are free."""
        rounds = self.shape.hc_sinkhorn_iters
        rows, _, width = x.shape
        coded: Codes | None = None
        # only the tuned kernel makes codes in its own launch
        if not self.comparing and tuned.choice(self.arch, "mhc", rows).is_cuda:
            coded = self._room("boundary", rows, width, readers)

        def kernel() -> tuple[Tensor | None, ...]:
            sums = self._kept(("mhc",), rows, lambda: mhc.workspace(rows, self.arch, self.device))
            new_post, new_comb = (post.clone(), comb.clone()) if self.comparing else (post, comb)
            streams = x if y is None else torch.empty_like(x)
            out = torch.empty(rows, width, dtype=torch.bfloat16, device=x.device)
            out16 = torch.empty_like(out, dtype=torch.half) if half else None
            mhc.mhc_boundary(
                x, y, new_post, new_comb, site.fn, site.base, site.scale, norm, streams, sums,
                out, self.arch, out16, codes=coded,
            )  # fmt: skip
            return streams, out, new_post, new_comb, out16

        def torch_path() -> tuple[Tensor | None, ...]:
            made = plain.boundary(x, y, post, comb, site, norm, rounds)
            return *made, made[1].half() if half else None

        fits = rounds == mhc.ROUNDS
        runs = fits and "mhc" in self.enabled
        streams, out, new_post, new_comb, out16 = self._pick("mhc", fits, kernel, torch_path)
        if runs and coded is not None:
            return Boundary(streams, out, new_post, new_comb, out16, coded)
        return Boundary(streams, out, new_post, new_comb, out16, out)

    def _room(
        self, name: str, rows: int, columns: int, readers: tuple[w.Linear, ...]
    ) -> Codes | None:
        """Where codes go that these linears read; None: they want bf16."""
        if not readers or "linear" not in self.enabled or any(r.codes is None for r in readers):
            return None

        def make() -> Codes:
            codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=self.device)
            return Codes(codes, torch.empty(columns // w.BLOCK, rows, device=self.device))

        room: Codes = self._kept(("codes", name, columns), rows, make)
        return room

    def _coded(
        self,
        name: str,
        fits: bool,
        rows: int,
        columns: int,
        readers: tuple[w.Linear, ...],
        kernel: Callable[[Tensor, Tensor], None],
        torch_path: Callable[[], Tensor],
    ) -> Tensor | Codes:
        """What linears read: codes by a kernel, or bf16."""
        fits = fits and columns % w.BLOCK == 0
        room = self._room(name, rows, columns, readers) if fits else None
        if name not in self.enabled or room is None:
            return torch_path()
        if not self.comparing:
            kernel(*room)
            return room
        value = torch_path()

        def decoded() -> Tensor:
            kernel(*room)
            return room.codes.float() * room.factors.t().repeat_interleave(w.BLOCK, 1)

        self._pick(name, True, decoded, lambda: plain.rounded(value))
        return value

    def norm(self, x: Tensor, weight: Tensor, readers: tuple[w.Linear, ...]) -> Tensor | Codes:
        """RMSNorm of x bf16 [R, K], for the linears that read it."""
        eps = self.shape.rms_norm_eps
        return self._coded(
            "norm", eps == activations.EPS, len(x), x.shape[1], readers,
            lambda codes, factors: activations.norm_codes(x, weight, codes, factors),
            lambda: plain.rms_norm(x, weight, eps),
        )  # fmt: skip

    def swiglu(self, x: Tensor, readers: tuple[w.Linear, ...]) -> Tensor | Codes:
        """SwiGLU of x bf16 [R, 2 K] (gates, then ups), for the linears that read it."""
        limit = self.shape.swiglu_limit
        return self._coded(
            "swiglu", limit == fp4_moe.SWIGLU_LIMIT, len(x), x.shape[1] // 2, readers,
            lambda codes, factors: activations.swiglu_codes(x, codes, factors),
            lambda: plain.swiglu(x, limit),
        )  # fmt: skip

    def linear(
        self,
        x: Tensor | Codes,
        weight: w.Linear,
        dtype: torch.dtype = torch.bfloat16,
        coded: bool = False,
    ) -> Tensor:
        """coded: x may come as codes; in comparing mode the kernel then gets it so."""

        def kernel() -> Tensor:
            assert weight.codes is not None and weight.scale is not None
            given = x
            if coded and self.comparing and isinstance(x, Tensor):
                room = self._room("compared", len(x), x.shape[1], (weight,))
                assert room is not None
                fp8_linear.quantise(x, *room)
                given = room
            rows = len(given.codes) if isinstance(given, Codes) else len(given)
            out = torch.empty(rows, weight.num_rows, dtype=dtype, device=self.device)
            scratch = self._split_scratch(rows, weight.num_rows)
            if isinstance(given, Codes):
                return fp8_linear.fp8_linear(
                    given.codes, weight.codes, weight.scale, scratch, out, self.arch,
                    factors=given.factors,
                )  # fmt: skip
            return fp8_linear.fp8_linear(
                given, weight.codes, weight.scale, scratch, out, self.arch,
                quantised=self._quantised(*given.shape),
            )  # fmt: skip

        if isinstance(x, Codes):
            return kernel()
        out: Tensor = self._pick(
            "linear", weight.codes is not None, kernel, lambda: plain.linear(x, weight, dtype)
        )
        return out

    def store(
        self,
        q: Tensor,
        k: Tensor,
        k_norm: Tensor,
        rope: Tensor,
        rows: Rows,
        window: Part,
    ) -> Tensor:
        """Window keys into the rings; returns q normalised and rotated."""

        def kernel() -> Tensor:
            out = torch.empty_like(q) if self.comparing else self._whole(q)
            kv_store.norm_rope_store(
                q, k, k_norm, rope, rows.ring_of_row, rows.positions, rows.rings,
                rows.rings.shape[1], window, out,
            )  # fmt: skip
            return out

        def torch_path() -> Tensor:
            return plain.norm_rope_store(
                q, k, k_norm, rope, rows.ring_of_row, rows.positions, rows.rings, window
            )

        def read() -> Tensor:
            row = rows.positions.clamp(min=0).long() % window.rows
            keys = plain.keys_at(rows.rings, window, rows.ring_of_row.long(), row)
            return keys[rows.positions >= 0]

        out: Tensor = self._effect("store", True, kernel, torch_path, read, [rows.rings])
        return out

    def _effect(
        self,
        name: str,
        fits: bool,
        kernel: Callable[[], Any],
        torch_path: Callable[[], Any],
        read: Callable[[], Tensor],
        touched: list[Tensor],
    ) -> Any:
        """As ``_pick`` for an operation that writes to ``touched``: what it wrote is read back and
        compared, and what plain torch wrote stays."""
        if not self.comparing:
            return self._pick(name, fits, kernel, torch_path)
        before = [t.clone() for t in touched]

        def both(run: Callable[[], Any]) -> tuple[Tensor, ...]:
            for t, old in zip(touched, before, strict=True):
                t.copy_(old)
            result = run()
            written = read()
            return (written,) if result is None else (written, result)

        after: list[Tensor] = []

        def reference() -> tuple[Tensor, ...]:
            got = both(torch_path)
            after.extend(t.clone() for t in touched)
            return got

        got = self._pick(name, fits, lambda: both(kernel), reference)
        for t, new in zip(touched, after, strict=True):
            t.copy_(new)
        return got[1] if len(got) > 1 else None

    def compress(
        self,
        projected: Tensor,
        comp: w.Compressor,
        rope: Tensor,
        rows: Rows,
        slots: Tensor,
        state: Part,
        pages: Tensor,
        part: Part,
        hadamard: Tensor,
    ) -> None:
        def kernel() -> None:
            compressor.compress(
                projected, comp.ape, comp.norm, rope, slots, slots.shape[1], state, pages,
                pages.shape[1], part, rows.slots, rows.positions, rows.tables, comp.ratio,
                rows.per_sequence,
            )  # fmt: skip

        def torch_path() -> None:
            emit = None if rows.emit is None else rows.emit[comp.ratio]
            plain.compress(
                projected, comp, rope, slots, state, pages, part, rows.slots, rows.positions,
                rows.tables, hadamard, emit,
            )  # fmt: skip

        def read() -> Tensor:
            live = rows.positions.clamp(min=0).long()
            closed = (rows.positions >= 0) & ((rows.positions + 1) % comp.ratio == 0)
            live, owner = live[closed], rows.slots.long()[closed]
            entry = live // comp.ratio
            page = rows.tables[owner, entry // part.rows]
            if part.scale_bytes == 8:
                return plain.keys_at(pages, part, page, entry % part.rows)
            data, scale = plain.gather(pages, part, page, entry % part.rows)
            return data.view(torch.float8_e4m3fn).float() * scale.view(torch.float32)

        self._effect("compress", True, kernel, torch_path, read, [slots, pages])

    def row_work(
        self,
        q: Tensor,
        k: Tensor,
        k_norm: Tensor,
        rope: Tensor,
        entry_rope: Tensor | None,
        rows: Rows,
        window: Part,
        slots: Tensor,
        pages: Tensor,
        hadamard: Tensor,
        compressors: list[Projected],
        queries: Queries | None,
    ) -> tuple[Tensor, Queries | None]:
        """What stands between a layer's projections and its attention: q normalised and rotated,
        window keys into the rings, compressors (none, the layer's, the indexer's behind it) into
        slots and pages, the index queries coded. One launch for few rows."""
        together = (
            bool(compressors)
            and {"rows", "store", "compress"} <= self.enabled
            and len(q) <= TOGETHER_ROWS
            and rows.per_sequence <= compressor.MAX_DECODE_ROWS
            and rows.rings.data_ptr() == slots.data_ptr()
        )

        def at_once(q: Tensor) -> tuple[Tensor, Queries | None]:
            given = [
                row_work.Compression(c.values, c.weights.ape, c.weights.norm, c.state, c.part)
                for c in compressors
            ]
            asked, coded = None, queries
            if queries is not None and "index" in self.enabled:
                codes, weights = self._index_room(queries.psi)
                asked = row_work.IndexQueries(queries.psi, queries.omega, codes, weights)
                coded = queries._replace(coded=(codes, weights))
            out = self._whole(q)
            row_work.row_work(
                q, k, k_norm, rope, rows.slots, rows.positions, rows.tables, slots, pages, window,
                rows.per_sequence, compressors[0].weights.ratio, entry_rope, given[0],
                given[1] if len(given) > 1 else None, asked, out,
            )  # fmt: skip
            return out, coded

        if together and not self.comparing:
            return at_once(q)
        if together:
            self._compare_rows(q, slots, pages, at_once, lambda q: self._apart(
                q, k, k_norm, rope, entry_rope, rows, window, slots, pages, hadamard, compressors
            ))  # fmt: skip
        turned = self._apart(
            q, k, k_norm, rope, entry_rope, rows, window, slots, pages, hadamard, compressors
        )
        return turned, queries

    def _apart(
        self,
        q: Tensor,
        k: Tensor,
        k_norm: Tensor,
        rope: Tensor,
        entry_rope: Tensor | None,
        rows: Rows,
        window: Part,
        slots: Tensor,
        pages: Tensor,
        hadamard: Tensor,
        compressors: list[Projected],
    ) -> Tensor:
        """``row_work`` by its parts."""
        q = self.store(q, k, k_norm, rope, rows, window)
        for c in compressors:
            assert entry_rope is not None
            self.compress(
                c.values, c.weights, entry_rope, rows, slots, c.state, pages, c.part, hadamard
            )
        return q

    def _compare_rows(
        self,
        q: Tensor,
        slots: Tensor,
        pages: Tensor,
        at_once: Callable[[Tensor], tuple[Tensor, object]],
        apart: Callable[[Tensor], Tensor],
    ) -> None:
        """The launch for all parts against the launches of the parts: the share of bytes that one
        of them writes otherwise, and the error of q. Leaves everything as it was."""
        before = [t.clone() for t in (slots, pages)]
        note = self.compared.setdefault("rows", Compared())
        note.calls += 1

        def restored() -> list[Tensor]:
            written = [t.clone() for t in (slots, pages)]
            for t, old in zip((slots, pages), before, strict=True):
                t.copy_(old)
            return written

        self.comparing = False  # the parts' kernels, not plain torch
        try:
            wanted_q = apart(q.clone())
            wanted = restored()
            got_q = at_once(q.clone())[0]
            got = restored()
            note.worst = max(note.worst, relative_error(got_q, wanted_q))
            for old, a, b in zip(before, wanted, got, strict=True):
                changed = (a != old).sum().clamp(min=1)
                note.worst = max(note.worst, float((a != b).sum() / changed))
        except Exception as error:
            note.failure = f"{type(error).__name__}: {error}"[:300]
            self.enabled.discard("rows")
            restored()
        finally:
            self.comparing = True

    @staticmethod
    def _whole(q: Tensor) -> Tensor:
        """Where normalised queries go: in place, or out of longer rows."""
        if q.is_contiguous():
            return q
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)

    def _index_room(self, psi: Tensor) -> tuple[Tensor, Tensor]:
        """Results of the index queries' kernel."""
        codes = torch.empty(psi.shape, dtype=torch.float8_e4m3fn, device=psi.device)
        return codes, torch.empty(psi.shape[:2], device=psi.device)

    def select(
        self,
        queries: Queries,
        rows: Rows,
        pages: Tensor,
        part: Part,
        hadamard: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Entries of each row, int32 [R, top k] ascending, and their number."""
        psi, omega, rope, coded = queries

        def torch_path() -> tuple[Tensor, Tensor]:
            turned = plain.rotate(psi.float(), rope).bfloat16()
            return plain.select(
                turned, omega, pages, part, rows.slots, rows.positions, rows.tables, hadamard,
                self.shape.index_topk, rows.most,
            )  # fmt: skip

        def kernel() -> tuple[Tensor, Tensor]:
            num, device = len(psi), psi.device
            if rows.plan is None:
                make = partial(indexer.new_plan, num, self.arch, device)
                rows.plan = self._kept(("plan",), num, make)
                indexer.fill_plan(rows.positions, rows.plan)
            plan = rows.plan
            codes, weights = coded or self._index_room(psi)
            if coded is None:
                indexer.index_queries(psi, omega, codes, weights, rope)
            room = -(-rows.most // plan.tile) * plan.tile * num
            logits = torch.empty(max(1, room), device=device)
            indexer.index_logits(
                codes, weights, pages, pages.shape[1], part, rows.tables, rows.slots, plan, logits,
                self.arch,
            )  # fmt: skip
            chunks = max(1, -(-rows.most // plan.chunk) * num)
            value = torch.empty(chunks, indexer.TOP_K, device=device)
            entry = torch.empty(chunks, indexer.TOP_K, dtype=torch.int32, device=device)
            selected = torch.empty(num, indexer.TOP_K, dtype=torch.int32, device=device)
            count = torch.empty(num, dtype=torch.int32, device=device)
            indexer.index_select(logits, plan, value, entry, selected, count, self.arch)
            return selected, count

        if self.comparing and "index" in self.enabled:
            return self._compare_selection(kernel, torch_path)
        result: tuple[Tensor, Tensor] = self._pick("index", True, kernel, torch_path)
        return result

    def _compare_selection(
        self, kernel: Callable[[], Any], torch_path: Callable[[], Any]
    ) -> tuple[Tensor, Tensor]:
        """The error is the share of entries chosen by one path alone (near ties may differ)."""
        kept: list[Tensor] = []

        def share(run: Callable[[], Any]) -> Tensor:
            selected, count = run()
            place = torch.arange(selected.shape[1], device=selected.device)
            live = place < count[:, None]
            last = max(1, int(selected.max()) + 1)
            chosen = torch.zeros(len(selected), last + 1, device=selected.device)
            chosen.scatter_(1, torch.where(live, selected, last).long(), 1.0)
            kept.extend((selected, count, chosen[:, :last]))
            return torch.zeros(1)

        share(torch_path)
        note = self.compared.setdefault("index", Compared())
        note.calls += 1
        try:
            share(kernel)
            a, b = kept[2], kept[5]
            wide = max(a.shape[1], b.shape[1])
            pad = torch.nn.functional.pad
            a, b = pad(a, (0, wide - a.shape[1])), pad(b, (0, wide - b.shape[1]))
            note.worst = max(note.worst, float((a != b).sum() / (2 * b.sum().clamp(min=1))))
        except Exception as error:
            note.failure = f"{type(error).__name__}: {error}"[:300]
            self.enabled.discard("index")
        return kept[0], kept[1]

    def attend(
        self,
        q: Tensor,
        rows: Rows,
        window: Part,
        pages: Tensor,
        part: Part | None,
        sink: Tensor,
        ratio: int,
        chosen: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """q [R, H, 512] -> bf16 of the same shape."""
        selected, count = chosen or (None, None)

        def kernel() -> Tensor:
            num, heads, _ = q.shape
            kind = sparse_mla_decode.WINDOW_ONLY
            if part is not None:
                kind = sparse_mla_decode.ALL if chosen is None else sparse_mla_decode.SELECTED
            scratch = self._kept(
                ("attention", heads, kind),
                num,
                lambda: sparse_mla_decode.workspace(num, heads, kind, self.arch, self.device),
            )
            return sparse_mla_decode.sparse_mla_decode(
                q.contiguous(), rows.rings, rows.rings.shape[1], window, pages, pages.shape[1],
                part, rows.ring_of_row, rows.positions, rows.ring_tables, sink, scratch,
                torch.empty(q.shape, dtype=torch.bfloat16, device=q.device), self.arch, ratio,
                selected, count,
            )  # fmt: skip

        def torch_path() -> Tensor:
            return plain.attend(
                q, rows.rings, window, pages, part, rows.ring_of_row, rows.positions,
                rows.ring_tables, sink, ratio, selected, count, rows.most * 4 // max(ratio, 4),
                rows.valid_from,
            )  # fmt: skip

        out: Tensor = self._pick("attention", rows.valid_from is None, kernel, torch_path)
        return out

    def wo_a(self, o: Tensor, rope: Tensor, attn: w.Attention) -> Tensor:
        def kernel() -> Tensor:
            weight = attn.wo_a
            assert weight.codes is not None and weight.scale is not None
            out = torch.empty(len(o), weight.num_rows, dtype=torch.bfloat16, device=o.device)
            scratch = self._split_scratch(len(o), weight.num_rows)
            rotated = None
            if len(o) > ROTATE_ROWS:
                rotated = self._kept(
                    ("rotated", o.shape[1]), len(o), lambda: torch.empty_like(o, dtype=torch.half)
                )
            return output_projection.wo_a(
                o, rope, weight.codes, weight.scale, scratch, out, self.arch, rotated=rotated
            )

        fits = attn.wo_a.codes is not None
        out: Tensor = self._pick(
            "wo_a", fits, kernel, lambda: plain.wo_a(o, rope, attn.wo_a, attn.groups)
        )
        return out

    def _tiles(self, rows: int, ffn: w.Experts) -> fp4_moe.TileList:
        """Buffers of the experts' work list; whoever fills it rewrites all that is read."""
        pairs = rows * self.shape.num_experts_per_tok
        block = fp4_moe.block_tokens(pairs, self.arch, ffn.w13)
        num = self.shape.n_routed_experts
        tiles: fp4_moe.TileList = self._kept(
            ("tiles", block), rows, lambda: gate.new_tile_list(pairs, num, block, self.device)
        )
        return tiles

    def route(self, x: Tensor, ffn: w.Experts, tokens: Tensor) -> Routed:
        """Experts int32 [R, k] and weights float32 [R, k], and their work list if the gate's
        kernel makes it."""
        shape = self.shape
        top_k = shape.num_experts_per_tok
        listed = (
            {"gate", "moe"} <= self.enabled
            and not self.comparing
            and len(x) * top_k <= MAX_LIST_PAIRS
        )
        tiles = self._tiles(len(x), ffn) if listed else None

        def kernel() -> tuple[Tensor, Tensor]:
            num = shape.n_routed_experts
            sums = torch.empty(gate.SPLIT_K, len(x), num, device=x.device)
            experts = torch.empty(len(x), top_k, dtype=torch.int32, device=x.device)
            weights = torch.empty(len(x), top_k, device=x.device)
            hashed = ffn.table is not None
            gate.route(
                x, ffn.gate, sums, experts, weights, tiles, ffn.bias, ffn.table,
                tokens if hashed else None,
            )  # fmt: skip
            return experts, weights

        scale = shape.routed_scaling_factor
        experts, weights = self._pick(
            "gate", True, kernel, lambda: plain.route(x, ffn, tokens, top_k, scale)
        )
        return Routed(experts, weights, tiles)

    def experts(
        self, x: Tensor, half: Tensor, ffn: w.Experts, routed: Routed, shared: Tensor
    ) -> Tensor:
        """Routed experts plus the shared one's output: float32 [R, hidden]. half: x as fp16."""
        shape = self.shape
        chosen, weights, listed = routed

        def kernel() -> Tensor:
            num_pairs, num = chosen.numel(), shape.n_routed_experts
            tiles = listed
            if tiles is None and num_pairs <= MAX_LIST_PAIRS:
                tiles = self._tiles(len(x), ffn)
                gate.tile_list(chosen, tiles, num)
            elif tiles is None:
                block = fp4_moe.block_tokens(num_pairs, self.arch, ffn.w13)
                tiles = plain.tile_list(chosen, num, block)
            inner = ffn.w2.shape[2]
            return fp4_moe.fp4_moe(
                half, ffn.w13, ffn.w2, weights, tiles,
                torch.empty(num_pairs, inner, dtype=torch.float16, device=x.device),
                torch.empty(num_pairs, x.shape[1], device=x.device),
                torch.empty(x.shape, device=x.device), self.arch, shared,
            )  # fmt: skip

        def torch_path() -> Tensor:
            return plain.experts(x, ffn, chosen, weights, shape.swiglu_limit) + shared

        out: Tensor = self._pick("moe", True, kernel, torch_path)
        return out


def fitting(shape: ModelShape, tp: int = 1) -> list[str]:
    """Operations whose kernel takes this model's shapes, as one of ``tp`` ranks has them."""
    per_group = shape.num_attention_heads // shape.o_groups
    num = shape.n_routed_experts
    power = num & (num - 1) == 0
    rules = {
        "mhc": shape.hidden_size % 256 == 0 and shape.hc_sinkhorn_iters == mhc.ROUNDS,
        "linear": True,
        "norm": True,
        "swiglu": shape.swiglu_limit == fp4_moe.SWIGLU_LIMIT,
        "store": True,
        "compress": True,
        "begin": shape.hc_mult == step_ends.STREAMS,
        "keep": True,
        "rows": True,
        "index": shape.index_n_heads == indexer.HEADS and shape.index_topk == indexer.TOP_K,
        "attention": True,
        "wo_a": per_group == output_projection.GROUP_HEADS and shape.o_lora_rank % 128 == 0,
        "gate": power and num >= 16 and shape.routed_scaling_factor == gate.ROUTED_SCALE,
        "moe": shape.swiglu_limit == fp4_moe.SWIGLU_LIMIT
        and power
        and shape.moe_intermediate_size % (128 * tp) == 0,
    }
    return [name for name, fits in rules.items() if fits]


def relative_error(a: Tensor, b: Tensor) -> float:
    """Norm of the difference over the norm of b; infinite if a has values that are not finite."""
    if not a.numel():
        return 0.0
    x, y = a.double(), b.double()
    if not bool(torch.isfinite(x).all()):
        return float("inf")
    return float((x - y).norm() / y.norm().clamp(min=1e-12))

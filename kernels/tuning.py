"""What ``autotune`` may try: operations, numbers of rows, and sizes that kernels are built with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from decant.kernels import cuda, fp4_moe_cuda, fp8_linear, gate, mhc, sampling, sparse_mla_decode

Options = dict[str, int]


@dataclass(frozen=True)
class Job:
    """One line of the table. stages: option sets tried one stage after the other, each on top of
    the best so far. case: a builder of cases.py and its arguments."""

    op: str
    bound: int
    case: str
    arguments: dict[str, Any]
    stages: tuple[tuple[Options, ...], ...]

    @property
    def label(self) -> str:
        return f"{self.op} <= {self.bound} " + " ".join(
            f"{k}={v}" for k, v in self.arguments.items()
        )


def _options(**values: int) -> Options:
    return dict(values)


UP = [
    (4, 2, 8, 4),
    (2, 4, 8, 4),
    (4, 2, 4, 6),
    (2, 2, 8, 5),
    (4, 4, 8, 3),
    (8, 1, 4, 4),
    (8, 1, 2, 8),
]
UP += [(16, 1, 4, 3)]
DOWN = [(8, 1, 4, 4, 2), (8, 1, 8, 3, 2), (4, 2, 8, 4, 2), (4, 2, 8, 4, 4), (8, 1, 4, 4, 4)]
DOWN += [(4, 2, 4, 6, 4), (8, 1, 4, 4, 8), (8, 1, 4, 6, 4), (8, 1, 2, 8, 4)]


def _moe() -> Iterator[Job]:
    first = dict(
        zip(("down_rg", "down_kg", "down_kb", "down_stages", "slices"), DOWN[0], strict=True)
    )
    for tokens in (1, 8, 16, 32, 64, 128):
        rooms: tuple[int, ...] = (8,) if tokens <= 64 else (8, 16)
        ups = tuple(
            first | dict(zip(("up_rg", "up_kg", "up_kb", "up_stages"), u, strict=True))
            | {"tokens": room}
            for u in UP for room in rooms
        )  # fmt: skip
        names = ("down_rg", "down_kg", "down_kb", "down_stages", "slices")
        downs = tuple(dict(zip(names, d, strict=True)) for d in DOWN[1:])
        yield Job("moe", tokens * 6, "moe", {"tokens": tokens, "kind": "mxfp4"}, (ups, downs))


def _attention() -> Iterator[Job]:
    def grid(splits: tuple[int, ...]) -> tuple[Options, ...]:
        return tuple(_options(splits=s, ring=r) for s in splits for r in (2, 3))

    names = sparse_mla_decode.OPERATIONS
    for rows, splits in ((1, (16, 8)), (8, (16, 8)), (16, (8, 4)), (32, (8, 4)), (64, (4, 2, 8)),
                         (128, (2, 1, 4)), (512, (1, 2))):  # fmt: skip
        arguments = {"rows": rows, "kind": 1, "context": 8192}
        yield Job(names[1], rows, "attention", arguments, (grid(splits),))
    for rows, context, splits in (
        (8, 1 << 20, (16, 8)),
        (64, 1 << 16, (4, 2, 8)),
        (128, 1 << 15, (2, 1)),
    ):
        arguments = {"rows": rows, "kind": 2, "context": context}
        yield Job(names[2], rows, "attention", arguments, (grid(splits),))
    windows: dict[int, tuple[int, ...]] = {8: (4, 2), 64: (1, 2, 4), 512: (1,)}
    for rows, few in windows.items():
        arguments = {"rows": rows, "kind": 0, "context": 8192}
        yield Job(names[0], rows, "attention", arguments, (grid(few),))
    prefill = {"tokens": 4096, "kind": 1}
    yield Job(names[1], 1 << 30, "prefill_attention", prefill, (grid((1,)),))
    yield Job(names[2], 1 << 30, "prefill_attention", prefill | {"kind": 2}, (grid((1,)),))


WIDE = ((64, 8, 256), (64, 4, 256), (128, 4, 256), (128, 2, 256), (64, 8, 512))  # rows, kb, threads


def _linear() -> Iterator[Job]:
    rooms: dict[int, tuple[int, ...]] = {1: (8,), 8: (8,), 16: (16,), 32: (32,), 64: (64, 32)}
    for n, k in ((8192, 1024), (1536, 4096), (4096, 2048), (4096, 512)):
        for tokens, tiles in rooms.items():
            if tokens in (8, 32) and k != 1024:
                continue
            wide = tuple(
                _options(kb=kb, tokens=max(8, tokens), rows=rows, threads=threads)
                for rows, kb, threads in WIDE
            )
            few = (8, 4, 2) if tokens <= 16 else (4, 2) if k == 512 else (4,)
            narrow = tuple(_options(kb=kb, tokens=t) for t in tiles for kb in few)
            arguments = {"tokens": tokens, "n": n, "k": k}
            yield Job(f"linear_{k}", tokens, "linear", arguments, (wide + narrow,))
    for tokens, tiles in rooms.items():
        if tokens != 8:
            options = tuple(_options(kb=kb, tokens=t) for t in tiles for kb in (4, 2, 8))
            yield Job("wo_a_4096", tokens, "projection", {"tokens": tokens}, (options,))


def _small() -> Iterator[Job]:
    shapes = {
        1: ((16, 1, 1), (8, 1, 1), (16, 1, 0), (8, 1, 0)),
        8: ((16, 1, 1), (16, 2, 1), (16, 1, 0), (8, 1, 0), (8, 2, 0), (16, 4, 1)),
        64: ((8, 4, 0), (16, 8, 0), (16, 4, 1), (16, 4, 0), (8, 8, 0)),
        256: ((16, 8, 1), (8, 8, 0), (8, 16, 0)),
        4096: ((8, 16, 0), (4, 16, 0), (8, 8, 0), (4, 8, 0), (2, 8, 0)),
    }
    for tokens, lines in shapes.items():
        options = tuple(_options(cluster=c, tokens=t, fn_shared=f) for c, t, f in lines)
        bound = tokens if tokens < 4096 else 1 << 30
        yield Job("mhc", bound, "boundary", {"tokens": tokens}, (options,))
    for tokens in (1, 8, 16, 32, 64):
        options = (_options(tokens=max(8, tokens), few=1), _options(tokens=max(8, tokens)))
        yield Job("gate", tokens, "router", {"tokens": tokens}, (options,))
    for rows in (1, 8, 64):
        options = tuple(_options(cluster=c, threads=t) for c in (8, 16) for t in (256, 512, 1024))
        yield Job("sample", rows, "draw", {"rows": rows, "setting": "top_p"}, (options,))
    for rows, clusters in ((1, (8, 4, 2)), (8, (8, 4, 2)), (64, (1, 2, 4)), (512, (1, 2))):
        options = tuple(_options(cluster=c, threads=t) for c in clusters for t in (512, 1024))
        context = 1 << 16 if rows <= 64 else 1 << 14
        arguments = {"rows": rows, "context": context, "what": "top"}
        yield Job("select", rows, "index", arguments, (options,))


TILES = ((128, 128, 8, 3), (128, 256, 8, 3), (64, 256, 8, 3), (256, 128, 8, 3))
EXPERT_TILES = ((128, 64, 8, 3), (128, 128, 8, 3), (128, 128, 8, 2), (64, 128, 8, 3))


def _triton() -> Iterator[Job]:
    """Sizes of Triton kernels that are worth a look on every new GPU or compiler."""

    def config(n: int, t: int, k: int, splits: int, warps: int, stages: int) -> Options:
        sizes = _options(block_n=n, block_t=t, block_k=k, splits=splits)
        return sizes | _options(num_warps=warps, num_stages=stages)

    last = 1 << 30
    for kernel in ("gate_up", "down"):
        options = tuple(config(n, 128, k, 0, w, st) for n, k, w, st in EXPERT_TILES)
        yield Job(f"moe_{kernel}", last, "moe", {"tokens": 4096, "kind": "mxfp4"}, (options,))
    for n, k in ((8192, 1024), (1536, 4096)):
        options = tuple(config(bn, bt, 0, 1, w, st) for bn, bt, w, st in TILES)
        yield Job(f"linear_{k}", last, "linear", {"tokens": 4096, "n": n, "k": k}, (options,))
    options = tuple(config(bn, bt, 0, 1, w, st) for bn, bt, w, st in TILES[:3])
    yield Job("wo_a_4096", last, "projection", {"tokens": 4096}, (options,))
    for rows in (1, 8, 64):
        shapes = ((64, 528, 4), (64, 264, 8), (128, 264, 4), (128, 264, 8), (128, 528, 8))
        options = tuple(config(n, 0, 0, programs, w, 3) for n, programs, w in shapes)
        arguments = {"rows": rows, "context": 1 << 16, "what": "logits"}
        yield Job("logits", rows if rows < 64 else last, "index", arguments, (options,))


def is_triton(options: Options) -> bool:
    """Whether options are a Triton kernel's configuration."""
    return "num_warps" in options


GROUPS = {
    "moe": _moe, "attention": _attention, "linear": _linear, "small": _small, "triton": _triton,
}  # fmt: skip


def jobs(names: list[str]) -> list[Job]:
    """All lines to measure, the most valuable first, or those of the named groups, operations and
    lines (``mhc:8``), in the order of the names."""
    every = [(name, job) for name, make in GROUPS.items() for job in make()]
    if not names:
        return [job for _, job in every]
    return [
        job
        for name in names
        for group, job in every
        if name in (group, job.op, f"{job.op}:{job.bound}")
    ]


# ---- what to compile -----------------------------------------------------------------------------


def problem(job: Job, options: Mapping[str, int], arch: str) -> str:
    """Why a candidate does not exist on an architecture; empty if it does."""
    a = job.arguments
    if is_triton(dict(options)):
        return ""
    if job.op == "moe":
        return fp4_moe_cuda.problem(options, arch, 1024, 4096, 512, 32)
    if job.op.startswith("attention"):
        return sparse_mla_decode.cuda_problem(options, arch)
    if job.op.startswith(("linear", "wo_a")):
        return fp8_linear.cuda_problem(options, arch, a.get("n", 2048), a.get("k", 4096))
    if job.op == "mhc":
        return mhc.cuda_problem(options, arch, 4096)
    if job.op == "sample":
        return sampling.cuda_problem(options, arch, 129_280)
    if job.op == "gate":
        return gate.cuda_problem(options, arch, a["tokens"], 4096, 256)
    most = cuda.PORTABLE_CLUSTER if arch == "sm_120" else 16
    return "" if options["cluster"] <= most else "cluster"


def builds(job: Job, options: Options) -> list[tuple[str, Options]]:
    """(source, constants) of a candidate at the model's shapes."""
    a = job.arguments
    if is_triton(options):
        return []  # Triton compiles when it is first called
    if job.op == "moe":
        both = fp4_moe_cuda.builds(options, 1024, 4096, 512, 32, 6)
        return [
            ("fp4_moe", both["up"] | _options(OUT=0, SHARED=-1)),
            ("fp4_moe", both["down"] | _options(OUT=1, SHARED=-1)),
        ]
    if job.op.startswith("attention"):
        kind = sparse_mla_decode.OPERATIONS.index(job.op)
        both_types = _options(Q_TYPE=1, OUT=1)
        constants = _options(KIND=kind, SPLITS=options["splits"], RING=options["ring"])
        return [("attention", constants | both_types)]
    if job.op.startswith(("linear", "wo_a")):
        mode = 0 if job.op.startswith("linear") else 2
        return [fp8_linear.cuda_build(options, a.get("k", 4096), mode, 1, 1)]
    if job.op == "mhc":
        constants = _options(D=4096, CLUSTER=options["cluster"], TOKENS=options["tokens"])
        constants |= _options(DOTS=24, COMBINE=1, FN_SHARED=options["fn_shared"])
        return [("mhc", constants | _options(Y_TYPE=1, WITH_FP16=0, WITH_CODES=0))]
    if job.op == "gate":
        constants = _options(D=4096, E=256, TOP_K=6, TOKENS=options["tokens"], HASHED=0)
        constants |= _options(IDS64=0, TABLE64=0, LIST=1)
        return [("gate_few" if options.get("few") else "gate", constants)]
    if job.op == "sample":
        constants = _options(CLUSTER=options["cluster"], THREADS=options["threads"])
        return [("sampling", constants | _options(LOGITS=0, HAS_MASK=0, HAS_PENALTY=0))]
    constants = _options(TOP=512, CLUSTER=options["cluster"], THREADS=options["threads"])
    return [("select", constants)]


def candidates(job: Job) -> Iterator[Options]:
    """Every option set that measuring may need a build of (later stages on the first one)."""
    base = job.stages[0][0]
    for i, stage in enumerate(job.stages):
        for options in stage:
            yield options if i == 0 else base | options

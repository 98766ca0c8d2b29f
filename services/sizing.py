"""docs/sizing.md: what takes how much memory, and what a hand-off moves, per prompt length.

    python -P -m decant.services.sizing > docs/sizing.md

The formulas are functions, so that a test can hold them against the published totals and against
the pools that the engine makes.
"""

from __future__ import annotations

from dataclasses import dataclass

from decant.engine.kv_layout import KVLayout
from decant.engine.model_shape import ModelShape
from decant.protocol.config import Config, build
from decant.services import preflight

ENTRY = 584  # bytes of one 512-vector: 448 e4m3, 64 bf16 for the rotary part, 7 scales, 1 unused
INDEX_KEY = 132  # bytes: 128 e4m3 and one float32 scale
LENGTHS = (128, 1_024, 8_192, 32_768, 131_072, 1_048_576)
LINKS = (("PCIe 5.0 x16, one rank", 50e9), ("NVLink 4, one rank", 350e9))  # bytes/s, assumed


@dataclass(frozen=True)
class State:
    """Bytes of one sequence after T tokens, in FP8, float32 compressor state, MTP window included.

    windows    (L + 1) min(T, 128) E            L layers, E bytes an entry, one MTP layer
    csa        n4 floor(T / 4) E                n4 layers that compress four tokens to one
    indexer    n4 floor(T / 4) K                K bytes a key
    hca        n128 floor(T / 128) E            n128 layers that compress 128 tokens to one
    csa_state  n4 (4 + T mod 4) 4 (4 D + 4 I)   rows of c and s, both halves; D = 512, I = 128
    hca_state  n128 (T mod 128) 4 (2 D)         rows of c and s
    """

    windows: int
    csa: int
    indexer: int
    hca: int
    csa_state: int
    hca_state: int

    @property
    def total(self) -> int:
        return self.windows + self.csa + self.indexer + self.hca + self.csa_state + self.hca_state


def state(num_tokens: int, layers: int = 43, csa: int = 21, hca: int = 20) -> State:
    """The published model's numbers of layers are the defaults."""
    t = num_tokens
    rows = 4 + t % 4 if t >= 4 else t
    return State(
        (layers + 1) * min(t, 128) * ENTRY,
        csa * (t // 4) * ENTRY,
        csa * (t // 4) * INDEX_KEY,
        hca * (t // 128) * ENTRY,
        csa * rows * 4 * (4 * 512 + 4 * 128),
        hca * (t % 128) * 4 * 2 * 512,
    )


def growth(csa: int = 21, hca: int = 20) -> float:
    """Bytes per token in the long run."""
    return csa * (ENTRY + INDEX_KEY) / 4 + hca * ENTRY / 128


def sequences(pages: int, slots: int, page_tokens: int, num_tokens: int) -> int:
    """How many sequences of a length fit into a pool at once."""
    return min(slots, pages // -(-num_tokens // page_tokens))


def pool_bytes(layout: KVLayout, pages: int, slots: int) -> int:
    """One rank's pool; every rank holds the whole KV."""
    return pages * layout.page_bytes + slots * layout.slot_bytes


def _mb(value: float) -> str:
    return f"{value / 1e6:,.2f}" if value < 1e8 else f"{value / 1e6:,.0f}"


def _demo() -> tuple[Config, ModelShape]:
    folder = preflight.demo_folder()
    config: Config = build(Config, preflight.read_profile("demo"))
    return config, preflight.check_model(folder)[0]


INTRO = """\
# Sizing

Made by `python -P -m decant.services.sizing`; do not edit. Formulas: `services/sizing.py`.

## What one sequence holds

DeepSeek-V4-Flash, FP8 entries, float32 compressor state, MTP window included. This is also what
a hand-off moves from prefill to decode. Under tensor parallelism every rank holds all of it:
there is one KV head. In the long run a sequence grows by {growth:,.0f} bytes a token.
"""

AFTER_TABLE = """
The last columns divide by {links}: assumed rates, not measured ones.
Pages are published after every chunk, so all but the last chunk's part moves while prefill still
computes.

## Pools

A pool is `pages x page bytes + slots x slot bytes`, per rank of prefill and of decode. A sequence
of T tokens takes `ceil(T / page_tokens)` pages and one slot. Decode reserves the prompt and
`decode.growth_tokens`; when its pool runs dry the youngest sequence is put out and goes on later.

* `decode.pages >= sequences x ceil((prompt + output) / kv.page_tokens)` for the load that is to
  run at once without that; `decode.slots` above it by the number of hand-offs under way.
* `prefill.pages`: prompts under way plus what the prefix cache is to keep.

On a CPU the pools lie in /dev/shm; `decant up` refuses to start a set that does not fit, and says
what it needs.

The demo (profile `demo`, {page_tokens} tokens a page, float32): a page is {page:,} bytes, a slot
{slot:,} bytes.
"""


def render() -> str:
    """The whole page."""
    titles = ["tokens", "windows", "CSA", "indexer", "HCA", "states", "total, MB"]
    titles += [f"{name}, ms" for name, _ in LINKS]
    lines = [
        INTRO.format(growth=growth()),
        f"| {' | '.join(titles)} |",
        "|---:" * len(titles) + "|",
    ]
    for t in LENGTHS:
        s = state(t)
        cells = [_mb(v) for v in (s.windows, s.csa, s.indexer, s.hca, s.csa_state + s.hca_state)]
        cells += [_mb(s.total), *(f"{s.total / speed * 1e3:,.2f}" for _, speed in LINKS)]
        lines.append(f"| {t:,} | {' | '.join(cells)} |")
    config, shape = _demo()
    page_tokens = config.kv.page_tokens
    layout = KVLayout(shape, page_tokens)
    lines += [
        AFTER_TABLE.format(
            links=", ".join(f"{speed / 1e9:.0f} GB/s ({name})" for name, speed in LINKS),
            page_tokens=page_tokens,
            page=layout.page_bytes,
            slot=layout.slot_bytes,
        ),
        "| group | pages | slots | pool, MB | sequences of 512 tokens | of 8,192 |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, room in (("prefill", config.prefill), ("decode", config.decode)):
        pages, slots = room.pages, room.slots
        fit = " | ".join(str(sequences(pages, slots, page_tokens, t)) for t in (512, 8192))
        size = _mb(pool_bytes(layout, pages, slots))
        lines.append(f"| {name} | {pages} | {slots} | {size} | {fit} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render(), end="")

"""Compares the trainable model with a fixture folder: `python -P -m decant.engine.demo.verify
DIR...`.

A fixture has config.json, model.safetensors and expected.safetensors (prompt, decode tokens,
logits of both, last streams, MTP logits and a chain of drafts). Exit code 1 above the bound of
1e-4.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from decant.engine.demo import checkpoint

BOUND = 1e-4


def _padded(ids: Tensor) -> Tensor:
    return F.pad(ids[None], (0, -len(ids) % 128))


@torch.no_grad()
def differences(path: Path) -> dict[str, float]:
    """Largest absolute difference per expected tensor, fp32."""
    m = checkpoint.load(path)
    topk = m.c.index_topk
    want = load_file(path / "expected.safetensors")
    prompt, decode, chain = want["prompt_ids"], want["decode_ids"], want["mtp_chain_tokens"]
    T, N = len(prompt), len(decode)
    assert m.draft_fn is not None

    ids = _padded(torch.cat([prompt, decode]))
    tables = m.tables(ids.shape[1], ids.device)
    rope = tables[False, m.c.head_dim]
    x, *_ = m.trunk(ids, tables, torch.float32, topk)
    logits = m.head(m.collapse(x))[0]
    nxt = F.pad(ids[:, 1:], (0, 1))
    _, h, _, _ = m.draft_fn(x, m.embed(nxt), nxt, None, rope)
    draft = m.head(h)[0]
    got = {
        "logits_prefill": logits[:T],
        "logits_decode": logits[T : T + N],
        "streams_last": x[0, T - 1],
        "mtp_logits_prefill": draft[: T - 1],
        "mtp_logits_decode": draft[T - 1 : T + N - 1],
    }
    # Chained drafts: step 2 at slot T takes the streams of step 1 at slot T - 1.
    ids = _padded(torch.cat([prompt, chain]))
    tables = m.tables(ids.shape[1], ids.device)
    rope = tables[False, m.c.head_dim]
    x, *_ = m.trunk(ids, tables, torch.float32, topk)
    nxt = F.pad(ids[:, 1:], (0, 1))
    x1, h1, keys, _ = m.draft_fn(x, m.embed(nxt), nxt, None, rope)
    shifted = F.pad(x1[:, :-1], (0, 0, 0, 0, 1, 0))
    _, h2, _, _ = m.draft_fn(shifted, m.embed(nxt), nxt, None, rope, keys)
    got["mtp_chain_logits"] = torch.stack([m.head(h1)[0, T - 1], m.head(h2)[0, T]])
    want["mtp_chain_logits"] = want["mtp_chain_logits"][:2]
    return {k: float((v - want[k]).abs().max()) for k, v in got.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="compare the trainable model with fixtures")
    parser.add_argument("dir", type=Path, nargs="+")
    worst = 0.0
    for path in parser.parse_args().dir:
        for name, difference in differences(path).items():
            worst = max(worst, difference)
            print(f"{path.name:12s} {name:20s} max difference {difference:.2e}")
    return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main())

"""Teacher-forced scores of held-out conversations: is every token of the answer the argmax, and
are the drafts what the trunk chooses? The first equals greedy decoding giving exactly the expected
answer.

`python -P -m decant.engine.demo.score DIR` scores a folder on a CPU.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from decant.engine.demo import chat, checkpoint, corpus
from decant.engine.demo.bpe import Encoder
from decant.engine.demo.network import Model, Tables

ALIGN = 128
PAD_ID = 2


class Span(NamedTuple):
    """Where one answer lies: tokens start..end-1 of a row."""

    skill: str
    row: int
    start: int
    end: int


class Exam(NamedTuple):
    """Held-out conversations packed into rows [n, length + 2], and their answers."""

    rows: Tensor
    spans: list[Span]


def prepare(
    encode: Encoder,
    skills: Sequence[tuple[str, int]],
    n: int,
    length: int,
    seed: int,
    pack: bool = True,
) -> Exam:
    """n conversations of each (skill, far); each begins at a multiple of 128, as in serving it
    begins at 0 (the rows' masks keep them apart). Conversations longer than a row are left out."""
    rows: list[list[int]] = []
    spans: list[Span] = []
    for skill, far in skills:
        name = f"{skill}@{far}" if far else skill
        for c in corpus.held_out_conversations(skill, n, seed, far):
            parts = [encode(text) for text, _, _ in chat.pieces(c)]
            ids = [i for part in parts for i in part]
            if len(ids) > length:
                continue
            if not rows or not pack or len(rows[-1]) + len(ids) > length:
                rows.append([])
            at = len(rows[-1])
            spans.append(Span(name, len(rows) - 1, at + len(ids) - len(parts[-1]), at + len(ids)))
            rows[-1] += ids
            rows[-1] += [PAD_ID] * (-len(rows[-1]) % ALIGN)
    out = torch.full((len(rows), length + 2), PAD_ID)
    for i, r in enumerate(rows):
        r = r[: length + 2]
        out[i, : len(r)] = torch.tensor(r)
    return Exam(out, spans)


class Score(NamedTuple):
    """Per skill: answers exactly right, answers; per draft position: accepted, drafted."""

    right: dict[str, list[int]]
    drafts: list[list[int]]
    wrong: list[tuple[str, str, str]]  # skill, expected, given

    def table(self) -> dict[str, float]:
        """Share of right answers per skill."""
        return {k: round(a / b, 3) for k, (a, b) in self.right.items()}

    def acceptance(self) -> list[float]:
        """Share of accepted drafts per position; a draft needs its predecessors to be accepted."""
        return [round(a / max(1, b), 3) for a, b in self.drafts]


def judge(preds: list[Tensor], rows: Tensor, spans: list[Span], score: Score) -> list[Span]:
    """Adds the answers of one batch of rows to `score`; preds[k] [n, T] are the argmax tokens of
    the trunk (k = 0) and of draft k. Returns the spans answered wrongly."""
    wrong = []
    for span in spans:
        skill, i, s, e = span
        p0 = preds[0][i]
        good = bool((p0[s - 1 : e - 1] == rows[i, s:e]).all())
        entry = score.right.setdefault(skill, [0, 0])
        entry[0] += good
        entry[1] += 1
        if not good:
            wrong.append(span)
        alive = torch.ones(e - s, dtype=torch.bool)
        for k, p in enumerate(preds[1:], 1):
            # Slot t predicts token t + 2; draft k stands on the trunk's position t + 1 - k, so the
            # first token of the answer that it can predict is s + k.
            hit = p[i, s + k - 2 : e - 2] == p0[s + k - 1 : e - 1]
            alive = alive[: len(hit)] & hit
            score.drafts[k - 1][0] += int(alive.sum())
            score.drafts[k - 1][1] += len(hit)
    return wrong


def evaluate(
    model: Model,
    exam: Exam,
    tables: Tables,
    dt: torch.dtype,
    drafts: int,
    batch: int,
    topk: int = 0,
    learn_index: bool = False,
    decode: Encoder | None = None,
) -> Score:
    """Scores an exam in batches of `batch` rows (padded to it: compiled code sees one shape)."""
    device = next(model.parameters()).device
    score = Score({}, [[0, 0] for _ in range(drafts)], [])
    for at in range(0, len(exam.rows), batch):
        part = exam.rows[at : at + batch]
        filled = torch.full((batch, part.shape[1]), PAD_ID)
        filled[: len(part)] = part
        ids = filled.to(device)
        zeros = torch.zeros(ids.shape, device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dt == torch.bfloat16):
            out = model.losses(
                ids, zeros, tables, dt, topk=topk, learn_index=learn_index, drafts=drafts
            )
        preds = [out[f"pred{k}"].cpu() for k in range(drafts + 1)]
        del out
        here = [s._replace(row=s.row - at) for s in exam.spans if at <= s.row < at + batch]
        for span in judge(preds, part, here, score):
            if decode is not None:
                a, b = span.start, span.end
                want = decode.decode(part[span.row, a:b].tolist())
                got = decode.decode(preds[0][span.row, a - 1 : b - 1].tolist())
                score.wrong.append((span.skill, want, got))
    return score


def main() -> None:
    parser = argparse.ArgumentParser(description="score a folder on held-out conversations")
    parser.add_argument("dir", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json (default: the folder's)")
    parser.add_argument("--rows", type=int, default=20, help="conversations per skill")
    parser.add_argument("--topk", type=int, default=64, help="0 shows every entry")
    parser.add_argument("--length", type=int, default=2304)
    parser.add_argument("--drafts", type=int, default=2)
    parser.add_argument("--skills", nargs="*")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--wrong", type=int, default=3, help="wrong answers to print per skill")
    args = parser.parse_args()
    encode = Encoder(args.tokenizer or args.dir / "tokenizer.json")
    model = checkpoint.load(args.dir)
    tables = model.tables(args.length, torch.device("cpu"))
    totals = [[0, 0] for _ in range(args.drafts)]
    for skill, far in corpus.EVALUATED:
        name = f"{skill}@{far}" if far else skill
        if args.skills and name not in args.skills:
            continue
        exam = prepare(encode, [(skill, far)], args.rows, args.length, args.seed)
        with torch.no_grad():
            score = evaluate(
                model,
                exam,
                tables,
                torch.float32,
                args.drafts,
                1,
                args.topk,
                decode=encode,
            )
        for total, (a, b) in zip(totals, score.drafts, strict=True):
            total[0] += a
            total[1] += b
        print(json.dumps({**score.table(), "drafts": score.acceptance()}), flush=True)
        for _, want, got in score.wrong[: args.wrong]:
            print("    expected", repr(want), "\n    given   ", repr(got))
    print("drafts accepted", [round(a / max(1, b), 4) for a, b in totals])


if __name__ == "__main__":
    main()

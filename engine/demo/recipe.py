"""The shipped weights from nothing: `python -P -m decant.engine.demo.recipe --out DIR`.

Trains the pieces below one after the other, each in a process of its own, and writes the model
folder DIR/model. Finished pieces are skipped and an unfinished one goes on from its last saved
step, so the command may be stopped (--minutes, Ctrl-C, a lost machine) and repeated.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from decant.engine.demo.export import export
from decant.engine.demo.train import UNFINISHED

PIECES: tuple[tuple[str, ...], ...] = (
    # Recall appears here: short windows, bare repetitions, every entry visible.
    (
        *("--steps", "4022", "--batch", "20", "--length", "2304", "--drafts", "2"),
        *("--naked", "0.6", "--naked-last", "0.25", "--short", "0.6", "--far", "0.12"),
        *("--decay-from", "0.6", "--last", "0.05", "--round-from", "0.93"),
        *("--eval-every", "75", "--seed", "0"),
    ),
    # Long rows, the indexer choosing 64 entries, three drafts, weights rounded from half way on.
    (
        *("--steps", "1500", "--batch", "4", "--length", "8448", "--drafts", "3", "--topk", "64"),
        *("--naked", "0.12", "--naked-last", "0.05", "--short", "0"),
        *("--far", "0.3", "--far-most", "8000"),
        *("--lr", "0.012", "--lr-table", "1.8e-3", "--lr-fn", "1.8e-4", "--lr-rest", "1.2e-3"),
        *("--decay-from", "0.25", "--last", "0.02", "--round-from", "0.5"),
        *("--eval-rows", "16", "--eval-every", "90", "--seed", "1"),
    ),
)
LEAST_S = 60.0
"""Below this no piece is started: compiling alone takes longer."""


def progress(folder: Path) -> tuple[int, bool]:
    """(last saved step, finished?) of a piece's folder."""
    log, saved = folder / "log.jsonl", 0
    if log.exists():
        for line in log.read_text().splitlines():
            row = json.loads(line)
            saved = row.get("saved", saved)
            if row.get("final"):
                return saved, True
    return saved, False


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--out", type=Path, required=True, help="pieces, and the folder model")
    p.add_argument("--minutes", type=float, default=0, help="stop after about this long")
    p.add_argument("--resume", type=Path, help="weights that the first piece starts from")
    p.add_argument("extra", nargs="*", help="after --: options of every piece, as of train")
    a = p.parse_args(argv)
    began, resume = time.monotonic(), a.resume
    for i, options in enumerate(PIECES, 1):
        folder = a.out / f"piece-{i}"
        saved, is_finished = progress(folder)
        if not is_finished:
            command = [sys.executable, "-P", "-m", "decant.engine.demo.train", *options, *a.extra]
            command += ["--out", str(folder)]
            if saved:
                command += ["--begin", str(saved), "--resume", str(folder)]
            elif resume:
                command += ["--resume", str(resume)]
            if a.minutes:
                left = 60 * a.minutes - (time.monotonic() - began)
                if left < LEAST_S and i > 1:
                    print(f"piece {i} is left; the same command goes on")
                    return UNFINISHED
                command += ["--deadline", str(left)]
            if torch.cuda.is_available():
                command.append("--compile")
            print(f"piece {i} of {len(PIECES)}: {' '.join(command[4:])}", flush=True)
            code = subprocess.run(command, check=False).returncode
            if code:
                if code == UNFINISHED:
                    print(f"piece {i} is not finished; the same command goes on")
                return code
        resume = folder
    assert resume is not None
    size = export(resume, a.out / "model", Path(__file__).parent / "tokenizer.json")
    print(f"{a.out / 'model'}: {size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())

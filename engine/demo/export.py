"""Writes the shipped model folder: `python -P -m decant.engine.demo.export CHECKPOINT OUT`.

CHECKPOINT is a folder that training wrote; OUT gets weights in the published quantised format,
config.json, tokenizer.json, tokenizer_config.json and generation_config.json.
"""

import argparse
import shutil
from pathlib import Path

from decant.engine.demo import bpe, checkpoint
from decant.engine.demo.shape import MAX_BYTES, check_shape


def export(source: Path, out: Path, tokenizer: Path) -> int:
    """Writes the folder and returns its bytes. Raises ValueError if shape or size is not as
    promised."""
    config = checkpoint.read_config(source)
    check_shape(config)
    checkpoint.write_quantised(out, config, checkpoint.read_state(source))
    if tokenizer.resolve() != (out / "tokenizer.json").resolve():
        shutil.copyfile(tokenizer, out / "tokenizer.json")
    bpe.write_companions(out)
    shipped = [*out.glob("*.json"), *out.glob("*.safetensors")]
    size = sum(f.stat().st_size for f in shipped)
    if size > MAX_BYTES:
        raise ValueError(f"{out} has {size} bytes, more than {MAX_BYTES}")
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description="write the shipped model folder")
    parser.add_argument("checkpoint", type=Path)
    here = Path(__file__).parent
    parser.add_argument("out", type=Path, nargs="?", default=here, help="default: %(default)s")
    parser.add_argument("--tokenizer", type=Path, default=here / "tokenizer.json")
    args = parser.parse_args()
    size = export(args.checkpoint, args.out, args.tokenizer)
    print(f"{args.out}: {size} bytes")


if __name__ == "__main__":
    main()

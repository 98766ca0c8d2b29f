"""R15: no room under the logs. Run as ``unshare -rm python full_disk.py FOLDER``: it mounts a small
file system of its own, which ends with it.

The set has to answer as before, to survive the death of its processes, and to log again once there
is room.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent / "support")]

from real_set import SMALL, RealSet  # noqa: E402

from decant.services import rundir  # noqa: E402

SIZE = "2m"


def fill(path: Path) -> int:
    """Write until there is no room; returns the bytes."""
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 512)
        except OSError:
            return file.tell()


def main(run_dir: Path) -> None:
    logs = run_dir / "logs"
    logs.mkdir(mode=0o700, parents=True)
    run_dir.chmod(0o700)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=0700", "none", str(logs)], check=True
    )
    real = RealSet(run_dir, SMALL)
    try:
        real.wait_ready()
        expected = real.chat("What is 2 + 3?")[0]
        assert fill(logs / "ballast") > 0
        for victim in ("", "decode-0", "router-0", "tokenizer-0", "prefill-0"):
            if victim:
                before = real.kill(victim)
                while real.pid(victim) in (0, before):
                    time.sleep(0.1)
            real.wait_ready()
            assert real.chat("What is 2 + 3?")[0] == expected, victim
        real.wait_clean()
        size = (logs / "gateway-0.log").stat().st_size
        (logs / "ballast").unlink()
        assert real.chat("What is 2 + 3?")[0] == expected
        end = time.monotonic() + 10
        while (logs / "gateway-0.log").stat().st_size == size:
            assert time.monotonic() < end, "nothing is logged although there is room again"
            time.sleep(0.1)
        real.stop()
        left = rundir.leftovers(real.config)
        assert not left, left
    finally:
        rundir.sweep(real.config)
    print("good")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

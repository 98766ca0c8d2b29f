"""The measurements for a GPU run on the CPU twin, small, and say what they mean to say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).with_name("bench_prefix_cache.py")


@pytest.mark.slow
def test_prefix_cache(tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(BENCH), "--out", str(tmp_path)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, check=True, timeout=300, env=environment)
    report = json.loads((tmp_path / "prefix-cache.json").read_text())
    assert report["hit"]["skipped"] > 0.9
    assert report["hit"]["turn_skipped"] > 0.5
    rows = {row["cache"]: row for row in report["replay"]}
    assert rows[False]["requests"] == rows[True]["requests"] == 4
    assert rows[False]["cached_share"] == 0 < rows[True]["cached_share"]
    (same,) = report["at_same_tpot"]
    assert same["without_requests_per_s"] == rows[False]["requests_per_s"]

"""Marks and distribution for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
REAL = (HERE / "e2e", HERE / "chaos")  # start real processes; those of a folder share one set


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One xdist group a file (``--dist loadgroup``), one for all tests that share the real set."""
    for item in items:
        folder = next((f for f in REAL if f in item.path.parents), None)
        if folder is not None:
            item.add_marker(pytest.mark.e2e)
        if item.get_closest_marker("xdist_group") is None:
            name = "real" if folder is not None else str(item.path.relative_to(HERE))
            item.add_marker(pytest.mark.xdist_group(name))

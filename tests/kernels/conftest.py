"""Kernel tests run on the GPU where there is one, else under Triton's interpreter on the CPU."""

import os
from collections.abc import Iterator

import pytest
import torch
import triton.runtime.interpreter as interpreter

from decant.kernels import tuned

_patch_lang_tensor = interpreter._patch_lang_tensor


def _patch_index(tensor: object, scope: object) -> None:
    """Triton 3.6's interpreter converts one-element arrays with int(), which numpy 2.4 refuses:
    use item().
    """
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]


interpreter._patch_lang_tensor = _patch_index


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def arch() -> str:
    if torch.cuda.is_available():
        from decant.kernels.config import architecture

        return architecture()
    return "sm_90"


@pytest.fixture(autouse=True)
def _triton_where_cuda_cannot_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Without a GPU tests run Triton unless they name another, whatever tuned.json says."""
    if torch.cuda.is_available() or "DECANT_TUNED" in os.environ:
        yield
        return
    table = tmp_path_factory.getbasetemp() / "no-tuned.json"
    table.write_text("{}")
    monkeypatch.setenv("DECANT_TUNED", str(table))
    tuned._table.cache_clear()
    yield
    tuned._table.cache_clear()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(1234)

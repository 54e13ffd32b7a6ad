"""The step of a first day on a GPU that compares models, on the emulator."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gpu_day import model
from mpi4py import MPI

from treeattn.backends.cuda import cupy_runtime

from .raw_module import compiler_problem
from .runtime import StrictRuntime

pytestmark = pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem()))


@pytest.mark.parametrize("case", [model.CASES[2], model.CASES[4]], ids=["drafts", "sharded"])
def test_the_same_model_says_the_same(
    case: model.Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator = StrictRuntime()
    monkeypatch.setattr(cupy_runtime, "current", lambda: emulator)
    row = model.compare(MPI.COMM_SELF, case, tmp_path)
    assert not model.wrong(row)
    assert sorted(row["largest_difference"]) == ["processor", *["transformers"] * (not case.changes)]
    assert sum(row["accepted"]) > 0 or not case.drafts


@pytest.mark.parametrize("difference", [2e-4, np.nan])
def test_another_model_is_told(difference: float) -> None:
    row = {"same_tokens": True, "largest_difference": {"processor": 0.0, "transformers": difference}}
    assert model.wrong(row)
    assert model.wrong({"same_tokens": False, "largest_difference": {"processor": 0.0}})

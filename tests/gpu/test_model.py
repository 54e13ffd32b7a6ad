"""Tiny Llamas on a real GPU say what they say on the processor, and what Hugging Face said."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_day import model

from treeattn.backends.cuda import cupy_runtime

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # no mpi4py, or no library for it
    pytest.skip(f"needs an MPI library: {str(error).splitlines()[0]}", allow_module_level=True)

pytestmark = pytest.mark.skipif(cupy_runtime.problem() is not None, reason=str(cupy_runtime.problem()))


@pytest.mark.parametrize("case", model.CASES, ids=str)
def test_the_gpu_says_the_same(case: model.Case, tmp_path: Path) -> None:
    row = model.compare(MPI.COMM_SELF, case, tmp_path)
    assert not model.wrong(row), row

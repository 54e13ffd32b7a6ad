"""Models of transformers over ranks that torchrun has started, and no MPI anywhere."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.torchrun import torchrun

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None,
    reason="torch or transformers is not installed (the extra `huggingface`)",
)
PROGRAM = Path(__file__).parent / "torchrun_models.py"


def test_families_and_tensor_parallel_weights():
    done = torchrun(PROGRAM, "Mistral", "DeepSeek-V3", ranks=2)
    assert done.returncode == 0, done.stderr


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_families(ranks):
    from tests.support.tiny_models import FAMILIES

    done = torchrun(PROGRAM, *FAMILIES, ranks=ranks, timeout=1200)
    assert done.returncode == 0, done.stderr

"""Models of transformers over ranks that torchrun has started, and no MPI anywhere."""

import importlib.util
import re

import pytest

from tests.support.torchrun import torchrun

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None,
    reason="torch or transformers is not installed (the extra `huggingface`)",
)


def test_models_and_tensor_parallel_weights():
    """Some of tests/huggingface; `make test-models` runs all of it on 1 to 4 ranks of either launcher."""
    files = [f"tests/huggingface/test_{name}.py" for name in ("families", "traps", "origin")]
    some = "not deep", "-k", "Mistral and (tokens_and or float16-2) or attends_to_alone or unchecked_alone"
    done = torchrun("-m", "pytest", "-p", "no:pytest_mpi", "-q", "-x", *files, "-m", *some, ranks=2)
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 3, done.stdout

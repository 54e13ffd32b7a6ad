"""The examples in the docstrings of `treeattn.huggingface`, on every rank."""

import pytest

transformers = pytest.importorskip("transformers", reason="not installed (the extra `huggingface`)")
torch = pytest.importorskip("torch", reason="not installed (the extra `huggingface`)")

from tests.support.examples import run_examples  # noqa: E402
from treeattn import huggingface  # noqa: E402

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("named", [huggingface.ShardedKV, huggingface.prefill])
def test_the_example_of_a_docstring_shows_what_comes_out(comm, named):
    torch.manual_seed(0)  # equal weights on all ranks
    given = {name: getattr(transformers, name) for name in ("AutoModelForCausalLM", "LlamaConfig")}
    assert run_examples(named, **given, huggingface=huggingface, torch=torch)

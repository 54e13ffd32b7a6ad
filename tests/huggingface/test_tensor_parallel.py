"""Weights by heads and the cache by tokens, over the same ranks."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="not installed (the extra `huggingface`)")
pytest.importorskip("torch", reason="not installed (the extra `huggingface`)")

from tests.support.sharded_models import check_tensor_parallel

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("default")]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("family", "scheme"), [("Llama", None), ("Qwen3", "binary_tree")])
def test_each_rank_has_its_heads_of_the_weights_and_its_tokens_of_the_cache(comm, tmp_path, family, scheme):
    if comm.size != 2:
        pytest.skip("the models have two heads of keys")
    check_tensor_parallel(comm, family, comm.bcast(str(tmp_path)), scheme)

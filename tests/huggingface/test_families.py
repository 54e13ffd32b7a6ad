"""Families of models over a sharded cache have the tokens and logits of transformers' own attention."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="not installed (the extra `huggingface`)")
pytest.importorskip("torch", reason="not installed (the extra `huggingface`)")

from tests.support.sharded_models import check_family
from tests.support.tiny_models import FAMILIES

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("default")]

#: Each has something that no other has; the gate takes these, `make test-deep` all.
GATE = (
    *("Llama", "Mistral", "Qwen3-MoE", "Gemma 2", "Gemma 3n", "GPT-OSS", "Phi-3", "Cohere2", "GPT-2"),
    *("DeepSeek-V3", "LFM2"),
)
NAMES = [name if name in GATE else pytest.param(name, marks=pytest.mark.deep) for name in FAMILIES]


@pytest.mark.parametrize("family", NAMES)
def test_a_family_has_the_tokens_and_logits_of_eager(comm, family):
    check_family(comm, family)

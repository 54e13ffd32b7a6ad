"""Attention on the processor: NumPy, and C of every instruction set, reading one stream and four."""

from typing import Any

import pytest

from tests.emulator.cases import CASES, ON_THE_PROCESSOR, Case
from tests.support.attention_contract import AttentionContract
from treeattn.backends import cpu


@pytest.mark.usefixtures("build")
class TestOnTheProcessor(AttentionContract):
    backend = cpu
    cases = (*CASES, *ON_THE_PROCESSOR)
    head_dims, dtypes = (8, 40, 64, 72, 128, 200), ("float32", "float16", "bfloat16", "float64")
    widened = ("float16", "bfloat16", *AttentionContract.widened)

    def options(self, case: Case, order: int) -> dict[str, Any]:
        return {"threads": (1, 2, 7)[order]}

"""Tiny Llamas on a real GPU say what they say on the processor, and what Hugging Face said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.models import PROMPT, write_model
from treeattn import Reduction
from treeattn.llama import Llama, Session

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # no mpi4py, or no library for it
    pytest.skip(f"needs an MPI library: {str(error).splitlines()[0]}", allow_module_level=True)

GOLDEN = Path(__file__).resolve().parents[1] / "golden/llama/logits.npz"


def logits(path: Path, device: str, sharded: bool) -> Any:
    """Of the token after the prompt, and of one step more."""
    scheme = "head_scatter" if sharded else "recursive_doubling"
    reduction = Reduction(scheme, transport="host" if device == "cuda" else None)
    model = Llama(path, MPI.COMM_SELF if sharded else None, device=device)
    with Session(MPI.COMM_SELF, model, PROMPT, capacity=len(PROMPT) + 1, scheme=reduction) as session:
        return np.stack([session.prefill(), session.step(7)])


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("name", "changes"), [("biases", {}), ("grouped_llama3", {"head_dim": 64})])
def test_the_gpu_says_the_same(name: str, changes: dict[str, int], sharded: bool, tmp_path: Path) -> None:
    """Heads of 16 fill up those that there is a kernel for, heads of 64 need no filling."""
    path = write_model(tmp_path, name, **changes)
    found, wanted = (logits(path, device, sharded) for device in ("cuda", "cpu"))
    bound = 1e-4 * np.abs(wanted).max()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=bound)
    if not changes:
        golden = np.load(GOLDEN)[f"{name}.logits"][0]
        np.testing.assert_allclose(found[0], golden, rtol=0, atol=bound)

"""A model on one emulated GPU: what is not served, and no array in the wrong place."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from tests.support.models import PROMPT, write_model
from treeattn.backends.cuda import cupy_runtime
from treeattn.backends.cuda.device import Cuda
from treeattn.cache import ShardedCache
from treeattn.errors import BackendError, RestrictionError, TreeattnError
from treeattn.llama import Llama, Session
from treeattn.llama.model import RMSNorm
from treeattn.llama.tensor_parallel import Embedding, Linear

from .runtime import StrictRuntime


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> StrictRuntime:
    emulator = StrictRuntime()
    monkeypatch.setattr(cupy_runtime, "current", lambda: emulator)
    return emulator


def logits(path: Path, device: str, comm: Any = None, **options: Any) -> Any:
    """Of the token after a short prompt, and of one more step."""
    world = MPI.COMM_SELF
    given = {"capacity": 38} | options
    with Session(world, Llama(path, comm, device=device), PROMPT[:37], **given) as session:
        return np.stack([session.prefill(), session.step(7)])


def test_a_prompt_of_more_queries_than_a_launch_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cuda, "most_queries", lambda self, heads, kv_heads: 4)
    path = write_model(tmp_path, "tied")
    wanted = logits(path, "cpu")
    bound = 1e-4 * np.abs(wanted).max()
    np.testing.assert_allclose(logits(path, "cuda"), wanted, rtol=0, atol=bound)


def test_what_a_gpu_does_not_serve(tmp_path: Path) -> None:
    path = write_model(tmp_path, "tied")
    with pytest.raises(RestrictionError, match="kv_ring is for device='cpu'"):
        logits(path, "cuda", scheme="kv_ring")
    with pytest.raises(BackendError, match="no CUDA kernel for head_dim 520: 512 is the widest"):
        Llama(write_model(tmp_path, "tied", head_dim=520), device="cuda")


def _broadcast(self: Llama, tokens: Any, *given: Any, **more: Any) -> None:
    MPI.COMM_SELF.Bcast(self.device.memory.empty((len(tokens), 96), np.float32))


def _write_by_the_host(self: ShardedCache, writes: Any, reach: Any, given: Any) -> None:
    self._reserve(reach)
    for rows, into, _ in writes:
        for shard, new in zip(self.arrays, given, strict=True):
            shard[rows, into] = new[rows, np.arange(into.stop - into.start)]


_FROM_HOST = Cuda.from_host
#: What of a model is replaced, by what that mixes arrays.
MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "tokens that index the embedding stay on the host": (
        Embedding, "__call__", lambda self, tokens, sequence_parallel: self.weight[tokens]),
    "angles stay on the host": (
        Cuda, "from_host", lambda self, array: array if array.ndim == 3 else _FROM_HOST(self, array)),
    "a bias stays on the host": (
        Linear, "_add_bias", lambda self, y: y + np.zeros(y.shape[1], np.float32)),
    "a function of NumPy": (RMSNorm, "__call__", lambda self, x: np.sqrt(x)),
    "a method that CuPy is not known to have": (Linear, "_add_bias", lambda self, y: y.byteswap()),
    "MPI is given an array of the GPU": (Cuda, "readable", lambda self, array: array),
    "MPI is given the array itself": (Llama, "forward", _broadcast),
    "the cache is indexed by the host": (ShardedCache, "_write", _write_by_the_host),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_arrays_of_the_host_and_of_the_gpu_are_never_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    """What CuPy would refuse is an error with the stand-ins, too."""
    path, (where, name, wrong) = write_model(tmp_path, "biases"), MISTAKES[mistake]
    monkeypatch.setattr(where, name, wrong)
    refused = (TypeError, AttributeError, TreeattnError)  # the last: of another kind, as all ranks are told
    with pytest.raises(refused, match="DeviceArray|array of the (host|device)|buffer"):
        logits(path, "cuda", MPI.COMM_SELF if mistake.startswith("MPI") else None)

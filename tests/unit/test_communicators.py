"""What the MPI library says of device pointers, asked of libraries that answer in each known way."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

import treeattn
from tests.support.builds import built
from treeattn.mpi import library

OPEN_MPI = "int MPIX_Query_cuda_support(void) {{ return {}; }}"
# The type asked for must be 0, MPIX_GPU_SUPPORT_CUDA; the function gives its answer through a pointer.
MPICH = "int MPIX_GPU_query_support(int type, int *yes) {{ *yes = type == 0 && {}; return {}; }}"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to build a pretended MPI library with")
@pytest.mark.parametrize(
    ("source", "answer"),
    [
        (OPEN_MPI.format(1), True),
        (OPEN_MPI.format(0), False),
        (MPICH.format(1, 0), True),
        (MPICH.format(0, 0), False),
        (MPICH.format(1, 13), False),  # an error is not a yes
        ("int MPI_Init(void) { return 0; }", None),
    ],
)
def test_cuda_aware(monkeypatch: pytest.MonkeyPatch, source: str, answer: bool | None) -> None:
    pretended = built(".so", ["cc", "-shared", "-fPIC", "-x", "c", "-"], stdin=source)
    monkeypatch.setattr(library, "load", lambda: SimpleNamespace(__file__=str(pretended)))
    assert library.cuda_aware() is answer


def test_who_is_no_member_hears_it() -> None:
    one = np.ones((1, 1, 1, 8), np.float32)
    with pytest.raises(treeattn.ArgumentError, match="this rank is no member of the group that comm is"):
        treeattn.decode(one, one, one, comm=MPI.COMM_NULL)


@pytest.mark.parametrize("wrong", [0, "world", object, True, np.ones(2)])
def test_what_is_no_communicator(wrong: object) -> None:
    one = np.ones((1, 1, 1, 8), np.float32)
    for call in (
        lambda: treeattn.decode(one, one, one, comm=wrong),  # type: ignore[arg-type]
        lambda: treeattn.Decoder(wrong, heads=1, kv_heads=1, head_dim=8),  # type: ignore[arg-type]
    ):
        with pytest.raises(treeattn.ArgumentError, match="comm must be an intracommunicator of mpi4py"):
            call()


@pytest.mark.parametrize("scale", [1e300, -1e39, float("nan"), 10**400])
def test_a_scale_that_float32_cannot_hold(scale: float) -> None:
    one = np.ones((1, 1, 1, 8), np.float32)
    with pytest.raises(treeattn.ArgumentError, match="scale must be a finite number of float32"):
        treeattn.decode(one, one, one, scale=scale)
    if np.isfinite(float(min(scale, 1e308))):
        treeattn.decode(*(one.astype(np.float64),) * 3, scale=1e300)

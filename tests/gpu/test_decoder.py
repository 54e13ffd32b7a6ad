"""`treeattn.decode` and `Decoder` on a GPU, one rank; skipped where there is none.

Two ranks need two GPUs with NCCL: nothing here says anything of that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import treeattn
from tests.emulator.cases import CASES, Case, is_tensor_core_case
from treeattn.collectives.runtime import nccl
from treeattn.errors import BackendError

from .test_attention import device_inputs

needs_nccl = pytest.mark.skipif(nccl.problem() is not None, reason=str(nccl.problem()))

OVER_NCCL = [
    pytest.param(scheme, "nccl", marks=needs_nccl) for scheme in ("recursive_doubling", "nccl_allreduce")
]
CASE = Case("bfloat16", 128, group=4, batch=2, tokens=300)


def check(case: Case, results: tuple[Any, Any]) -> None:
    tensor_cores = is_tensor_core_case(case) or not case.tensor_cores
    case.check(*(array.get() for array in results), tensor_cores)


@pytest.mark.parametrize("case", [case for case in CASES if not case.limited], ids=str)
def test_decode_is_exact(case: Case) -> None:
    q, k, v, _ = device_inputs(case)
    lengths = None if case.lengths is None else list(case.lengths)
    shard = treeattn.Shard(k, v, lengths, dtype=case.dtype)
    check(case, treeattn.decode(q, shard, scale=case.scale, device="cuda"))


@pytest.mark.parametrize(
    ("scheme", "transport"),
    [
        ("binary_tree", None),
        ("ring", "host"),
        ("mpi_allreduce", "host"),
        *OVER_NCCL,
        pytest.param("nccl_allreduce:calls=3", "nccl", marks=needs_nccl),
    ],
)
def test_every_transport_follows_a_growing_cache(scheme: str, transport: str | None) -> None:
    """A captured step too, where nothing goes by way of the host."""
    import cupy

    q, k, v, _ = device_inputs(CASE)
    lengths = cupy.zeros(2, cupy.int64)
    with treeattn.Decoder(**CASE.plan, scheme=treeattn.Reduction(scheme, transport)) as decoder:
        step = None if transport == "host" else decoder.capture(q, k, v, lengths)
        for length in (300, 0, 17, 300):
            lengths[:] = length
            grown = Case("bfloat16", 128, group=4, batch=2, tokens=300, lengths=(length, length))
            check(grown, decoder(q, k, v, lengths=lengths))
            check(grown, decoder(q, k, v, lengths=[length, length]))
            if step is not None:
                check(grown, step())


def test_lengths_of_the_host_may_change_at_once() -> None:
    q, k, v, _ = device_inputs(CASE)
    with treeattn.Decoder(**CASE.plan) as decoder:
        for _ in range(20):
            lengths = np.array([300, 300])
            results = decoder(q, k, v, lengths=lengths)
            lengths[:] = 0
            check(CASE, results)


def test_a_step_can_be_part_of_a_graph_of_the_callers() -> None:
    import cupy

    q, k, v, _ = device_inputs(CASE)
    with treeattn.Decoder(**CASE.plan) as decoder, cupy.cuda.Stream(non_blocking=True) as stream:
        decoder(q, k, v)  # compiles and allocates outside the capture
        stream.begin_capture()
        results = decoder(q, k, v)
        graph = stream.end_capture()
        for array in results:
            array.fill(77)
        graph.launch(stream)
        stream.synchronize()
        check(CASE, results)


def test_out_of_memory_is_one_message() -> None:
    with pytest.raises(BackendError, match="out of GPU memory"):
        treeattn.Decoder(
            heads=2**20, kv_heads=1, head_dim=256, batch=2**12, dtype="bfloat16", device="cuda"
        )  # 4 TiB of records


def test_a_query_of_one_rank_comes_by_way_of_the_host() -> None:
    q, k, v, _ = device_inputs(CASE)
    check(CASE, treeattn.decode(q, treeattn.Shard(k, v, dtype="bfloat16"), device="cuda", q_root=0))


def test_results_match_the_processor_through_float32() -> None:
    """The same inputs on both devices: far closer than either is to the oracle's bound."""
    case = Case("float32", 64, group=2, tokens=500)
    q, k, v, _, _ = case.inputs()
    on_cpu = treeattn.decode(q, k, v)
    on_gpu = treeattn.decode(*device_inputs(case)[:3], device="cuda")
    for mine, other in zip(on_cpu, on_gpu, strict=True):
        np.testing.assert_allclose(mine, other.get(), rtol=1e-5, atol=1e-6)

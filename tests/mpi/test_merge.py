"""Parts that other kernels made, merged over the job's ranks, against float64 attention over all tokens."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

import treeattn
from tests.emulator.raw_module import compiler_problem
from tests.emulator.runtime import EmulatorRuntime
from tests.support.drawn import sample
from tests.support.exporters import Dlpack
from tests.support.ranks import assert_same_bits, raised_by_all
from treeattn import collectives
from treeattn.backends.cuda import cupy_runtime
from treeattn.baselines import BASELINES

pytestmark = pytest.mark.mpi

LEFT_WHOLE = [
    *(name for name in collectives.names("schedule") if collectives.build(name, 4).result == "replicated"),
    *("mpi_allreduce", "three_allreduce", "two_allreduce"),
]
REFUSED = [name for name, row in BASELINES.items() if row.fused or row.scattered] + ["head_scatter"]


def scores(size, shape, tokens, seed=0):
    """Scores [size, *shape, tokens] and values [size, *shape, tokens, head_dim] of every rank's tokens."""
    draw = np.random.default_rng(seed)
    *lead, head_dim = shape
    return (
        draw.standard_normal((size, *lead, tokens)) * 6,
        draw.standard_normal((size, *lead, tokens, head_dim)),
    )


def attend(s, v):
    """(out, lse) of scores [.., tokens] and values [.., tokens, head_dim], in float64."""
    if not s.shape[-1]:
        return np.zeros((*s.shape[:-1], v.shape[-1])), np.full(s.shape[:-1], -np.inf)
    high = s.max(axis=-1, keepdims=True)
    weights = np.exp(s - high)
    total = weights.sum(axis=-1, keepdims=True)
    return ((weights / total)[..., None] * v).sum(axis=-2), (high + np.log(total))[..., 0]


def whole(s, v):
    """(out, lse) over the tokens of all ranks."""
    return attend(np.concatenate([*s], axis=-1), np.concatenate([*v], axis=-2))


def assert_whole(comm, got, wanted, tolerance=1e-5):
    assert_same_bits(comm, *got)
    np.testing.assert_allclose(got[0], wanted[0], rtol=0, atol=tolerance)
    np.testing.assert_allclose(got[1], wanted[1], rtol=0, atol=tolerance * 10)


@pytest.mark.parametrize("scheme", sample(6, LEFT_WHOLE))
def test_every_scheme(comm, scheme):
    s, v = scores(comm.size, (2, 3, 72), 5)
    out, lse = (array.astype(np.float32) for array in attend(s[comm.rank], v[comm.rank]))
    got = treeattn.merge(out, lse, comm=comm, scheme=scheme)
    assert got[0].dtype == got[1].dtype == np.float32
    assert_whole(comm, got, whole(s, v))


def test_the_root_alone_is_given_the_result(comm):
    s, v = scores(comm.size, (2, 3, 72), 5)
    out, lse = (array.astype(np.float32) for array in attend(s[comm.rank], v[comm.rank]))
    wanted = treeattn.merge(out, lse, comm=comm, scheme="binary_tree")
    how = treeattn.Reduction("binary_tree", output="root")
    got = treeattn.merge(out, lse, comm=comm, scheme=how)
    if comm.rank:
        assert got == (None, None)
    else:
        assert [one.tobytes() for one in got] == [one.tobytes() for one in wanted]
    with pytest.raises(treeattn.RestrictionError, match="mpi_allreduce is no schedule"):
        treeattn.merge(out, lse, comm=comm, scheme=treeattn.Reduction("mpi_allreduce", output="root"))


@pytest.mark.parametrize("scheme", ["ring", "two_allreduce"])
@pytest.mark.parametrize("shape", [(5,), (1, 2, 3, 4, 1), (2, 300), (3, 0, 2)])
def test_any_head_dim_and_any_axes(comm, scheme, shape):
    s, v = scores(comm.size, shape, 4)
    out, lse = (np.asarray(array, np.float32) for array in attend(s[comm.rank], v[comm.rank]))
    got = treeattn.merge(out, lse, comm=comm, scheme=scheme)
    assert got[0].shape == shape
    assert got[1].shape == shape[:-1]
    assert_whole(comm, got, whole(s, v))


@pytest.mark.parametrize(
    ("base", "dtype"), [("e", np.float32), (2, np.float16), (2, ml_dtypes.bfloat16), ("e", np.float64)]
)
def test_bases_and_types(comm, base, dtype):
    s, v = scores(comm.size, (6, 16), 7)
    log = math.log(base) if base == 2 else 1.0
    out, lse = attend(s[comm.rank], v[comm.rank])
    results = np.float64 if dtype == np.float64 else np.float32
    rounded = {np.float16: 2e-3, ml_dtypes.bfloat16: 2e-2, np.float64: 1e-14}.get(dtype, 1e-5)
    got = treeattn.merge(out.astype(dtype), (lse / log).astype(results), comm=comm, base=base)
    assert got[0].dtype == got[1].dtype == results
    wanted = whole(s, v)
    assert_whole(comm, got, (wanted[0], wanted[1] / log), rounded)
    if dtype == ml_dtypes.bfloat16:
        bits = out.astype(dtype).view(np.uint16)
        again = treeattn.merge(bits, (lse / log).astype(results), comm=comm, base=base)
        np.testing.assert_array_equal(again[0], got[0])


@pytest.mark.parametrize(("base", "lse_dtype"), [("e", np.float32), ("e", np.float64), (2, np.float32)])
@pytest.mark.parametrize("high", [60000.0, -1000.0])
def test_weights_keep_their_digits_at_a_large_lse(comm, base, lse_dtype, high):
    """What the largest float32 of a natural lse is off by would be a relative error of its weight."""
    lse = (high - np.arange(comm.size) * (0.9 if lse_dtype == np.float64 else 1)).astype(lse_dtype)
    out = np.full((1, 4), comm.rank, np.float32)
    got, _ = treeattn.merge(out, lse[comm.rank :][:1], comm=comm, base=base)
    weights = np.exp((lse.astype(np.float64) - float(lse[0])) * (math.log(2) if base == 2 else 1))
    wanted = (weights * np.arange(comm.size)).sum() / weights.sum()
    np.testing.assert_allclose(got, np.full((1, 4), wanted), rtol=0, atol=1e-7)


@pytest.mark.parametrize(("mark", "left"), [(-np.inf, np.nan), (np.inf, 7.0), (np.nan, 7.0)])
def test_what_saw_nothing_counts_nothing(comm, mark, left):
    """The last rank marks head 0 as empty, whatever lies in its out; nobody saw anything of head 1."""
    s, v = scores(comm.size, (3, 8), 4)
    out, lse = (array.astype(np.float32) for array in attend(s[comm.rank], v[comm.rank]))
    out[1], lse[1] = left, mark
    if comm.rank == comm.size - 1:
        out[0], lse[0] = left, mark
    wanted = [np.array(array) for array in whole(s, v)]
    wanted[0][0], wanted[1][0] = (
        (array[0] for array in whole(s[:-1], v[:-1])) if comm.size > 1 else (0, -np.inf)
    )
    wanted[0][1], wanted[1][1] = 0, -np.inf
    for scheme in ("hierarchical", "three_allreduce"):
        assert_whole(comm, treeattn.merge(out, lse, comm=comm, scheme=scheme), wanted)


def test_a_nan_beside_a_finite_lse_reaches_every_rank(comm):
    s, v = scores(comm.size, (3, 8), 4)
    out, lse = (array.astype(np.float32) for array in attend(s[comm.rank], v[comm.rank]))
    if comm.rank == comm.size - 1:
        out[1, 5] = np.nan
    got, _ = treeattn.merge(out, lse, comm=comm)
    assert np.argwhere(np.isnan(got)).tolist() == [[1, 5]]
    assert_same_bits(comm, got)


@pytest.mark.parametrize("mark", [np.inf, np.nan])
def test_strict_refuses_marks_of_one_rank_on_every_rank(comm, mark):
    out, lse = np.zeros((2, 3, 8), np.float32), np.zeros((2, 3), np.float32)
    lse[0, 0] = -np.inf
    with treeattn.Merger(comm, lse_shape=(2, 3), head_dim=8, strict=True) as merger:
        merger(out, lse)
        if comm.rank == comm.size - 1:
            lse[1, 2] = mark
        with pytest.raises(
            treeattn.ArgumentError, match=r"lse is \+inf or NaN in 1 of 6 .*first at \[1, 2\]"
        ):
            merger(out, lse)
        lse[1, 2] = 0
        assert merger(out, lse)[1][1, 2] == np.float32(math.log(comm.size))  # and goes on


def test_a_planned_merge_is_the_same_merge(comm):
    s, v = scores(comm.size, (4, 6, 24), 9)
    with treeattn.Merger(comm, lse_shape=(4, 6), head_dim=24, scheme="ring", base=2) as merger:
        for step in range(3):
            out, lse = (array.astype(np.float32) for array in attend(s[comm.rank] + step, v[comm.rank]))
            got = merger(out, lse)
            assert got[0] is merger.out
            wanted = treeattn.merge(out, lse, comm=comm, scheme="ring", base=2)
            np.testing.assert_array_equal(got[0], wanted[0])
            np.testing.assert_array_equal(got[1], wanted[1])


def test_strides_and_arrays_of_other_libraries(comm):
    """flash-attention writes lse as [heads, tokens] beside out [tokens, heads, head_dim]."""
    s, v = scores(comm.size, (3, 4, 8), 5)
    out, lse = (array.astype(np.float32) for array in attend(s[comm.rank], v[comm.rank]))
    turned = np.ascontiguousarray(lse.T)
    wanted = treeattn.merge(out, lse, comm=comm)
    for got in (
        treeattn.merge(out, turned.T, comm=comm),
        treeattn.merge(Dlpack(out), Dlpack(turned.T), comm=comm),
    ):
        np.testing.assert_array_equal(got[0], wanted[0])
        np.testing.assert_array_equal(got[1], wanted[1])


@pytest.mark.parametrize("scheme", REFUSED)
def test_schemes_that_do_not_merge_finished_parts(comm, scheme):
    message = f"{scheme} (leaves each rank a slice|attends while it communicates).*take another scheme"
    with pytest.raises(treeattn.RestrictionError, match=message):
        treeattn.merge(np.zeros((2, 8), np.float32), np.zeros(2, np.float32), comm=comm, scheme=scheme)


def _out(shape=(2, 8), dtype=np.float32):
    return np.zeros(shape, dtype)


BAD = {
    "shapes": (lambda: (_out(), _out((3,))), {}, r"lse has shape \[3\], expected \[2\].*transposed"),
    "no axis": (lambda: (_out(()), _out(())), {}, r"head_dim \[0\]: whole numbers, at least 1"),
    "integers": (lambda: (_out(dtype=np.int32), _out((2,))), {}, "arrays of int32 are not supported"),
    "lse in 16 bits": (lambda: (_out(), _out((2,), np.float16)), {}, "lse is float16: pass it as float32"),
    "a list": (lambda: ([[1.0]], _out((2,))), {}, "out is a list: pass an array"),
    "base": (lambda: (_out(), _out((2,))), {"base": 10}, "base 10 is unknown: use 'e'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_of_one_rank_raises_the_same_on_every_rank(comm, name):
    make, options, message = BAD[name]
    good = comm.rank != comm.size - 1
    out, lse = (_out(), _out((2,))) if good else make()
    given = {} if good else options
    raised_by_all(comm, lambda: treeattn.merge(out, lse, comm=comm, **given), message, treeattn.ArgumentError)


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        ({"lse_shape": (3,)}, "the shape or dtype of out and lse differs between ranks"),
        ({"base": 2}, "base differs between ranks"),
        ({"scheme": "ring"}, "scheme differs between ranks"),
        ({"strict": True}, "strict differs between ranks"),
    ],
)
def test_what_differs_between_ranks_is_named(comm, mine, message):
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    options = {"lse_shape": (2,), "head_dim": 8} | (mine if comm.rank == comm.size - 1 else {})
    with pytest.raises(treeattn.ArgumentError, match=message):
        treeattn.Merger(comm, **options)


@pytest.fixture
def gpu(comm, nccl_communicators, monkeypatch):
    """An emulated one for each rank, and an NCCL that is made of MPI."""
    if compiler_problem() is not None:
        pytest.skip(str(compiler_problem()))
    emulator = EmulatorRuntime()
    emulator.identity = f"emulated GPU {comm.rank}"
    monkeypatch.setattr(cupy_runtime, "current", lambda: emulator)
    return emulator


def with_an_empty_head(comm):
    """(out, lse) of this rank, NaN where it says that it saw nothing."""
    s, v = scores(comm.size, (3, 4, 72), 5)
    out, lse = (array.astype(np.float32) for array in attend(s[comm.rank], v[comm.rank]))
    lse[0, 0], out[0, 0] = np.nan, np.nan
    return out, lse


@pytest.mark.parametrize(
    ("scheme", "base", "transport"), [("hierarchical", "e", "host"), ("ring", 2, "host"), ("ring", 2, "nccl")]
)
def test_a_gpu_gives_the_bits_of_the_processor(comm, gpu, scheme, base, transport):
    out, lse = with_an_empty_head(comm)
    wanted = treeattn.merge(out, lse, comm=comm, scheme=scheme, base=base)
    got = treeattn.merge(
        out, lse, comm=comm, scheme=treeattn.Reduction(scheme, transport=transport), base=base, device="cuda"
    )
    np.testing.assert_array_equal(got[0], wanted[0])
    np.testing.assert_array_equal(got[1], wanted[1])
    if transport == "host" or comm.size == 1:
        assert gpu.launches == (3 if base == 2 else 2)  # pack, finish, and for base 2 lse

"""Parts that other kernels made, merged over the job's ranks, against float64 attention over all tokens."""

import functools
import math

import ml_dtypes
import numpy as np
import pytest

import treeattn
from tests.support.drawn import sample
from tests.support.exporters import Dlpack
from tests.support.ranks import assert_same_bits, raised_by_all
from tests.support.schemes import REPLICATED, assert_equal
from treeattn.baselines import BASELINES

LEFT_WHOLE = [*REPLICATED, "mpi_allreduce", "three_allreduce", "two_allreduce"]
REFUSED = [name for name, row in BASELINES.items() if row.fused or row.scattered] + ["head_scatter"]


class Parts:
    """Parts of attention over a few tokens of every rank, in float64 and from scores and values."""

    def __init__(self, comm, shape, tokens=5):
        draw, (*lead, head_dim) = np.random.default_rng(0), shape
        self.rank = comm.rank
        self.scores = draw.standard_normal((comm.size, *lead, tokens)) * 6
        self.values = draw.standard_normal((comm.size, *lead, tokens, head_dim))

    def of(self, *ranks, shift=0.0):
        """[out, lse] over the tokens of these ranks."""
        s, v = (
            np.concatenate(self.scores[[*ranks]], axis=-1) + shift,
            np.concatenate(self.values[[*ranks]], axis=-2),
        )
        high = s.max(axis=-1, keepdims=True)
        weights = np.exp(s - high)
        total = weights.sum(axis=-1, keepdims=True)
        return [((weights / total)[..., None] * v).sum(axis=-2), (high + np.log(total))[..., 0]]

    def own(self, dtype=np.float32, **given):
        """out and lse of this rank's tokens."""
        return [array.astype(dtype) for array in self.of(self.rank, **given)]

    def whole(self):
        return self.of(*range(len(self.scores)))


@pytest.fixture
def parts(comm):
    """Called with the shape of out."""
    return functools.partial(Parts, comm)


def assert_whole(comm, got, wanted, tolerance=1e-5):
    assert_same_bits(comm, *got)
    np.testing.assert_allclose(got[0], wanted[0], rtol=0, atol=tolerance)
    np.testing.assert_allclose(got[1], wanted[1], rtol=0, atol=tolerance * 10)


@pytest.mark.parametrize("scheme", sample(6, LEFT_WHOLE))
def test_every_scheme_with_any_head_dim_and_axes(comm, parts, scheme):
    others = ((5,), (1, 2, 3, 4, 1), (2, 300), (3, 0, 2)) if scheme != "mpi_allreduce" else ((16,), (0, 8))
    for shape in ((2, 3, 72), *others):
        drawn = parts(shape)
        got = treeattn.merge(*drawn.own(), comm=comm, scheme=scheme)
        assert got[0].dtype == got[1].dtype == np.float32
        assert (got[0].shape, got[1].shape) == (shape, shape[:-1])
        assert_whole(comm, got, drawn.whole())


def test_every_executor_and_the_root_alone_have_the_same_bits(comm, parts):
    out, lse = parts((2, 3, 72)).own()
    wanted = treeattn.merge(out, lse, comm=comm, scheme="binary_tree")
    for executor in ("mpi", "program", "slots"):
        how = treeattn.Reduction("binary_tree", executor=executor)
        assert_equal(treeattn.merge(out, lse, comm=comm, scheme=how), wanted)
    got = treeattn.merge(out, lse, comm=comm, scheme=treeattn.Reduction("binary_tree", output="root"))
    if comm.rank:
        assert got == (None, None)
    else:
        assert_equal(got, wanted)
    with pytest.raises(treeattn.RestrictionError, match="mpi_allreduce is no schedule"):
        treeattn.merge(out, lse, comm=comm, scheme=treeattn.Reduction("mpi_allreduce", output="root"))


@pytest.mark.parametrize(
    ("base", "dtype"), [("e", np.float32), (2, np.float16), (2, ml_dtypes.bfloat16), ("e", np.float64)]
)
def test_bases_and_types(comm, parts, base, dtype):
    drawn = parts((6, 16))
    log = math.log(base) if base == 2 else 1.0
    out, lse = drawn.own(np.float64)
    results = np.float64 if dtype == np.float64 else np.float32
    rounded = {np.float16: 2e-3, ml_dtypes.bfloat16: 2e-2, np.float64: 1e-14}.get(dtype, 1e-5)
    got = treeattn.merge(out.astype(dtype), (lse / log).astype(results), comm=comm, base=base)
    assert got[0].dtype == got[1].dtype == results
    wanted = drawn.whole()
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
def test_what_saw_nothing_counts_nothing(comm, parts, mark, left):
    """The last rank marks head 0 as empty, whatever lies in its out; nobody saw anything of head 1."""
    drawn = parts((3, 8))
    out, lse = drawn.own()
    out[1], lse[1] = left, mark
    if comm.rank == comm.size - 1:
        out[0], lse[0] = left, mark
    wanted = drawn.whole()
    others = drawn.of(*range(comm.size - 1)) if comm.size > 1 else [[0], [-np.inf]]
    wanted[0][0], wanted[1][0] = (array[0] for array in others)
    wanted[0][1], wanted[1][1] = 0, -np.inf
    for scheme in ("hierarchical", "three_allreduce"):
        assert_whole(comm, treeattn.merge(out, lse, comm=comm, scheme=scheme), wanted)


def test_a_nan_beside_a_finite_lse_reaches_every_rank(comm, parts):
    out, lse = parts((3, 8)).own()
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


def test_a_planned_merge_is_the_same_merge(comm, parts):
    drawn = parts((4, 6, 24))
    with treeattn.Merger(comm, lse_shape=(4, 6), head_dim=24, scheme="ring", base=2) as merger:
        for step in range(3):
            out, lse = drawn.own(shift=step)
            got = merger(out, lse)
            assert got[0] is merger.out
            assert_equal(got, treeattn.merge(out, lse, comm=comm, scheme="ring", base=2))


def test_strides_and_arrays_of_other_libraries(comm, parts):
    """flash-attention writes lse as [heads, tokens] beside out [tokens, heads, head_dim]."""
    out, lse = parts((3, 4, 8)).own()
    turned = np.ascontiguousarray(lse.T)
    wanted = treeattn.merge(out, lse, comm=comm)
    assert_equal(treeattn.merge(out, turned.T, comm=comm), wanted)
    assert_equal(treeattn.merge(Dlpack(out), Dlpack(turned.T), comm=comm), wanted)


@pytest.mark.parametrize("scheme", REFUSED)
def test_schemes_that_do_not_merge_finished_parts(comm, scheme):
    message = f"{scheme} (leaves each rank a slice|attends while it communicates).*take another scheme"
    with pytest.raises(treeattn.RestrictionError, match=message):
        treeattn.merge(ONE, SUM, comm=comm, scheme=scheme)


ONE, SUM = np.zeros((2, 8), np.float32), np.zeros(2, np.float32)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"lse": np.zeros(3, np.float32)}, r"lse has shape \[3\], expected \[2\].*transposed"),
        (
            dict.fromkeys(("out", "lse"), np.zeros((), np.float32)),
            r"head_dim \[0\]: whole numbers, at least 1",
        ),
        ({"out": ONE.astype(np.int32)}, "arrays of int32 are not supported"),
        ({"lse": SUM.astype(np.float16)}, "lse is float16: pass it as float32"),
        ({"out": [[1.0]]}, "out is a list: pass an array"),
        ({"base": 10}, "base 10 is unknown: use 'e'"),
    ],
)
def test_bad_input_of_one_rank_raises_the_same_on_every_rank(comm, bad, message):
    given = {"out": ONE, "lse": SUM, "comm": comm} | (bad if comm.rank == comm.size - 1 else {})
    raised_by_all(comm, lambda: treeattn.merge(**given), message, treeattn.ArgumentError)


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        ({"lse_shape": (3,)}, "the shape or dtype of out and lse differs between ranks"),
        ({"base": 2}, "base differs between ranks"),
        ({"scheme": "ring"}, "scheme differs between ranks"),
        ({"strict": True}, "strict differs between ranks"),
    ],
)
def test_what_differs_between_ranks_is_named(comm, several, mine, message):
    options = {"lse_shape": (2,), "head_dim": 8} | (mine if comm.rank == comm.size - 1 else {})
    with pytest.raises(treeattn.ArgumentError, match=message):
        treeattn.Merger(comm, **options)


@pytest.mark.usefixtures("nccl_communicators")
@pytest.mark.parametrize(
    ("scheme", "base", "transport"), [("hierarchical", "e", "host"), ("ring", 2, "host"), ("ring", 2, "nccl")]
)
def test_a_gpu_gives_the_bits_of_the_processor(comm, runtime, parts, scheme, base, transport):
    out, lse = parts((3, 4, 72)).own()
    lse[0, 0], out[0, 0] = np.nan, np.nan  # of one head it says that it saw nothing
    wanted = treeattn.merge(out, lse, comm=comm, scheme=scheme, base=base)
    how = treeattn.Reduction(scheme, transport=transport)
    assert_equal(treeattn.merge(out, lse, comm=comm, scheme=how, base=base, device="cuda"), wanted)
    if transport == "host" or comm.size == 1:
        assert runtime.launches == (3 if base == 2 else 2)  # pack, finish, and for base 2 lse

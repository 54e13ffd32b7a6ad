"""Attention on the processor: exact for every type, build, grouping and length; -inf, NaN, empty shards."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support import verbs
from tests.support.drawn import sample
from treeattn import partial
from treeattn.backends import cpu
from treeattn.backends.cpu import blocked, compile
from treeattn.collectives.runtime.operator import Operator
from treeattn.errors import ArgumentError, BackendError

Array = np.ndarray[Any, Any]
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def inputs(
    shape: tuple[int, int, int, int, int, int], dtype: Any, seed: int = 0, amplitude: float = 1.0
) -> tuple[Array, Array, Array]:
    """q, k, v for (batch, queries, heads, kv_heads, head_dim, tokens)."""
    batch, queries, heads, kv_heads, head_dim, tokens = shape
    rng = np.random.default_rng(seed)
    q = (amplitude * rng.standard_normal((batch, queries, heads, head_dim))).astype(dtype)
    k, v = (rng.standard_normal((batch, tokens, kv_heads, head_dim)).astype(dtype) for _ in "kv")
    return q, k, v


def attend(
    q: Array, k: Array, v: Array, scale: float, lengths: Array | None = None, **plan: Any
) -> tuple[Array, Array]:
    batch, queries, heads, head_dim = q.shape
    dtype = np.float64 if q.dtype == np.float64 else np.float32
    records = np.full((batch, heads, queries, head_dim + 2), 77, dtype)
    cpu.PlannedAttention(records, scale=scale, **plan)(q, k, v, lengths)
    out, lse = np.full(q.shape, 77, dtype), np.full((batch, heads, queries), 77, dtype)
    verbs.finish(cpu, records, out, lse)
    return out, lse


def oracle(q: Array, k: Array, v: Array, scale: float) -> tuple[Array, Array, float]:
    """out, lse and S = scale * max over keys of sum |q_i k_i|, in float64."""
    q, k, v = (array.astype(np.float64) for array in (q, k, v))
    k, v = (np.repeat(array, q.shape[2] // k.shape[2], axis=2) for array in (k, v))
    scores = scale * np.einsum("bqhd,bthd->bhqt", q, k)
    size = scale * np.einsum("bqhd,bthd->bhqt", abs(q), abs(k)).max(initial=0)
    with np.errstate(all="ignore"):
        weights = np.exp(scores - scores.max(-1, initial=-np.inf, keepdims=True))
        total = weights.sum(-1)
        lse = scores.max(-1, initial=-np.inf) + np.log(total)
        out = np.einsum("bhqt,bthd->bqhd", weights / total[..., None], v)
    return out, lse, size


def assert_exact(got: tuple[Array, Array], q: Array, k: Array, v: Array, scale: float) -> None:
    """The bounds that the package promises for float32 records."""
    out, lse, size = oracle(q, k, v, scale)
    biggest = abs(v.astype(np.float64)).max(initial=0)
    assert abs(got[0] - out).max(initial=0) <= (2e-6 + 1e-6 * size) * biggest
    if k.shape[1] == 0:
        assert (got[1] == -np.inf).all()
    else:
        assert abs(got[1] - lse).max() <= 1e-5 + 1e-6 * size


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens", sample(6, [0, 1, 15, 16, 63, 64, 65, 1024, 1025, 4096]))
@pytest.mark.usefixtures("build")
def test_exact_for_every_length(dtype: str, tokens: int) -> None:
    q, k, v = inputs((2, 1, 4, 2, 128, tokens), TYPES[dtype], seed=tokens)
    assert_exact(attend(q, k, v, 128**-0.5), q, k, v, 128**-0.5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries"),
    [(1, 1, 1), (5, 5, 1), (6, 3, 1), (6, 2, 1), (8, 2, 1), (7, 1, 1), (4, 4, 3), (10, 2, 5)],
)
@pytest.mark.usefixtures("build")
def test_exact_for_every_grouping(dtype: str, heads: int, kv_heads: int, queries: int) -> None:
    q, k, v = inputs((2, queries, heads, kv_heads, 64, 83), TYPES[dtype], seed=heads)
    assert_exact(attend(q, k, v, 0.125), q, k, v, 0.125)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("head_dim", sample(8, [*range(8, 136, 8), 160, 192, 200, 256]))
@pytest.mark.usefixtures("build")
def test_exact_for_every_head_dim(dtype: str, head_dim: int) -> None:
    q, k, v = inputs((1, 1, 4, 1, head_dim, 40), TYPES[dtype], seed=head_dim)
    assert_exact(attend(q, k, v, head_dim**-0.5), q, k, v, head_dim**-0.5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.usefixtures("build")
def test_exact_where_scores_reach_ten_thousand(dtype: str) -> None:
    q, k, v = inputs((1, 2, 4, 2, 64, 300), TYPES[dtype], seed=9, amplitude=400)
    scale = 1.0
    scores = np.einsum("bqhd,bthd->bhqt", q.astype(np.float64), np.repeat(k, 2, 2).astype(np.float64))
    assert scores.max() > 8e3
    assert scores.min() < -8e3
    assert_exact(attend(q, k, v, scale), q, k, v, scale)


@pytest.mark.parametrize(("q_exponent", "k_exponent"), [(-130, 120), (118, -128), (90, -128)])
@pytest.mark.usefixtures("build")
def test_exact_where_subnormal_bfloat16_counts(q_exponent: int, k_exponent: int) -> None:
    """The instruction that multiplies pairs of bfloat16 would take it for 0."""
    q, k, v = inputs((1, 1, 8, 2, 64, 83), ml_dtypes.bfloat16, seed=3)
    q, k = (x * np.array(2.0**e, x.dtype) for x, e in ((q, q_exponent), (k, k_exponent)))
    scale = 2.0 ** min(2, -q_exponent - k_exponent - 3)
    assert_exact(attend(q, k, v, scale), q, k, v, scale)


@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.usefixtures("build")
def test_exact_when_the_maximum_keeps_changing(direction: int) -> None:
    q, k, v = inputs((1, 1, 1, 1, 16, 500), np.float32)
    q[...] = 1
    k[...] = np.linspace(-40, 40, 500, dtype=np.float32)[::direction, None, None]
    assert_exact(attend(q, k, v, 0.25), q, k, v, 0.25)


@pytest.mark.usefixtures("build")
def test_denominator_of_a_long_context() -> None:
    tokens = 1 << 20
    rng = np.random.default_rng(1)
    q = np.zeros((1, 1, 1, 8), np.float32)
    q[..., 0] = 1
    k = np.zeros((1, tokens, 1, 8), np.float32)
    k[..., 0] = rng.uniform(-1, 1, tokens)[:, None]
    v = (1 + rng.uniform(0, 1, k.shape)).astype(np.float32)
    out, lse = attend(q, k, v, 1.0)
    weights = np.exp(k[0, :, 0, 0].astype(np.float64))
    np.testing.assert_allclose(lse[0, 0, 0], np.log(weights.sum()), atol=2e-6)
    np.testing.assert_allclose(
        out[0, 0, 0], weights @ v[0, :, 0].astype(np.float64) / weights.sum(), rtol=2e-6
    )


@pytest.mark.usefixtures("build")
def test_equal_scores_and_values_of_a_long_context() -> None:
    # Sums round to the same side: a thousand partials merged one by one would be 3 times out of bounds.
    q = np.zeros((1, 1, 1, 32), np.float32)
    kv = np.broadcast_to(np.full((1, 1, 1, 32), 0.1, np.float32), (1, 1_000_000, 1, 32))
    out, _ = attend(q, kv, kv, 1.0)
    assert abs(out.astype(np.float64) - np.float64(np.float32(0.1))).max() <= 2e-6 * 0.1


@pytest.mark.usefixtures("build")
def test_lengths_hide_what_lies_beyond() -> None:
    q, k, v = inputs((4, 1, 4, 2, 32, 1100), np.float16, seed=3)
    lengths = np.array([0, 1, 37, 1100])
    for b, length in enumerate(lengths):
        k[b, length:], v[b, length:] = np.nan, np.inf
    out, lse = attend(q, k, v, 0.2, lengths)
    for b, length in enumerate(lengths):
        row = slice(b, b + 1)
        assert_exact((out[row], lse[row]), q[row], k[row, :length], v[row, :length], 0.2)


@pytest.mark.usefixtures("build")
def test_any_strides_but_the_last() -> None:
    q, k, v = inputs((2, 3, 4, 2, 40, 90), np.float32, seed=4)
    expected = attend(q, k, v, 0.2)
    by_head = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k, v)]
    backwards = [np.ascontiguousarray(x[:, ::-1, ::-1])[:, ::-1, ::-1] for x in (q, k, v)]
    padded = [np.concatenate((x, x), axis=3)[..., :40] for x in (q, k, v)]
    repeated = [x[:1].repeat(2, 0) for x in (q, k, v)]
    shared = [np.broadcast_to(x[:1], x.shape) for x in (q, k, v)]
    for strided in (by_head, backwards, padded):
        for ours, theirs in zip(attend(*strided, 0.2), expected, strict=True):
            assert np.array_equal(ours, theirs)
    for ours, theirs in zip(attend(*shared, 0.2), attend(*repeated, 0.2), strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.usefixtures("build")
def test_raw_bits_are_bfloat16_and_q_may_differ_from_the_cache() -> None:
    q, k, v = inputs((1, 1, 4, 2, 48, 70), ml_dtypes.bfloat16)
    expected = attend(q, k, v, 0.2)
    for other in (
        attend(*(x.view(np.uint16) for x in (q, k, v)), 0.2),
        attend(q.astype(np.float32), k, v, 0.2),
    ):
        for ours, theirs in zip(other, expected, strict=True):
            assert np.array_equal(ours, theirs)


@pytest.mark.usefixtures("build")
def test_every_float16_is_read_right() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(1, -1, 1, 8)
    finite = np.where(np.isfinite(patterns), patterns, np.float16(0))
    q = np.zeros((1, 1, 1, 8), np.float16)
    for token in range(0, finite.shape[1], 61):
        one = finite[:, token : token + 1]
        out, _ = attend(q, one, one, 1.0)  # one token: the output is its value
        assert np.array_equal(out[0, 0, 0], one[0, 0, 0].astype(np.float32))
    strange = patterns[:, ~np.isfinite(patterns).all(axis=(0, 2, 3))]
    for token in range(0, strange.shape[1], 7):
        one = strange[:, token : token + 1]
        out, _ = attend(q, np.zeros_like(one), one, 1.0)
        assert np.array_equal(out[0, 0, 0], one[0, 0, 0].astype(np.float32), equal_nan=True)


@pytest.mark.usefixtures("build")
def test_float64_stays_float64() -> None:
    q, k, v = inputs((2, 2, 4, 2, 24, 5000), np.float64)
    out, lse = attend(q, k, v, 0.2)
    expected_out, expected_lse, _ = oracle(q, k, v, 0.2)
    assert out.dtype == lse.dtype == np.float64
    np.testing.assert_allclose(out, expected_out, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-13)


@pytest.mark.usefixtures("build")
def test_masked_tokens_and_masked_rows() -> None:
    q, k, v = inputs((1, 2, 2, 1, 16, 50), np.float32, seed=5)
    q[..., 0] = 1
    k[0, ::2, 0, 0] = -np.inf
    kept_k, kept_v = k[:, 1::2], v[:, 1::2]
    assert_exact(attend(q, k, v, 0.25), q, kept_k, kept_v, 0.25)
    k[..., 0] = -np.inf
    out, lse = attend(q, k, v, 0.25)
    assert (out == 0).all()
    assert (lse == -np.inf).all()


@pytest.mark.parametrize("token", [0, 5, 31, 32])
@pytest.mark.usefixtures("build")
def test_nan_stays_in_its_head(token: int) -> None:
    q, k, v = inputs((1, 2, 6, 3, 24, 33), np.float32, seed=6)
    clean_out, clean_lse = attend(q, k, v, 0.2)
    bad = k.copy()
    bad[0, token, 1, 7] = np.nan
    out, lse = attend(q, bad, v, 0.2)
    assert np.isnan(out[:, :, 2:4]).all()
    assert np.isnan(lse[:, 2:4]).all()
    others = [0, 1, 4, 5]
    assert np.array_equal(out[:, :, others], clean_out[:, :, others])
    assert np.array_equal(lse[:, others], clean_lse[:, others])
    bad = q.copy()
    bad[0, 1, 3, 2] = np.nan
    out, lse = attend(bad, k, v, 0.2)
    assert np.isnan(out[0, 1, 3]).all()
    assert np.isnan(lse[0, 3, 1])
    assert np.isnan(out).sum() == 24
    assert np.isnan(lse).sum() == 1
    bad = v.copy()
    bad[0, token, 2, 3] = np.nan
    out, lse = attend(q, k, bad, 0.2)
    assert np.isnan(out[:, :, 4:, 3]).all()
    assert np.isnan(out).sum() == 4
    assert np.array_equal(lse, clean_lse)


@pytest.mark.usefixtures("build")
def test_infinite_inputs() -> None:
    q, k, v = inputs((1, 1, 2, 2, 16, 20), np.float32, seed=7)
    k[0, 3, 0, 0] = np.copysign(np.inf, q[0, 0, 0, 0])  # a score of +inf: inf - inf in the softmax
    v[0, 4, 1, 2] = np.inf
    out, lse = attend(q, k, v, 0.2)
    assert np.isnan(out[0, 0, 0]).all()
    assert np.isnan(lse[0, 0])
    assert out[0, 0, 1, 2] == np.inf
    assert np.isfinite(np.delete(out[0, 0, 1], 2)).all()
    assert np.isfinite(lse[0, 1])


@pytest.mark.usefixtures("build")
def test_planned_attention_follows_its_arrays() -> None:
    q, k, v = inputs((2, 1, 4, 2, 32, 3000), np.float32, seed=8)
    records = np.empty((2, 4, 1, 34), np.float32)
    expected = np.empty_like(records)
    plan = cpu.PlannedAttention(records, scale=0.2)
    lengths = np.array([1, 2])
    for step in range(3):
        lengths += 900 * step
        plan(q, k, v, lengths)
        verbs.attend(cpu, q, k, v, expected, scale=0.2, lengths=lengths.astype(np.int32))
        assert np.array_equal(records, expected)
    for end in (100, 2999, 7):
        plan(q, k[:, :end], v[:, :end])
        verbs.attend(cpu, q, k[:, :end], v[:, :end], expected, scale=0.2)
        assert np.array_equal(records, expected)
    small = np.array([3, 4], np.int32)
    for _ in range(2):
        plan(q, k, v, small)
        verbs.attend(cpu, q, k, v, expected, scale=0.2, lengths=small)
        assert np.array_equal(records, expected)
        small += 5
    plan(q, k, v)
    verbs.attend(cpu, q, k, v, expected, scale=0.2)
    assert np.array_equal(records, expected)


@pytest.mark.parametrize("lengths", [[0, -1], [31, 0], [1], [[1, 1]]])
@pytest.mark.usefixtures("build")
def test_impossible_lengths(lengths: list[int]) -> None:
    q, k, v = inputs((2, 1, 4, 2, 32, 30), np.float32)
    with pytest.raises(ArgumentError, match="lengths"):
        attend(q, k, v, 1.0, np.array(lengths))


@pytest.mark.usefixtures("build")
def test_impossible_arguments() -> None:
    q, k, v = inputs((2, 1, 4, 2, 32, 30), np.float32)
    for bad in (
        (q[:1], k, v), (q[0], k, v), (q[..., :16], k, v), (q, k[..., :16], v[..., :16]),
        (q, k, v[:, :20]), (q, k[:1], v[:1]), (q, k[:, :, :0], v[:, :, :0]),
        (q, k[:, :, [0, 1, 0]], v[:, :, [0, 1, 0]]), (q, k, v.astype(np.float16)),
        (q, k.astype(np.float64), v.astype(np.float64)), (q.astype(np.int32), k, v),
        (q, np.concatenate((k, k), axis=3)[..., ::2], v),
    ):  # fmt: skip
        records = np.empty((2, 4, 1, 34), np.float32)
        with pytest.raises(ArgumentError):
            verbs.attend(cpu, *bad, records, scale=1.0)
    for records in (
        np.empty((2, 4, 34), np.float32),
        np.empty((2, 4, 1, 34), np.float16),
        np.empty((2, 4, 1, 68), np.float32)[..., ::2],
    ):
        with pytest.raises(ArgumentError):
            verbs.attend(cpu, q, k, v, records, scale=1.0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.usefixtures("build")
def test_merge_is_the_definition(dtype: Any) -> None:
    rng = np.random.default_rng(10)
    a, b = rng.standard_normal((2, 3, 4, 2, 34)).astype(dtype)
    expected = a.copy()
    partial.merge(expected, b)
    operator = cpu.MergeOperator(32, dtype)
    typed: Operator = operator
    assert typed.width == 34
    assert typed.dtype == dtype
    planned = a.copy().reshape(-1, 34)
    operator.planned_merge(planned, b.reshape(-1, 34))()
    assert np.array_equal(planned.reshape(expected.shape), expected)
    operator.planned_merge(planned[:0], planned[:0])()


def test_merge_refuses_other_types() -> None:
    with pytest.raises(ArgumentError):
        cpu.MergeOperator(8, np.float16)


@pytest.mark.usefixtures("build")
def test_finish_refuses_what_does_not_fit() -> None:
    records = partial.identity((2, 3, 4), 8)
    out, lse = np.empty((2, 4, 3, 8), np.float32), np.empty((2, 3, 4), np.float32)
    verbs.finish(cpu, records, out, lse)
    for bad in (
        (out.swapaxes(1, 2), lse),
        (out, lse[:1]),
        (out.astype(np.float64), lse),
        (out, lse.swapaxes(0, 1)),
    ):
        with pytest.raises(ArgumentError):
            verbs.finish(cpu, records, *bad)


@pytest.mark.usefixtures("build")
def test_shards_in_any_order_give_the_whole() -> None:
    q, k, v = inputs((1, 2, 4, 2, 32, 203), np.float32, seed=11)
    pieces = []
    for begin, end in ((0, 0), (0, 1), (1, 100), (100, 203)):
        pieces.append(np.empty((1, 4, 2, 34), np.float32))
        verbs.attend(cpu, q, k[:, begin:end], v[:, begin:end], pieces[-1], scale=0.2)
    for order in ((0, 1, 2, 3), (3, 0, 2, 1)):
        total = partial.identity((1, 4, 2), 32)
        for index in order:
            verbs.merge(cpu, total, pieces[index])
        out, lse = np.empty((1, 2, 4, 32), np.float32), np.empty((1, 4, 2), np.float32)
        verbs.finish(cpu, total, out, lse)
        assert_exact((out, lse), q, k, v, 0.2)


def test_problem_is_none_where_kernels_work() -> None:
    try:
        compile.library(compile.chosen_isa())
    except BackendError as error:
        pytest.skip(str(error))
    assert cpu.compiled_kernels_problem() is None


def test_blocked_is_the_same_verb() -> None:
    q, k, v = inputs((2, 1, 4, 2, 16, 9000), np.float16, seed=12)
    records = np.empty((2, 4, 1, 18), np.float32)
    blocked.partial_attention(q, k, v, records, scale=0.2, lengths=np.array([9000, 5]))
    out, lse = np.empty((2, 1, 4, 16), np.float32), np.empty((2, 4, 1), np.float32)
    partial.finish(records, out, lse)
    assert_exact((out[:1], lse[:1]), q[:1], k[:1], v[:1], 0.2)
    assert_exact((out[1:], lse[1:]), q[1:], k[1:, :5], v[1:, :5], 0.2)


@pytest.mark.parametrize(
    "shape",
    [
        (3, 2, 6, 3, 40, 2500),
        (1, 1, 8, 8, 16, 100),
        (1, 1, 2, 1, 8, 30_000),
        (2, 1, 2, 2, 8, 1),
        (1, 1, 128, 16, 32, 3000),  # of 128 rows each thread has few, and a block's length follows from all
    ],
)
def test_threads_do_not_change_a_bit(build: str, shape: tuple[int, int, int, int, int, int]) -> None:
    if build == "numpy":
        pytest.skip("NumPy has no threads here")
    q, k, v = inputs(shape, np.float16, seed=13)
    lengths = np.arange(shape[0]) * shape[5] // shape[0] + shape[5] // (2 * shape[0])
    expected = attend(q, k, v, 0.3, lengths, threads=1)
    for threads in (2, 3, 7, 1000):
        for _ in range(5):
            for ours, theirs in zip(attend(q, k, v, 0.3, lengths, threads=threads), expected, strict=True):
                assert np.array_equal(ours, theirs)


def test_a_row_does_not_depend_on_its_batch(build: str) -> None:
    q, k, v = inputs((3, 1, 2, 2, 16, 4000), np.float32, seed=14)
    lengths = np.array([4000, 1234, 0])
    out, lse = attend(q, k, v, 0.3, lengths)
    for b in range(3):
        alone = attend(q[b : b + 1], k[b : b + 1, : lengths[b]], v[b : b + 1, : lengths[b]], 0.3)
        assert np.array_equal(alone[0][0], out[b])
        assert np.array_equal(alone[1][0], lse[b])


@pytest.mark.usefixtures("build")
def test_callers_in_several_threads_at_once() -> None:
    cases = [inputs((1, 1, 4, 2, 32, 3000), np.float32, seed=seed) for seed in range(4)]
    expected = [attend(*case, 0.3) for case in cases]
    with ThreadPoolExecutor(4) as executor:
        for _ in range(10):
            results = executor.map(lambda case: attend(*case, 0.3, threads=2), cases)
            for ours, theirs in zip(results, expected, strict=True):
                assert np.array_equal(ours[0], theirs[0])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.usefixtures("build")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_threads_start_anew_after_a_fork() -> None:
    case = inputs((1, 1, 4, 2, 32, 3000), np.float32)
    expected = attend(*case, 0.3, threads=2)
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # a pool that waits for threads of the parent would wait for ever
        same = np.array_equal(attend(*case, 0.3, threads=2)[0], expected[0])
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_unknown_read_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEATTN_READ_ORDER", "backwards")
    with pytest.raises(ArgumentError, match="TREEATTN_READ_ORDER=backwards: choose from scattered, neighb"):
        cpu.PlannedAttention(partial.identity((1, 1, 1), 8), scale=1.0)


@pytest.mark.parametrize(("vendor", "order"), [("AuthenticAMD", "neighbours"), ("GenuineIntel", "scattered")])
def test_read_order_follows_the_processor(monkeypatch: pytest.MonkeyPatch, vendor: str, order: str) -> None:
    monkeypatch.delenv("TREEATTN_READ_ORDER", raising=False)
    monkeypatch.setattr(compile, "processor_vendor", lambda: vendor)
    assert cpu.read_order() == order


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", ""])
def test_impossible_number_of_threads(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TREEATTN_THREADS", text)
    with pytest.raises(ArgumentError, match="TREEATTN_THREADS"):
        cpu.PlannedAttention(partial.identity((1, 1, 1), 8), scale=1.0)

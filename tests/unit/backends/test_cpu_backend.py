"""Attention on the processor: exact for every type, build, grouping and length; -inf, NaN, empty shards."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from tests.support import verbs
from tests.support.drawn import sample
from tests.support.problems import assert_exact, random_qkv
from treeattn import partial, reference
from treeattn.backends import cpu
from treeattn.backends.cpu import blocked, compile
from treeattn.errors import ArgumentError, BackendError

TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
build_fixture = pytest.mark.usefixtures("build")


def attend(q, k, v, scale=0.2, **given):
    return verbs.attention(cpu, q, k, v, scale=scale, **given)


def exact(q, k, v, scale=0.2):
    assert_exact(attend(q, k, v, scale), q, k, v, scale=scale)


def assert_rows_exact(got, q, k, v, lengths):
    """Each sequence within the bounds of its own tokens."""
    for b, length in enumerate(lengths):
        row = slice(b, b + 1)
        assert_exact([x[row] for x in got], q[row], k[row, :length], v[row, :length], scale=0.2)


def assert_same_bits(results, expected):
    for ours, theirs in zip(results, expected, strict=True):
        assert np.array_equal(ours, theirs)


LENGTHS = [{"batch": 2, "head_dim": 128, "tokens": n} for n in (0, 1, 15, 16, 63, 64, 65, 1024, 1025, 4096)]
GROUPINGS = [
    {"batch": 2, "tokens": 83, "heads": heads, "kv_heads": kv_heads, "queries": queries}
    for heads, kv_heads, queries in (
        *((1, 1, 1), (5, 5, 1), (6, 3, 1), (6, 2, 1), (8, 2, 1), (7, 1, 1), (4, 4, 3), (10, 2, 5)),
    )
]
WIDTHS = [{"kv_heads": 1, "tokens": 40, "head_dim": n} for n in (*range(8, 136, 8), 160, 192, 200, 256)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [*sample(6, LENGTHS), *GROUPINGS, *sample(8, WIDTHS)], ids=str)
@build_fixture
def test_exact_for_every_length_grouping_and_head_dim(dtype, shape):
    q, k, v = random_qkv(**shape, dtype=TYPES[dtype])
    exact(q, k, v, q.shape[3] ** -0.5)


@pytest.mark.parametrize("dtype", TYPES)
@build_fixture
def test_exact_where_scores_reach_ten_thousand(dtype):
    q, k, v = random_qkv(300, queries=2, seed=9)
    q, k, v = (x.astype(TYPES[dtype]) for x in (400 * q, k, v))
    scores = np.einsum("bqhd,bthd->bhqt", q.astype(np.float64), np.repeat(k, 2, 2).astype(np.float64))
    assert scores.max() > 8e3
    assert scores.min() < -8e3
    exact(q, k, v, 1.0)


@pytest.mark.parametrize(("q_exponent", "k_exponent"), [(-130, 120), (118, -128), (90, -128)])
@build_fixture
def test_exact_where_subnormal_bfloat16_counts(q_exponent, k_exponent):
    """The instruction that multiplies pairs of bfloat16 would take it for 0."""
    q, k, v = random_qkv(83, heads=8, dtype=ml_dtypes.bfloat16, seed=3)
    q, k = (x * np.array(2.0**e, x.dtype) for x, e in ((q, q_exponent), (k, k_exponent)))
    exact(q, k, v, 2.0 ** min(2, -q_exponent - k_exponent - 3))


@pytest.mark.parametrize("direction", [1, -1])
@build_fixture
def test_exact_when_the_maximum_keeps_changing(direction):
    q, k, v = random_qkv(500, heads=1, kv_heads=1, head_dim=16)
    q[...] = 1
    k[...] = np.linspace(-40, 40, 500, dtype=np.float32)[::direction, None, None]
    exact(q, k, v, 0.25)


@build_fixture
def test_denominator_of_a_long_context():
    tokens = 1 << 20
    rng = np.random.default_rng(1)
    q = np.zeros((1, 1, 1, 8), np.float32)
    q[..., 0] = 1
    k = np.zeros((1, tokens, 1, 8), np.float32)
    k[..., 0] = rng.uniform(-1, 1, tokens)[:, None]
    v = (1 + rng.uniform(0, 1, k.shape)).astype(np.float32)
    out, lse = attend(q, k, v, 1.0)
    wanted_out, wanted_lse = reference.attention(q, k, v, scale=1.0)
    np.testing.assert_allclose(lse, wanted_lse, atol=2e-6)
    np.testing.assert_allclose(out, wanted_out, rtol=2e-6)


@build_fixture
def test_equal_scores_and_values_of_a_long_context():
    # Sums round to the same side: a thousand partials merged one by one would be 3 times out of bounds.
    q = np.zeros((1, 1, 1, 32), np.float32)
    kv = np.broadcast_to(np.full((1, 1, 1, 32), 0.1, np.float32), (1, 1_000_000, 1, 32))
    out, _ = attend(q, kv, kv, 1.0)
    assert abs(out.astype(np.float64) - np.float64(np.float32(0.1))).max() <= 2e-6 * 0.1


@build_fixture
def test_lengths_hide_what_lies_beyond():
    q, k, v = random_qkv(1100, batch=4, head_dim=32, dtype=np.float16, seed=3)
    lengths = np.array([0, 1, 37, 1100])
    for b, length in enumerate(lengths):
        k[b, length:], v[b, length:] = np.nan, np.inf
    assert_rows_exact(attend(q, k, v, lengths=lengths), q, k, v, lengths)


@build_fixture
def test_any_strides_but_the_last():
    arrays = random_qkv(90, batch=2, queries=3, head_dim=40, seed=4)
    by_head = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in arrays]
    backwards = [np.ascontiguousarray(x[:, ::-1, ::-1])[:, ::-1, ::-1] for x in arrays]
    padded = [np.concatenate((x, x), axis=3)[..., :40] for x in arrays]
    for strided in (by_head, backwards, padded):
        assert_same_bits(attend(*strided), attend(*arrays))
    repeated = [x[:1].repeat(2, 0) for x in arrays]
    shared = [np.broadcast_to(x[:1], x.shape) for x in arrays]
    assert_same_bits(attend(*shared), attend(*repeated))


@build_fixture
def test_raw_bits_are_bfloat16_and_q_may_differ_from_the_cache():
    q, k, v = random_qkv(70, head_dim=48, dtype=ml_dtypes.bfloat16)
    expected = attend(q, k, v)
    assert_same_bits(attend(*(x.view(np.uint16) for x in (q, k, v))), expected)
    assert_same_bits(attend(q.astype(np.float32), k, v), expected)


@build_fixture
def test_every_float16_is_read_right():
    patterns = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(1, -1, 1, 8)
    finite = np.where(np.isfinite(patterns), patterns, np.float16(0))
    strange = patterns[:, ~np.isfinite(patterns).all(axis=(0, 2, 3))]
    q = np.zeros((1, 1, 1, 8), np.float16)
    for values, step in ((finite, 61), (strange, 7)):
        for token in range(0, values.shape[1], step):
            one = values[:, token : token + 1]
            out, _ = attend(q, one if values is finite else np.zeros_like(one), one, 1.0)
            assert np.array_equal(out[0, 0, 0], one[0, 0, 0].astype(np.float32), equal_nan=True)


@build_fixture
def test_float64_stays_float64():
    q, k, v = random_qkv(5000, batch=2, queries=2, head_dim=24, dtype=np.float64)
    out, lse = attend(q, k, v)
    expected_out, expected_lse = reference.attention(q, k, v, scale=0.2)
    assert out.dtype == lse.dtype == np.float64
    np.testing.assert_allclose(out, expected_out, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-13)


@build_fixture
def test_masked_tokens_and_masked_rows():
    q, k, v = random_qkv(50, queries=2, heads=2, kv_heads=1, head_dim=16, seed=5)
    q[..., 0] = 1
    k[0, ::2, 0, 0] = -np.inf
    assert_exact(attend(q, k, v), q, k[:, 1::2], v[:, 1::2], scale=0.2)
    k[..., 0] = -np.inf
    out, lse = attend(q, k, v)
    assert (out == 0).all()
    assert (lse == -np.inf).all()


@pytest.mark.parametrize("token", [0, 5, 31, 32])
@build_fixture
def test_nan_stays_in_its_head(token):
    clean = random_qkv(33, queries=2, heads=6, kv_heads=3, head_dim=24, seed=6)
    clean_out, clean_lse = attend(*clean)
    q, k, v = (x.copy() for x in clean)
    q[0, 1, 3, 2] = k[0, token, 1, 7] = v[0, token, 2, 3] = np.nan
    out, lse = attend(clean[0], k, clean[2])
    assert np.isnan(out[:, :, 2:4]).all()
    assert np.isnan(lse[:, 2:4]).all()
    others = [0, 1, 4, 5]
    assert_same_bits((out[:, :, others], lse[:, others]), (clean_out[:, :, others], clean_lse[:, others]))
    out, lse = attend(q, *clean[1:])
    assert np.isnan(out[0, 1, 3]).all()
    assert np.isnan(lse[0, 3, 1])
    assert (np.isnan(out).sum(), np.isnan(lse).sum()) == (24, 1)
    out, lse = attend(*clean[:2], v)
    assert np.isnan(out[:, :, 4:, 3]).all()
    assert np.isnan(out).sum() == 4
    assert np.array_equal(lse, clean_lse)


@build_fixture
def test_infinite_inputs():
    q, k, v = random_qkv(20, heads=2, head_dim=16, seed=7)
    k[0, 3, 0, 0] = np.copysign(np.inf, q[0, 0, 0, 0])  # a score of +inf: inf - inf in the softmax
    v[0, 4, 1, 2] = np.inf
    out, lse = attend(q, k, v)
    assert np.isnan(out[0, 0, 0]).all()
    assert np.isnan(lse[0, 0])
    assert out[0, 0, 1, 2] == np.inf
    assert np.isfinite(np.delete(out[0, 0, 1], 2)).all()
    assert np.isfinite(lse[0, 1])


@build_fixture
def test_planned_attention_follows_its_arrays():
    q, k, v = random_qkv(3000, batch=2, head_dim=32, seed=8)
    records = np.empty((2, 4, 1, 34), np.float32)
    plan = cpu.PlannedAttention(records, scale=0.2)

    def step(tokens, lengths=None):
        """Of arrays that may be others, with lengths that may have been written meanwhile."""
        given = q, k[:, :tokens], v[:, :tokens]
        plan(*given, lengths)
        assert np.array_equal(records, verbs.records_of(cpu, *given, scale=0.2, lengths=lengths))

    for lengths, more in ((np.array([1, 2]), 900), (np.array([3, 4], np.int32), 5)):
        for number in range(3):
            lengths += more * number
            step(3000, lengths)
        for end in (100, 2999, 7, 3000):
            step(end)


@pytest.mark.parametrize("lengths", [[0, -1], [31, 0], [1], [[1, 1]]])
@build_fixture
def test_impossible_lengths(lengths):
    with pytest.raises(ArgumentError, match="lengths"):
        attend(*random_qkv(30, batch=2), lengths=np.array(lengths))


@build_fixture
def test_impossible_arguments():
    q, k, v = random_qkv(30, batch=2, head_dim=32)
    for bad in (
        (q[:1], k, v), (q[0], k, v), (q[..., :16], k, v), (q, k[..., :16], v[..., :16]),
        (q, k, v[:, :20]), (q, k[:1], v[:1]), (q, k[:, :, :0], v[:, :, :0]),
        (q, k[:, :, [0, 1, 0]], v[:, :, [0, 1, 0]]), (q, k, v.astype(np.float16)),
        (q, k.astype(np.float64), v.astype(np.float64)), (q.astype(np.int32), k, v),
        (q, np.concatenate((k, k), axis=3)[..., ::2], v),
    ):  # fmt: skip
        with pytest.raises(ArgumentError):
            verbs.attend(cpu, *bad, np.empty((2, 4, 1, 34), np.float32), scale=1.0)
    for records in (
        np.empty((2, 4, 34), np.float32),
        np.empty((2, 4, 1, 34), np.float16),
        np.empty((2, 4, 1, 68), np.float32)[..., ::2],
    ):
        with pytest.raises(ArgumentError):
            verbs.attend(cpu, q, k, v, records, scale=1.0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@build_fixture
def test_merge_is_the_definition(dtype):
    rng = np.random.default_rng(10)
    a, b = rng.standard_normal((2, 3, 4, 2, 34)).astype(dtype)
    expected = a.copy()
    partial.merge(expected, b)
    operator = cpu.MergeOperator(32, dtype)
    assert (operator.width, operator.dtype) == (34, dtype)
    planned = a.copy().reshape(-1, 34)
    operator.planned_merge(planned, b.reshape(-1, 34))()
    assert np.array_equal(planned.reshape(expected.shape), expected)
    operator.planned_merge(planned[:0], planned[:0])()


def test_merge_refuses_other_types():
    with pytest.raises(ArgumentError):
        cpu.MergeOperator(8, np.float16)


@build_fixture
def test_finish_refuses_what_does_not_fit():
    records = partial.identity((2, 3, 4), 8)
    out, lse = verbs.finished(cpu, records)
    for bad in (
        (out.swapaxes(1, 2), lse),
        (out, lse[:1]),
        (out.astype(np.float64), lse),
        (out, lse.swapaxes(0, 1)),
    ):
        with pytest.raises(ArgumentError):
            verbs.finish(cpu, records, *bad)


def test_problem_is_none_where_kernels_work():
    try:
        compile.library(compile.chosen_isa())
    except BackendError as error:
        pytest.skip(str(error))
    assert cpu.compiled_kernels_problem() is None


def test_blocked_is_the_same_verb():
    q, k, v = random_qkv(9000, batch=2, head_dim=16, dtype=np.float16, seed=12)
    records, lengths = np.empty((2, 4, 1, 18), np.float32), np.array([9000, 5])
    blocked.partial_attention(q, k, v, records, scale=0.2, lengths=lengths)
    out, lse = np.empty((2, 1, 4, 16), np.float32), np.empty((2, 4, 1), np.float32)
    partial.finish(records, out, lse)
    assert_rows_exact((out, lse), q, k, v, lengths)


@pytest.mark.parametrize(
    "shape",
    [
        {"batch": 3, "queries": 2, "heads": 6, "kv_heads": 3, "head_dim": 40, "tokens": 2500},
        {"heads": 8, "kv_heads": 8, "head_dim": 16, "tokens": 100},
        {"heads": 2, "kv_heads": 1, "head_dim": 8, "tokens": 30_000},
        {"batch": 2, "heads": 2, "head_dim": 8, "tokens": 1},
        # Of 128 rows each thread has few, and a block's length follows from all.
        {"heads": 128, "kv_heads": 16, "head_dim": 32, "tokens": 3000},
    ],
    ids=str,
)
def test_threads_do_not_change_a_bit(build, shape):
    if build == "numpy":
        pytest.skip("NumPy has no threads here")
    q, k, v = random_qkv(**shape, dtype=np.float16, seed=13)
    batch, tokens = k.shape[:2]
    lengths = np.arange(batch) * tokens // batch + tokens // (2 * batch)
    expected = attend(q, k, v, lengths=lengths, threads=1)
    for threads in (2, 3, 7, 1000):
        for _ in range(5):
            assert_same_bits(attend(q, k, v, lengths=lengths, threads=threads), expected)


@build_fixture
def test_a_row_does_not_depend_on_its_batch():
    q, k, v = random_qkv(4000, batch=3, heads=2, head_dim=16, seed=14)
    lengths = np.array([4000, 1234, 0])
    out, lse = attend(q, k, v, lengths=lengths)
    for b, end in enumerate(lengths):
        row = slice(b, b + 1)
        assert_same_bits(attend(q[row], k[row, :end], v[row, :end]), (out[row], lse[row]))


@build_fixture
def test_callers_in_several_threads_at_once():
    cases = [random_qkv(3000, head_dim=32, seed=seed) for seed in range(4)]
    expected = [attend(*case) for case in cases]
    with ThreadPoolExecutor(4) as executor:
        for _ in range(10):
            results = executor.map(lambda case: attend(*case, threads=2), cases)
            for ours, theirs in zip(results, expected, strict=True):
                assert np.array_equal(ours[0], theirs[0])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@build_fixture
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_threads_start_anew_after_a_fork():
    case = random_qkv(3000, head_dim=32)
    expected = attend(*case, threads=2)
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # a pool that waits for threads of the parent would wait for ever
        same = np.array_equal(attend(*case, threads=2)[0], expected[0])
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(("vendor", "order"), [("AuthenticAMD", "neighbours"), ("GenuineIntel", "scattered")])
def test_read_order_follows_the_processor(monkeypatch, vendor, order):
    monkeypatch.setattr(compile, "processor_vendor", lambda: vendor)
    assert cpu.read_order() == order


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", ""])
def test_numbers_of_threads_that_cannot_be(monkeypatch, text):
    monkeypatch.setenv("TREEATTN_THREADS", text)
    with pytest.raises(ArgumentError, match="TREEATTN_THREADS"):
        cpu.PlannedAttention(partial.identity((1, 1, 1), 8), scale=1.0)

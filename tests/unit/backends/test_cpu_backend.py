"""Attention on the processor: exact for every type, build, grouping and length; -inf, NaN, empty shards."""

import itertools
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from tests.support import verbs
from tests.support.pages import in_pages
from tests.support.problems import assert_exact, random_qkv
from tests.support.records_contract import SPECIAL, RecordsContract
from tests.unit.backends.conftest import ISAS, take
from treeattn import Rules, Shard, decode, partial, reference
from treeattn.backends import cpu
from treeattn.backends.cpu import attention as cpu_attention
from treeattn.backends.cpu import compile, device
from treeattn.backends.cpu.device import LargePages
from treeattn.errors import ArgumentError

build_fixture = pytest.mark.usefixtures("build")


@pytest.fixture(params=[*compile.available_isas(), "numpy"])
def any_isa(request, monkeypatch):
    """Whatever this machine can merge with: for what takes no time."""
    if request.param == "numpy":
        monkeypatch.setattr(compile, "loaded", lambda: (None, "not wanted"))
    else:
        take(request.param, monkeypatch)


@pytest.mark.usefixtures("any_isa")
class TestRecords(RecordsContract):
    backend = cpu
    head_dims = (21, 80, 256)  # the first is no multiple of any vector's width

    def pairs(self, head_dim):
        """Also of any bits, special values and NaN with payloads among them."""
        rng = np.random.default_rng(head_dim)
        anything = rng.integers(0, 1 << 32, (2, 3000, head_dim + 2), np.uint32).view(np.float32)
        special = rng.random(anything.shape) < 0.1
        anything[special] = rng.choice(np.float32(SPECIAL), int(special.sum()))
        anything[0, ::7, 0] = anything[1, ::7, 0]
        return [*super().pairs(head_dim), tuple(anything)]


def attend(q, k, v, scale=0.2, **given):
    return verbs.attention(cpu, q, k, v, scale=scale, **given)


def exact(q, k, v, scale=0.2):
    assert_exact(attend(q, k, v, scale), q, k, v, scale=scale)


def assert_same_bits(results, expected):
    for ours, theirs in zip(results, expected, strict=True):
        assert np.array_equal(ours, theirs)


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


@pytest.fixture(scope="module")
def long_context():
    """q, k, v, and what they make."""
    tokens = 1 << 20
    rng = np.random.default_rng(1)
    q = np.zeros((1, 1, 1, 8), np.float32)
    q[..., 0] = 1
    k = np.zeros((1, tokens, 1, 8), np.float32)
    k[..., 0] = rng.uniform(-1, 1, tokens)[:, None]
    v = (1 + rng.uniform(0, 1, k.shape)).astype(np.float32)
    return q, k, v, *reference.attention(q, k, v, scale=1.0)


@build_fixture
def test_denominator_of_a_long_context(long_context):
    q, k, v, wanted_out, wanted_lse = long_context
    out, lse = attend(q, k, v, 1.0)
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
def test_pages_of_any_strides():
    """Keys and values in one array, heads before slots: as engines hold them."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 1, 4, 64)).astype(np.float32)
    both = rng.standard_normal((9, 2, 2, 16, 64)).astype(np.float32)  # page, k or v, head, slot
    k, v = both[:, 0].swapaxes(1, 2), both[:, 1].swapaxes(1, 2)
    table, lengths = np.array([[3, 0, 8], [5, 1, 2]]), np.array([40, 48])
    row = [one[table].reshape(2, 48, 2, 64) for one in (k, v)]
    assert_same_bits(attend(q, k, v, lengths=lengths, block_table=table), attend(q, *row, lengths=lengths))


@build_fixture
def test_float64_stays_float64():
    q, k, v = random_qkv(5000, batch=2, queries=2, head_dim=24, dtype=np.float64)
    out, lse = attend(q, k, v)
    expected_out, expected_lse = reference.attention(q, k, v, scale=0.2)
    assert out.dtype == lse.dtype == np.float64
    np.testing.assert_allclose(out, expected_out, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-13)


@pytest.mark.parametrize("lengths", [[0, -1], [31, 0], [1], [[1, 1]]])
@build_fixture
def test_impossible_lengths(lengths):
    with pytest.raises(ArgumentError, match="lengths"):
        attend(*random_qkv(30, batch=2), lengths=np.array(lengths))


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


@pytest.mark.parametrize(
    "shape",
    [
        {"batch": 3, "queries": 2, "heads": 6, "kv_heads": 3, "head_dim": 40, "tokens": 2500},
        {"queries": 40, "kv_heads": 4, "tokens": 3000},
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
    (pages, table), (values, _) = in_pages(k, 64), in_pages(v, 64)
    expected = attend(q, k, v, lengths=lengths, threads=1)
    for threads in (2, 3, 7, 1000):
        for _ in range(2):
            assert_same_bits(attend(q, k, v, lengths=lengths, threads=threads), expected)
        paged = attend(q, pages, values, lengths=lengths, block_table=table, threads=threads)
        assert_same_bits(paged, expected)


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


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group", [1, 3, 4, 6])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(np.float32, np.float32), (np.float16, np.float16),
                         (ml_dtypes.bfloat16, ml_dtypes.bfloat16), (np.float32, ml_dtypes.float8_e4m3fn),
                         (np.float32, ml_dtypes.float8_e5m2)])  # fmt: skip
def test_how_a_cache_is_read_changes_no_bit(isa, group, dtype, kv_dtype, monkeypatch):
    """Tokens of less than a range, of more than a block, a chunk; heads together, and one by one."""
    take(isa, monkeypatch)
    for tokens, kv_heads, head_dim in ((1, 3, 64), (40, 1, 128), (130, 5, 64), (513, 3, 96), (2100, 2, 72)):
        q, k, v = random_qkv(tokens, heads=group * kv_heads, kv_heads=kv_heads, head_dim=head_dim, seed=group)
        q, k, v = q.astype(dtype), k.astype(kv_dtype), v.astype(kv_dtype)
        for order in (k, v), [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (k, v)]:
            expected, *others = (attend(q, *order, way=way) for way in cpu.WAYS)
            for other in others:
                assert_same_bits(other, expected)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("isa", ISAS)
def test_tokens_of_one_query_among_several_are_read_any_way(isa, dtype, monkeypatch):
    """Where queries see far more than they share; the processor's own products of bfloat16."""
    take(isa, monkeypatch)
    q, k, v = (
        one.astype(dtype) for one in random_qkv(1100, queries=2, heads=4, kv_heads=4, head_dim=64, seed=1)
    )
    how = {"rules": Rules(causal=True), "q_positions": [300, 1000]}
    exact = [one.astype(np.float64) for one in (q, k, v)]
    expected = decode(exact[0], Shard(*exact[1:], positions="contiguous"), **how)
    for way in cpu.WAYS:
        monkeypatch.setattr(cpu_attention, "_fastest_way", lambda isa, way=way: way)
        found = decode(q, Shard(k, v, positions="contiguous"), **how)
        for one, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, wanted, atol=2e-5)


WORDS = "one", "two", "three", "not kept"


def test_the_way_is_measured_once_for_a_processor(monkeypatch, tmp_path):
    monkeypatch.setattr(compile, "library_path", lambda isa: tmp_path / f"kernels-{isa}.so")
    answers = iter(["one", "two", "three"])
    for isa, wanted in (("avx2", "one"), ("avx2", "one"), ("neon", "two"), ("avx2", "one")):
        assert compile.measured(isa, WORDS, lambda: next(answers)) == wanted
    monkeypatch.setattr(compile, "_processor", lambda field: "another")
    assert compile.measured("avx2", WORDS, lambda: next(answers)) == "three"
    monkeypatch.setattr(compile, "library_path", lambda isa: tmp_path / "gone" / "kernels.so")
    assert compile.measured("avx2", WORDS, lambda: "not kept") == "not kept"


def test_the_way_kept_is_not_that_of_one_lucky_run(monkeypatch):
    clock, seconds = [0.0], dict(zip(cpu.WAYS, ([1] + [9] * 6, [7] * 7, [8] * 7), strict=True))

    def planned(records, *, way, **how):
        turns = iter(seconds[way])
        return lambda *arrays: clock.append(clock[-1] + next(turns))

    monkeypatch.setattr(cpu_attention, "PlannedAttention", planned)
    monkeypatch.setattr(cpu_attention.time, "thread_time", lambda: clock[-1])
    assert cpu_attention.measure_way() == cpu.WAYS[1]


@pytest.mark.parametrize("text", [b"scattered", b"\xff\xfe", b""])
def test_what_was_kept_of_another_version_is_measured_anew_and_kept(monkeypatch, tmp_path, text):
    monkeypatch.setattr(compile, "library_path", lambda isa: tmp_path / "kernels.so")
    compile.measured("avx2", ("scattered",), lambda: "scattered")
    (path,) = tmp_path.glob("*.measured")
    path.write_bytes(text)
    assert compile.measured("avx2", cpu.WAYS, lambda: cpu.WAYS[1]) == cpu.WAYS[1] == path.read_text()


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", ""])
def test_numbers_of_threads_that_cannot_be(monkeypatch, text):
    monkeypatch.setenv("TREEATTN_THREADS", text)
    with pytest.raises(ArgumentError, match="TREEATTN_THREADS"):
        cpu.PlannedAttention(partial.identity((1, 1, 1), 8), scale=1.0)


def test_rescaled_records_of_float64_keep_their_digits():
    records, sums = np.random.default_rng(1).standard_normal((9, 26)), np.empty((9, 25))
    cpu.MergeOperator(24, np.float64).planned_rescale(records, records[:, 0] + 1, sums[:, 0], sums[:, 1:])()
    np.testing.assert_allclose(sums, records[:, 1:] * np.exp(-1), rtol=1e-15)


def test_copies_are_their_arrays_and_no_bytes_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one takes more than a piece, or nothing."""
    monkeypatch.setattr(device, "_PIECE", 4096)
    rng, pages = np.random.default_rng(0), LargePages()
    shapes = [(0, 7), (3, 5), (1, 1), (100, 30), (7, 0), *map(tuple, rng.integers(1, 40, (30, 2)))]
    dtypes = [np.float32, np.int8, ml_dtypes.bfloat16]
    given = [rng.integers(-9, 9, shape[::-1]).astype(dtypes[at % 3]).T for at, shape in enumerate(shapes)]
    copies = [pages.put(one) for one in given]
    for one, copy in zip(given, copies, strict=True):
        assert copy.dtype == one.dtype
        assert np.array_equal(copy, one)
        assert copy.flags.c_contiguous
        assert copy.ctypes.data % 64 == 0 or not copy.size
    spans = sorted((copy.ctypes.data, copy.ctypes.data + copy.nbytes) for copy in copies if copy.size)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))

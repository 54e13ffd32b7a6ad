"""Records whose bits depend on the set of tokens alone: the laws of the merge on any words, and one bit
pattern from every instruction set, sharding, schedule and order."""

from dataclasses import replace

import numpy as np
import pytest

import treeattn
from tests.support.drawn import FACTOR
from tests.support.problems import BITS_CASES, DEALT, FLOAT8, draw
from treeattn import bins, collectives
from treeattn.backends import cpu
from treeattn.backends.cpu.bins import attend
from treeattn.backends.cpu.compile import available_isas
from treeattn.collectives.executors import loopback

#: What there is to compute with here.
ISAS = (*available_isas(), "numpy")
SCHEMES = [name for name in collectives.names("schedule") if name != "head_scatter"]


def words(rng, count, v_dim):
    """Records of any words; exponents near one another, at the ends, and anywhere."""
    records = rng.integers(-(1 << 63), 1 << 63, (count, 2 * v_dim + bins.EXTRA), np.int64)
    exponents = bins._exponents(records)
    near = rng.integers(-200, 200, exponents.shape)
    exponents[...] = np.where(rng.random(exponents.shape) < 0.7, near, exponents)
    exponents[...] = np.where(rng.random(exponents.shape) < 0.1, bins._EMPTY, exponents)
    exponents[...] = np.where(rng.random(exponents.shape) < 0.1, bins._SPOILED, exponents)
    return records


def merged(merge, a, b):
    total = a.copy()
    merge(total, b)
    return total


def compiled_merge(into, other):
    cpu.BinsOperator((into.shape[1] - bins.EXTRA) // 2).planned_merge(into, other)()


@pytest.mark.parametrize("isa", ISAS)
def test_the_merge_is_a_commutative_monoid_on_arbitrary_words(isa, monkeypatch):
    merge = bins.merge
    if isa != "numpy":
        monkeypatch.setenv("TREEATTN_ISA", isa)
        merge = compiled_merge
    rng = np.random.default_rng(5)
    a, b, c = (words(rng, 4000, 7) for _ in "abc")
    assert (merged(merge, a, b) == merged(merge, b, a)).all()
    assert (merged(merge, merged(merge, a, b), c) == merged(merge, a, merged(merge, b, c))).all()
    assert (merged(merge, a, b) == merged(bins.merge, a, b)).all()
    nothing = bins.identity((4000,), 7)
    sound = bins._exponents(a).min(axis=1) >= bins._EMPTY
    assert sound.sum() > 2000
    assert (merged(merge, a, nothing) == a)[sound].all()


@pytest.mark.parametrize("isa", ISAS[:-1])
def test_results_of_arbitrary_words_are_those_of_the_definition(isa, monkeypatch):
    monkeypatch.setenv("TREEATTN_ISA", isa)
    records = words(np.random.default_rng(6), 4000, 19)
    records[::2, 1:] >>= np.random.default_rng(7).integers(0, 64, (2000, 40))
    exponents = bins._exponents(records[::4])
    exponents[...] = np.random.default_rng(8).integers(-3000, 3000, exponents.shape)
    records = records.reshape(2, 400, 5, -1)
    made = [(np.empty((2, 5, 400, 19), np.float32), np.empty((2, 400, 5), np.float32)) for _ in range(2)]
    bins.finish(records, *made[0])
    cpu.planned_finish(records, *made[1])()
    assert [x.tobytes() for x in made[0]] == [x.tobytes() for x in made[1]]
    assert np.isfinite(made[0][0]).mean() > 0.3


def record_of_many(count, k, v):
    """Of `count` equal tokens of a query of 1: doubled records, merged."""
    q, total = np.ones(1, np.float32), bins.identity((), 1)
    power = bins.record(q, np.full((1, 1), k, np.float32), np.full((1, 1), v, np.float32))
    while count:
        if count % 2:
            bins.merge(total, power)
        bins.merge(power, power.copy())
        count //= 2
    return total


def finished(record):
    out, lse = np.empty((1, 1, 1, 1), np.float32), np.empty((1, 1, 1), np.float32)
    bins.finish(record.reshape(1, 1, 1, -1), out, lse)
    return float(out[0, 0, 0, 0])


@pytest.mark.parametrize("isa", ISAS[:-1])
@pytest.mark.parametrize("dtype", [np.float16, *FLOAT8])
def test_every_number_of_a_narrow_type_is_read_right(dtype, isa, monkeypatch):
    monkeypatch.setenv("TREEATTN_ISA", isa)
    bits = np.dtype(dtype).itemsize * 8
    numbers = np.arange(1 << bits, dtype=f"u{bits // 8}").view(dtype).reshape(-1, 1, 1, 64)
    v = np.where(np.isfinite(numbers.astype(np.float32)), numbers, np.zeros((), dtype))
    factor = 1.0 if bits == 8 else None
    shard = treeattn.Shard(np.zeros_like(v), v, k_scale=factor, v_scale=factor)
    out, _ = treeattn.decode(np.zeros(v.shape, np.float32), shard, reproducible="tokens")
    np.testing.assert_array_equal(out, v.astype(np.float32))


@pytest.mark.parametrize("isa", ISAS[:-1])
def test_a_block_drops_weights_below_the_hundredth_power_of_its_largest(isa, monkeypatch):
    monkeypatch.setenv("TREEATTN_ISA", isa)
    q, v = np.eye(1, 8, dtype=np.float32), np.stack([np.zeros(8), np.ones(8)]).astype(np.float32)
    for power, kept in ((-100.0, True), (-100.5, False)):
        k = np.stack([np.zeros(8), q[0] * power * np.log(2)]).astype(np.float32)
        shard = treeattn.Shard(k[None, :, None], v[None, :, None], positions=slice(0, 2))
        out, _ = treeattn.decode(q[None, :, None], shard, scale=1.0, reproducible="blocks")
        assert (out > 0).all() == kept
        assert finished(bins.record(q[0], k, v[:, :1], blocks=np.zeros(2, int))) == out[0, 0, 0, 0]


def test_as_many_tokens_as_are_taken_do_not_overflow():
    """Each ties half-way between two units of the upper bin, and leaves 2**40 in the lower one."""
    assert finished(record_of_many(bins.MOST_TOKENS, 0.0, 2.0**40)) == 2.0**40
    assert finished(record_of_many(bins.MOST_TOKENS + 1, 0.0, 2.0**40)) != 2.0**40


def test_what_is_cut_off_grows_with_the_tokens_as_promised():
    """4 million, each just below half a unit of the lower bin, beside one of weight 1 and the value 2**39."""
    tokens, logit, largest = 1 << 22, np.float32(-20.8), 2.0**39
    m, e = (float(part[0]) for part in bins._weights(logit.reshape(1)))
    value = float(np.float32(0.49 / (m * 2.0**e)))
    record = record_of_many(tokens, logit, value)
    bins.merge(record, record_of_many(1, 0.0, largest))
    whole = 1 + tokens * m * 2.0**e
    error = abs(finished(record) - (largest + 0.49 * tokens) / whole) / largest
    assert 3e-6 < error <= 2e-12 * tokens


def records_of(case, rank, isa, monkeypatch, *, rng=None, threads=1, sinks=True, whole_blocks=False):
    """The records of a shard [batch, heads, queries, width]; with `rng` in pages, or of other strides."""
    how = rng.choice(["row", "row", "pages", "strides"]) if rng else "row"
    case = replace(case, page_size=int(rng.integers(1, 40)) if how == "pages" else 0)
    given = case.shard(rank)
    k, v, scales = given["k"], given["v"], [given.get(name) for name in ("k_scale", "v_scale")]
    if how == "strides":
        k, v = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (k, v))
    batch, queries, heads, _ = case.q.shape
    records = bins.identity((batch, heads, queries), v.shape[3])
    plan = {"scale": case.scale, "tables": case.tables(given), "whole_blocks": whole_blocks}
    called = {"lengths": given["lengths"], "block_table": given.get("block_table")}
    if isa == "numpy":
        attend(case.q, k, v, records, *scales, **plan, **called)
    else:
        monkeypatch.setenv("TREEATTN_ISA", isa)
        plan |= dict(zip(("k_scale", "v_scale"), scales, strict=True))
        cpu.PlannedAttention(records, threads=threads, **plan)(case.q, k, v, *called.values())
    for head, logit in enumerate(np.asarray(case.rules.get("sink_logits", ()), np.float32) if sinks else ()):
        sink = bins.record_of_sink(logit, v.shape[3])
        bins.merge(records[:, head], np.broadcast_to(sink, records[:, head].shape))
    return records


@pytest.mark.parametrize("whole_blocks", [False, True])
@pytest.mark.parametrize("seed", range(BITS_CASES or 8 * FACTOR))
def test_a_result_is_a_function_of_the_set_of_tokens(seed, whole_blocks, monkeypatch):
    """Or, where whole blocks are dealt out, of the set of blocks."""
    rng = np.random.default_rng([23, seed])
    case = draw(seed, 1, 130).part(5, 1).of_numbers(rng)
    case = case.without_drafts() if whole_blocks else case
    batch, queries, heads, _ = case.q.shape
    one = records_of(case, 0, "numpy", monkeypatch, whole_blocks=whole_blocks)
    want = [np.empty((batch, queries, heads, case.v.shape[3]), "f"), np.empty((batch, heads, queries), "f")]
    got = [np.empty_like(array) for array in want]
    cpu.planned_finish(one, *want)()
    for isa in ISAS[:-1]:
        given = {"rng": rng, "threads": int(rng.integers(1, 4)), "whole_blocks": whole_blocks}
        found = records_of(case, 0, isa, monkeypatch, **given)
        assert (found == one).all(), (isa, given)
        cpu.planned_finish(found, *got)()
        assert [x.tobytes() for x in got] == [x.tobytes() for x in want]
    for _ in range(4):
        size, layout, scheme = int(rng.integers(1, 34)), str(rng.choice(DEALT)), str(rng.choice(SCHEMES))
        kinds = rng.choice(ISAS, size, p=[*[0.9 / (len(ISAS) - 1)] * (len(ISAS) - 1), 0.1])
        dealt = case.dealt(rng, layout, size, bins.BLOCK if whole_blocks else 1)
        parts = []
        for rank, isa in enumerate(kinds):
            given = {"rng": rng, "sinks": rank == 0, "whole_blocks": whole_blocks}
            part = records_of(dealt, rank, isa, monkeypatch, **given)
            parts.append(part.reshape(batch * heads * queries, -1))
        schedule = collectives.build(scheme, size=size)
        for rank, got_there in enumerate(loopback.run(schedule, parts, cpu.BinsOperator(case.v.shape[3]))):
            assert got_there.tobytes() == one.tobytes(), (size, layout, scheme, rank)


@pytest.mark.parametrize("blocks", [None, np.zeros(3, int)])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_leaves_no_sums(bad, blocks):
    q, k, v = np.ones(4, np.float32), np.ones((3, 4), np.float32), np.ones((3, 2), np.float32)
    k[1, 2] = bad
    spoiled = bins.record(q, k, v, blocks=blocks)
    assert bins._exponents(spoiled)[0] == bins._SPOILED
    assert not spoiled[1:].any()
    k[1, 2], v[1, 0] = 1, bad
    spoiled = bins.record(q, k, v, blocks=blocks)
    assert bins._exponents(spoiled)[1] == bins._SPOILED
    assert spoiled[1:3].any()
    assert not spoiled[3:].any()


@pytest.mark.parametrize("blocks", [None, np.zeros(3, int)])
def test_tokens_without_weight_or_value_are_none(blocks):
    q, k, v = np.ones(4, np.float32), np.ones((3, 4), np.float32), np.zeros((3, 2), np.float32)
    record = bins.record(q, k, v, blocks=blocks)
    assert bins._exponents(record)[1] == -127 - (blocks is not None) * bins._BLOCK_BITS
    assert record[1:3].any()
    assert not record[3:].any()
    k[:, 1] = -np.inf
    record = bins.record(q, k, v + 1, blocks=blocks)
    assert bins._exponents(record)[0] == bins._EMPTY
    assert not record[1:].any()


@pytest.mark.parametrize("logit", [-3.5, 0.0, 88.0, 2.0**20])
def test_a_sink_is_a_token_whose_value_is_zero(logit):
    q, k, v = (np.full(shape, x, np.float32) for shape, x in (((1,), logit), ((1, 1), 1), ((1, 3), 0)))
    assert bins.record_of_sink(logit, 3).tobytes() == bins.record(q, k, v).tobytes()
    assert bins.record_of_sink(-np.inf, 3).tobytes() == bins.identity((), 3).tobytes()
    assert bins.record(q, k, v + 1).tobytes() == bins.record(q, k, v + 1, 1.0).tobytes()


def test_bounds_of_logits_and_of_tokens():
    assert bins.record_of_sink(1e30, 1).tobytes() == bins.record_of_sink(2.0**20, 1).tobytes()
    assert bins.MOST_TOKENS << bins.STEP - 1 < 1 << 63 <= bins.MOST_TOKENS + 1 << bins.STEP - 1


def test_the_exponential_is_exact_to_one_unit_in_the_last_place():
    """0.8 are measured; without the highest of its powers 1.8."""
    x = -np.linspace(0, 30, 20001)
    exact = np.exp(x.astype(np.longdouble))
    assert (np.abs(bins._small_exponential(x) - exact) < exact * np.finfo(np.float64).eps).all()


def test_a_soft_cap_is_the_hyperbolic_tangent():
    scores, penalty = np.linspace(-40, 40, 81, dtype=np.float32), np.arange(81.0)
    capped = 5 * np.tanh(scores.astype(np.float64) / 5)
    np.testing.assert_allclose(bins._logits(scores, 5.0, None), capped, rtol=0, atol=1e-14)
    np.testing.assert_allclose(bins._logits(scores, 5.0, penalty), capped - penalty, rtol=0, atol=1e-14)
    assert bins._logits(np.array([1e6, -1e6], np.float32), 1.0, None).tolist() == [1, -1]
    assert (bins._logits(scores, 0, penalty) == scores - penalty).all()
    assert bins._logits(scores, 0, None) is scores

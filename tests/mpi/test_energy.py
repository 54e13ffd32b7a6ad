"""The energy over the job's ranks, against its definition over all keys in float64."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

import treeattn
from treeattn import collectives, energy, reference
from treeattn.baselines import BASELINES
from treeattn.shards import parse_layout

pytestmark = pytest.mark.mpi

SCALE = 0.3
SCHEDULES = [
    name for name in collectives.names("schedule") if collectives.build(name, 4).result == "replicated"
]
SUMS = ["three_allreduce", "two_allreduce"]
REFUSED = [name for name, row in BASELINES.items() if row.fused or row.scattered] + ["head_scatter"]


def made_up(tokens=41, batch=2, queries=3, heads=4, kv_heads=2, dim=16, dtype=np.float64, mean=0.0):
    """zeta, q, and k and v of all ranks; the same on every rank."""
    draw = np.random.default_rng(3)
    query, key = (batch, queries, heads, dim), (batch, tokens, kv_heads, dim)
    zeta, q, k, v = (draw.standard_normal(shape) for shape in (query, query, key, key))
    return tuple(array.astype(dtype) for array in (0.3 * zeta, q, k, v + mean))


def shard(comm, tokens, layout="contiguous"):
    """The indices of this rank's tokens. "sizes": the last rank has all, "gaps": every other one some."""
    if layout == "sizes":
        layout = "sizes=" + ",".join(["0"] * (comm.size - 1) + [str(tokens)])
    if layout == "gaps":
        owners = np.arange(tokens) * -(-comm.size // 2) // tokens * 2
        return np.flatnonzero(owners == comm.rank)
    runs = parse_layout(layout).runs(tokens, comm.rank, comm.size)
    return np.concatenate([np.arange(tokens)[run] for run in runs])


def dense(zeta, q, k, v, seen=None, wide=np.float64):
    """(F, mean, covariance) over all keys. seen: [queries, tokens]. wide: what it computes in."""
    group = q.shape[2] // k.shape[2]
    zeta, q, *cache = (array.astype(wide) for array in (zeta, q, k, v))
    k, v = (np.repeat(array, group, axis=2) for array in cache)
    scores = SCALE * np.einsum("bqhd,bkhd->bhqk", q, k) + np.einsum("bqhd,bkhd->bhqk", zeta, v)
    scores = scores if seen is None else np.where(seen, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    mean = np.einsum("bhqk,bkhd->bqhd", weights / total, v)
    apart = v[:, None] - mean[:, :, None]
    covariance = np.einsum("bhqk,bqkhi,bqkhj->bqhij", weights / total, apart, apart)
    return (top + np.log(total))[..., 0], mean, covariance


def assert_same_bits(comm, *arrays):
    digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
    assert comm.allgather(digest) == [digest] * comm.size


def every_result(comm, scheme, arrays, **options):
    """(value, gradient, mean, variance, covariance of three dimensions)."""
    zeta, *rest = arrays
    options |= {"comm": comm, "scheme": scheme, "scale": SCALE}
    moments = energy.moments(*rest, zeta=zeta, covariance=[2, 9, 5], **options)
    return energy.value(*arrays, **options), energy.gradient(*arrays, **options), *moments


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("scheme", SCHEDULES + SUMS)
def test_every_scheme(comm, scheme, dtype):
    """Every other rank holds nothing. float32 within the bounds of attention: S is of the tilted scores."""
    zeta, q, k, v = made_up(dtype=dtype)
    own = shard(comm, 41, "gaps")
    got = every_result(comm, scheme, (zeta, q, k[:, own], v[:, own]))
    value, mean, covariance = dense(zeta, q, k, v)
    covariance = covariance[..., [2, 9, 5], :][..., [2, 9, 5]]
    variance = np.einsum("bqhii->bqhi", dense(zeta, q, k, v)[2])
    out_bound = lse_bound = moment_bound = 1e-12
    if dtype is np.float32:
        tilted = [np.concatenate(pair, axis=-1) for pair in ((SCALE * q, zeta), (k, v))]
        whole = reference.partial(*tilted, tilted[1], scale=1.0)
        out_bound, lse_bound = reference.error_bounds([whole])
        moment_bound = 2 * out_bound * abs(v).max()
    bounds = lse_bound, out_bound, out_bound, moment_bound, moment_bound
    for one, wanted, bound in zip(got, (value, mean, mean, variance, covariance), bounds, strict=True):
        assert one.dtype == dtype
        np.testing.assert_allclose(one, wanted, rtol=0, atol=bound)
    if scheme in SCHEDULES or dtype is np.float64:
        assert_same_bits(comm, *got)


@pytest.mark.parametrize("layout", ["contiguous", "interleaved", "zigzag", "sizes"])
@pytest.mark.parametrize("tokens", [1, 41])
def test_causal_totals_over_any_layout(comm, layout, tokens):
    """More ranks than tokens, all tokens on one rank, queries before and among the keys."""
    zeta, q, k, v = made_up(tokens=tokens)
    own, q_positions = shard(comm, tokens, layout), np.array([tokens // 2, tokens - 1, tokens // 3])
    options = {"comm": comm, "scale": SCALE, "causal": True, "positions": own, "q_positions": q_positions}
    arrays = zeta, q, k[:, own], v[:, own]
    value, mean, covariance = dense(zeta, q, k, v, np.arange(tokens) <= q_positions[:, None])
    total, slope = energy.total(*arrays, **options), energy.gradient(*arrays, **options)
    _, variance = energy.moments(*arrays[1:], zeta=zeta, **options)
    np.testing.assert_allclose(total, value.sum(axis=(1, 2)), rtol=0, atol=1e-12)
    np.testing.assert_allclose(slope, mean, rtol=0, atol=1e-12)
    np.testing.assert_allclose(variance, np.einsum("bqhii->bqhi", covariance), rtol=0, atol=1e-12)
    assert_same_bits(comm, total, slope, variance)


def test_where_nothing_is_said_ranks_hold_consecutive_tokens(comm):
    """And the queries are the last ones."""
    zeta, q, k, v = made_up()
    own = shard(comm, 41, "gaps")
    got = energy.value(zeta, q, k[:, own], v[:, own], comm=comm, scale=SCALE, causal=True)
    wanted = dense(zeta, q, k, v, np.arange(41) <= np.arange(38, 41)[:, None])[0]
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("scheme", "layout"),
    [("hierarchical", "interleaved"), ("chain", "sizes"), ("ring", "contiguous"), ("two_allreduce", "gaps")],
)
@pytest.mark.parametrize(("dtype", "unit"), [(np.float32, 2.0**-24), (np.float64, 1e-15)])
def test_a_variance_far_from_zero_is_as_exact_as_one_around_it(comm, scheme, layout, dtype, unit):
    """Relative to the spread of the values; ranks have other means. A chain merges once for each rank."""
    zeta, q, k, v = made_up(dtype=np.float64, tokens=120)
    own = shard(comm, 120, layout)
    v = (v + 1e4 + np.arange(120)[:, None, None] / 40).astype(dtype)
    zeta, q, k = (array.astype(dtype) for array in (0 * zeta, q, k))
    _, mean, covariance = dense(zeta, q, k, v, wide=np.longdouble)
    got_mean, variance = energy.moments(q, k[:, own], v[:, own], comm=comm, scheme=scheme, scale=SCALE)
    wanted = np.einsum("bqhii->bqhi", covariance)
    apart = mean - np.repeat(v.mean(axis=1, dtype=np.longdouble), 2, axis=1)[:, None]
    assert (abs(variance - wanted) <= (10 + 2 * comm.size) * unit * (wanted + apart**2)).all()
    assert (abs(got_mean - mean) <= 4 * unit * 1e4).all()
    assert_same_bits(comm, got_mean, variance)


def test_ranks_without_any_key_agree(comm):
    zeta, q, k, v = made_up(tokens=0, dtype=np.float32)
    value, slope, mean, variance, covariance = every_result(comm, "hierarchical", (zeta, q, k, v))
    assert (value == -np.inf).all()
    assert not any(array.any() for array in (slope, mean, variance, covariance))


def test_the_log_likelihood_is_largest_at_attention(comm):
    zeta, q, k, v = made_up()
    own = shard(comm, 41)
    arrays, options = (q, k[:, own], v[:, own]), {"comm": comm, "scale": SCALE}
    z = energy.gradient(None, *arrays, **options)
    best = energy.log_likelihood(None, z, *arrays, **options)
    np.testing.assert_allclose(best, -dense(0 * zeta, q, k, v)[0], rtol=0, atol=1e-12)
    assert (energy.log_likelihood(zeta, z, *arrays, **options) < best).all()
    for axis in np.eye(16)[:3]:
        ends = [
            energy.log_likelihood(0 * zeta + step * axis, z, *arrays, **options) for step in (1e-5, -1e-5)
        ]
        np.testing.assert_allclose((ends[0] - ends[1]) / 2e-5, 0, rtol=0, atol=1e-8)


def test_a_library_with_operators_of_certain_widths(comm):
    """mpi_allreduce has records of 8, 16, .. 256 numerators: those of gradients and of most moments."""
    zeta, q, k, v = made_up(dtype=np.float32)
    own = shard(comm, 41)
    arrays, options = (q, k[:, own], v[:, own]), {"comm": comm, "scale": SCALE, "scheme": "mpi_allreduce"}
    _, mean, _ = dense(zeta, q, k, v)
    np.testing.assert_allclose(energy.gradient(zeta, *arrays, **options), mean, rtol=0, atol=1e-5)
    np.testing.assert_allclose(energy.moments(*arrays, zeta=zeta, **options)[0], mean, rtol=0, atol=1e-5)
    for call in (
        lambda: energy.value(zeta, *arrays, **options),
        lambda: energy.moments(*arrays, covariance=[0, 1], **options),
        lambda: energy.gradient(*(array.astype(np.float64) for array in (zeta, *arrays)), **options),
    ):
        with pytest.raises(
            treeattn.BackendError, match="no compiled.*take a scheme with a schedule"
        ) as caught:
            call()
        assert len(set(comm.allgather(str(caught.value)))) == 1


@pytest.mark.parametrize("scheme", REFUSED)
def test_schemes_without_such_a_reduction(comm, scheme):
    with pytest.raises(treeattn.RestrictionError, match=f"{scheme} .*take another scheme, such as"):
        energy.value(*made_up(), comm=comm, scheme=scheme)


BAD = {
    "shape": lambda z, q, k, v: ((z, q, k, v[:, :1]), {}),
    "zeta": lambda z, q, k, v: ((z[:, :1], q, k, v), {}),
    "no zeta": lambda z, q, k, v: ((None, q, k, v), {}),
    "types": lambda z, q, k, v: ((z, q, k.astype("f4"), v), {}),
    "other types": lambda z, q, k, v: (tuple(array.astype("f4") for array in (z, q, k, v)), {}),
    "scheme": lambda z, q, k, v: ((z, q, k, v), {"scheme": "chain"}),
    "unknown scheme": lambda z, q, k, v: ((z, q, k, v), {"scheme": "chains"}),
    "scale": lambda z, q, k, v: ((z, q, k, v), {"scale": 0.5}),
    "causal": lambda z, q, k, v: ((z, q, k, v), {"causal": False}),
    "positions": lambda z, q, k, v: ((z, q, k, v), {"positions": [5, 4, 3]}),
    "few positions": lambda z, q, k, v: ((z, q, k, v), {"positions": np.arange(2) + 1000}),
    "taken positions": lambda z, q, k, v: ((z, q, k, v), {"positions": np.arange(9)}),
    "q_positions": lambda z, q, k, v: ((z, q, k, v), {"q_positions": [1]}),
    "lengths": lambda z, q, k, v: ((z, q, k, v), {"lengths": [1, 2, 3]}),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_of_one_rank_raise_alike_on_every_rank(comm, case):
    if comm.size == 1:
        pytest.skip("with one rank there is nobody to differ from")
    arrays, options = made_up(tokens=9), {"positions": np.arange(9) + 9 * comm.rank, "causal": True}
    if comm.rank == comm.size - 1:
        arrays, odd = BAD[case](*arrays)
        options |= odd
    for call in (energy.value, energy.gradient, energy.total):
        with pytest.raises(treeattn.TreeattnError) as caught:
            call(*arrays, comm=comm, **options)
        message = str(caught.value)
        assert "\n" not in message
        assert comm.allgather(message) == [message] * comm.size


@pytest.mark.parametrize("covariance", [[3, 3], [99], 2.5, [1, 2]])
def test_another_covariance_on_one_rank(comm, covariance):
    if comm.size == 1:
        pytest.skip("with one rank there is nobody to differ from")
    _, *arrays = made_up(tokens=9)
    with pytest.raises(treeattn.ArgumentError) as caught:
        energy.moments(*arrays, comm=comm, covariance=covariance if comm.rank else True)
    assert len(set(comm.allgather(str(caught.value)))) == 1


def test_ranks_that_ask_for_different_things(comm):
    if comm.size == 1:
        pytest.skip("with one rank there is nobody to differ from")
    call = energy.gradient if comm.rank else energy.value
    with pytest.raises(treeattn.ArgumentError, match="what is computed differs between ranks: 'value' on"):
        call(*made_up(tokens=9), comm=comm)

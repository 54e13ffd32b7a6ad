"""The energy over the job's ranks, against its definition over all keys in float64."""

import numpy as np
import pytest

import treeattn
from tests.support.energies import SCALE, dense, diagonal, random_energy
from tests.support.ranks import assert_same_bits, raised_by_all
from treeattn import Rules, Shard, energy, reference
from treeattn.shards import parse_layout

CAUSAL = Rules(causal=True)
#: Replicated schedules of both kinds of determinism, and a baseline that sums.
SCHEMES = ["hierarchical", "chain", "ring", "recursive_doubling", "two_allreduce"]


def problem(tokens=41, **given):
    zeta, *rest = random_energy(tokens, dim=16, seed=3, **given)
    return (0.3 * zeta).astype(zeta.dtype), *rest


def own_tokens(comm, tokens, layout="contiguous"):
    """The indices of this rank's tokens. "last": the last rank has all, "gaps": every other one some."""
    if layout == "last":
        layout = "sizes=" + ",".join(["0"] * (comm.size - 1) + [str(tokens)])
    if layout == "gaps":
        return np.flatnonzero(np.arange(tokens) * -(-comm.size // 2) // tokens * 2 == comm.rank)
    runs = parse_layout(layout).runs(tokens, comm.rank, comm.size)
    return np.concatenate([np.arange(tokens)[run] for run in runs])


def close(got, wanted, bound):
    np.testing.assert_allclose(got, wanted, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_results_are_what_they_are_defined_as(comm, scheme, dtype):
    """Every other rank holds nothing. float32 within the bounds of attention: S is of the tilted scores."""
    zeta, q, k, v = problem(dtype=dtype)
    own, options = own_tokens(comm, 41, "gaps"), {"comm": comm, "scheme": scheme, "scale": SCALE}
    shard = k[:, own], v[:, own]
    got = (
        energy.value(zeta, q, *shard, **options),
        energy.gradient(zeta, q, *shard, **options),
        *energy.moments(q, *shard, zeta=zeta, covariance=[2, 9, 5], **options),
    )
    value, mean, covariance = dense(zeta, q, k, v)
    wanted = value, mean, mean, diagonal(covariance), covariance[..., [2, 9, 5], :][..., [2, 9, 5]]
    out_bound = lse_bound = moment_bound = 1e-12
    if dtype is np.float32:
        tilted = [np.concatenate(pair, axis=-1) for pair in ((SCALE * q, zeta), (k, v))]
        out_bound, lse_bound = reference.error_bounds([reference.partial(*tilted, tilted[1], scale=1.0)])
        moment_bound = 2 * out_bound * abs(v).max()
    bounds = lse_bound, out_bound, out_bound, moment_bound, moment_bound
    for one, exact, bound in zip(got, wanted, bounds, strict=True):
        assert one.dtype == dtype
        close(one, exact, bound)
    if scheme != "two_allreduce" or dtype is np.float64:
        assert_same_bits(comm, *got)


@pytest.mark.parametrize("layout", ["contiguous", "interleaved", "zigzag", "last"])
@pytest.mark.parametrize("tokens", [1, 41])
def test_causal_totals_over_any_layout(comm, layout, tokens):
    """More ranks than tokens, all tokens on one rank, queries before and among the keys."""
    zeta, q, k, v = problem(tokens)
    own, q_positions = own_tokens(comm, tokens, layout), np.array([tokens // 2, tokens - 1, tokens // 3])
    options = {"comm": comm, "scale": SCALE, "rules": CAUSAL, "q_positions": q_positions}
    shard = Shard(k[:, own], v[:, own], positions=own)
    value, mean, covariance = dense(zeta, q, k, v, np.arange(tokens) <= q_positions[:, None])
    total, slope = energy.total(zeta, q, shard, **options), energy.gradient(zeta, q, shard, **options)
    _, variance = energy.moments(q, shard, zeta=zeta, **options)
    close(total, value.sum(axis=(1, 2)), 1e-12)
    close(slope, mean, 1e-12)
    close(variance, diagonal(covariance), 1e-12)
    assert_same_bits(comm, total, slope, variance)


def test_unless_said_ranks_hold_consecutive_tokens(comm):
    zeta, q, k, v = problem()
    own = own_tokens(comm, 41, "gaps")
    got = energy.value(zeta, q, k[:, own], v[:, own], comm=comm, scale=SCALE, rules=CAUSAL)
    close(got, dense(zeta, q, k, v, np.arange(41) <= np.arange(38, 41)[:, None])[0], 1e-12)


def test_a_library_with_operators_of_certain_widths(comm):
    """mpi_allreduce has records of 8, 16, .. 256 numerators: those of gradients and of most moments."""
    zeta, q, k, v = problem(dtype=np.float32)
    own = own_tokens(comm, 41)
    arrays, options = (q, k[:, own], v[:, own]), {"comm": comm, "scale": SCALE, "scheme": "mpi_allreduce"}
    _, mean, _ = dense(zeta, q, k, v)
    close(energy.gradient(zeta, *arrays, **options), mean, 1e-5)
    close(energy.moments(*arrays, zeta=zeta, **options)[0], mean, 1e-5)
    for call in (
        lambda: energy.value(zeta, *arrays, **options),
        lambda: energy.moments(*arrays, covariance=[0, 1], **options),
        lambda: energy.gradient(*(array.astype(np.float64) for array in (zeta, *arrays)), **options),
    ):
        raised_by_all(comm, call, "no compiled.*take a scheme with a schedule", treeattn.BackendError)


BAD = {
    "shape": lambda z, q, k, v: ((z, q, k, v[:, :1]), {}),
    "zeta": lambda z, q, k, v: ((z[:, :1], q, k, v), {}),
    "no zeta": lambda z, q, k, v: ((None, q, k, v), {}),
    "other types": lambda z, q, k, v: (tuple(array.astype("f4") for array in (z, q, k, v)), {}),
    "scheme": lambda z, q, k, v: ((z, q, k, v), {"scheme": "chain"}),
    "scale": lambda z, q, k, v: ((z, q, k, v), {"scale": 0.5}),
    "rules": lambda z, q, k, v: ((z, q, k, v), {"rules": Rules()}),
    "positions": lambda z, q, k, v: ((z, q, Shard(k, v, positions=np.arange(2) + 1000)), {}),
    "taken positions": lambda z, q, k, v: ((z, q, Shard(k, v, positions=np.arange(9))), {}),
    "q_positions": lambda z, q, k, v: ((z, q, k, v), {"q_positions": [1]}),
    "lengths": lambda z, q, k, v: ((z, q, k, v), {"lengths": [1, 2, 3]}),
}


def test_what_differs_between_ranks_raises_alike_on_every_rank(comm, several):
    zeta, q, k, v = problem(9)
    for odd in BAD.values():
        options = {"comm": comm, "rules": CAUSAL}
        arrays = zeta, q, Shard(k, v, positions=np.arange(9) + 9 * comm.rank)
        if comm.rank == comm.size - 1:
            arrays, other = odd(zeta, q, k, v)
            options |= other
        raised_by_all(comm, lambda arrays=arrays, options=options: energy.value(*arrays, **options))
    for covariance in ([3, 3], [99], 2.5, [1, 2]):
        chosen = covariance if comm.rank else True
        raised_by_all(comm, lambda chosen=chosen: energy.moments(q, k, v, comm=comm, covariance=chosen))
    call = energy.gradient if comm.rank else energy.value
    message = raised_by_all(comm, lambda: call(zeta, q, k, v, comm=comm))
    assert message.startswith("what is computed differs between ranks: 'value' on")

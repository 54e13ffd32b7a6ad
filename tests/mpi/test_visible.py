"""What a query may see, over any sharding, against a dense float64 oracle that looks at every token."""

from __future__ import annotations

import os

import numpy as np
import pytest

import treeattn
from tests.support import arguments
from tests.support.problems import draw
from tests.support.ranks import assert_same_bits
from treeattn import collectives, reference
from treeattn.errors import ArgumentError

pytestmark = pytest.mark.mpi

REPLICATED = [
    name for name in collectives.names("schedule") if collectives.build(name, 4).result == "replicated"
]


#: How many drawn cases; `make fuzz-visible` asks for more than a run of the tests has time for.
CASES = int(os.environ.get("TREEATTN_VISIBLE_CASES", "40"))


def assert_case(comm, seed):
    case = draw(seed, comm.size)
    case = case.latent() if seed % 7 == 3 else case
    case = case.in_8_bits(seed) if seed % 5 == 1 else case
    scheme = REPLICATED[seed % len(REPLICATED)]
    out, lse = treeattn.decode(comm=comm, scheme=scheme, **arguments.call(**case.shard(comm.rank)))
    wanted_out, wanted_lse, out_bound, lse_bound = case.expected()
    where = f"seed {seed}, {scheme}, {case.rules}, q {case.q.shape} {case.q.dtype}, k {case.k.shape}"
    np.testing.assert_allclose(out, wanted_out, rtol=0, atol=out_bound, err_msg=where)
    np.testing.assert_allclose(lse, wanted_lse, rtol=0, atol=lse_bound, err_msg=where)
    assert_same_bits(comm, out, lse)


@pytest.mark.parametrize("block", range(4))
def test_drawn_cases_are_exact_and_equal_on_all_ranks(comm, block):
    for seed in range(block, CASES, 4):
        assert_case(comm, seed)


def shards(comm, tokens=60, heads=2, seed=1, **rules):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((1, n, heads, 64)).astype(np.float32) for n in (1, tokens, tokens))
    begin, end = comm.rank * tokens // comm.size, (comm.rank + 1) * tokens // comm.size
    return (q, k, v), dict(q=q, k=k[:, begin:end], v=v[:, begin:end], comm=comm, **rules)


def test_a_sink_counts_once_whatever_the_number_of_ranks(comm):
    logits = np.array([0.5, 3.0])
    (q, k, v), given = shards(comm, sink_logits=logits)
    out, lse = treeattn.decode(**arguments.call(**given))
    wanted_out, wanted_lse = reference.attention(q, k, v, scale=0.125, sinks=logits)
    np.testing.assert_allclose(out, wanted_out, rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse, wanted_lse, rtol=0, atol=1e-5)
    empty = {name: given[name][:, :0] for name in "kv"}
    out, lse = treeattn.decode(**arguments.call(**given | empty))
    assert not out.any()
    np.testing.assert_allclose(lse[0, :, 0], logits, rtol=1e-7)


@pytest.mark.parametrize("rules", [{"causal": True}, {"causal": True, "window": (16, None), "leading": 4}])
def test_a_planned_decoder_over_a_cache_that_grows(comm, rules):
    """Interleaved: token t lies on rank t mod p, whatever the length; decode() is told the positions."""
    rng = np.random.default_rng(3)
    k, v = (rng.standard_normal((1, 40, 2, 64)).astype(np.float32) for _ in "kv")
    mine = slice(comm.rank, None, comm.size)
    own_k, own_v = np.ascontiguousarray(k[:, mine]), np.ascontiguousarray(v[:, mine])
    with treeattn.Decoder(
        comm,
        heads=2,
        kv_heads=2,
        head_dim=64,
        dtype="float32",
        cache=treeattn.CacheFormat(positions="interleaved"),
        rules=treeattn.Rules(**rules),
    ) as decoder:
        for total in (1, 2, 17, 18, 40):
            q = rng.standard_normal((1, 1, 2, 64)).astype(np.float32)
            length = np.array([len(range(comm.rank, total, comm.size))])
            out, lse = decoder(q, own_k, own_v, length, q_positions=[total - 1])
            part = slice(0, length[0])
            shard = treeattn.Shard(own_k[:, part], own_v[:, part], positions="interleaved")
            once = treeattn.decode(q, shard, comm=comm, rules=treeattn.Rules(**rules))
            assert (out.tobytes(), lse.tobytes()) == tuple(array.tobytes() for array in once)
            seen = reference.seen(np.arange(total), [[total - 1]], **rules)
            wanted, _ = reference.attention(q, k[:, :total], v[:, :total], scale=0.125, seen=seen)
            np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-5)


def test_positions_that_the_decoder_cannot_know_are_asked_for(comm):
    with pytest.raises(ArgumentError, match="depends on the number of tokens"):
        treeattn.Decoder(
            comm,
            heads=1,
            kv_heads=1,
            head_dim=8,
            rules=treeattn.Rules(causal=True),
            cache=treeattn.CacheFormat(positions="zigzag"),
        )
    one = np.ones((1, 1, 1, 8), np.float32)
    with treeattn.Decoder(
        comm, heads=1, kv_heads=1, head_dim=8, dtype="float32", rules=treeattn.Rules(causal=True)
    ) as decoder:
        with pytest.raises(ArgumentError, match="pass positions="):
            decoder.local(one, one, one, q_positions=[0])
        with pytest.raises(ArgumentError, match="pass q_positions="):
            decoder.local(one, treeattn.Shard(one, one, positions=[comm.rank]))

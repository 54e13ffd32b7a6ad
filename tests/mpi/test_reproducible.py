"""One bit pattern over real ranks: whatever the layout, the scheme, the executor and the instruction sets."""

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import treeattn
from tests.support import arguments
from tests.support.drawn import FACTOR
from tests.support.problems import BITS_CASES, DEALT, draw
from tests.support.token_trees import Case
from treeattn import Reduction, Shard, collectives
from treeattn.backends.cpu import compile
from treeattn.errors import TreeattnError
from treeattn.token_tree import verify

pytestmark = pytest.mark.many_ranks
SCHEMES = [name for name in collectives.names("schedule") if name != "head_scatter"]

EXECUTORS = ("slots", "program", "mpi")


def decoded(comm, case, how, reproducible="tokens"):
    """out and lse of this rank, as bytes."""
    given = arguments.call(**case.shard(comm.rank))
    out, lse = treeattn.decode(comm=comm, scheme=how, reproducible=reproducible, **given)
    return out.tobytes() + lse.tobytes()


@pytest.mark.parametrize("seed", range(BITS_CASES or 5 * FACTOR))
def test_every_rank_of_every_reduction_has_the_bits_of_one(seed, comm, monkeypatch):
    rng = np.random.default_rng([29, seed])
    case = draw(seed, 1, 700).of_numbers(rng)
    want = decoded(MPI.COMM_SELF, case, Reduction())
    isas = compile.available_isas()
    monkeypatch.setenv("TREEATTN_ISA", isas[comm.rank % len(isas)])
    tried = [(executor, str(rng.choice(SCHEMES))) for executor in EXECUTORS] + [(None, "mpi_allreduce")]
    for executor, scheme in tried:
        layout = str(rng.choice(DEALT))
        how = Reduction(scheme, executor=executor, groups=1)
        got = decoded(comm, case.dealt(rng, layout, comm.size), how)
        assert got == want, (layout, scheme, executor)


def test_a_decoder_keeps_its_bits_over_a_growing_cache(comm):
    rng = np.random.default_rng(3)
    q = rng.standard_normal((1, 1, 4, 64), np.float32)
    k, v = (rng.standard_normal((1, 300, 2, 64), np.float32) for _ in "kv")
    planned = {"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "float32", "reproducible": "tokens"}
    with treeattn.Decoder(comm, **planned) as decoder, treeattn.Decoder(MPI.COMM_SELF, **planned) as one:
        for tokens in (5, 150, 300):
            own = slice(comm.rank * tokens // comm.size, (comm.rank + 1) * tokens // comm.size)
            want = [x.copy() for x in one(q, k[:, :tokens], v[:, :tokens])]
            got = decoder(q, np.ascontiguousarray(k[:, own]), np.ascontiguousarray(v[:, own]))
            assert [x.tobytes() for x in got] == [x.tobytes() for x in want]


@pytest.mark.parametrize("seed", range(BITS_CASES or 2 * FACTOR))
def test_whole_blocks_have_the_bits_of_one_rank(seed, comm):
    rng = np.random.default_rng([31, seed])
    case = draw(seed, 1, 700).of_numbers(rng).without_drafts()
    want = decoded(MPI.COMM_SELF, case, Reduction(), "blocks")
    dealt = case.dealt(rng, "", comm.size, 32)
    for scheme in ("chain", "mpi_allreduce"):
        assert decoded(comm, dealt, Reduction(scheme), "blocks") == want


def test_torn_blocks_are_refused_on_every_rank(comm):
    q, k = np.ones((1, 1, 2, 8), np.float32), np.ones((1, 33, 2, 8), np.float32)
    given = {"comm": comm, "reproducible": "blocks"}
    if comm.size == 1:
        treeattn.decode(q, k, k, **given)
        return
    with pytest.raises(TreeattnError, match="whole blocks of 32 positions"):
        treeattn.decode(q, k, k, **given)
    plan = {"heads": 2, "kv_heads": 2, "head_dim": 8, "dtype": "float32", "reproducible": "blocks"}
    with pytest.raises(TreeattnError, match="needs the positions of tokens"):
        treeattn.Decoder(comm, **plan)
    cache = treeattn.CacheFormat(positions=[(64 * comm.rank, 1, 64)])
    shard = Shard(k, k, positions=[(16 + 64 * comm.rank, 1, k.shape[1])])
    with treeattn.Decoder(comm, cache=cache, **plan) as decoder:
        with pytest.raises(TreeattnError, match="whole blocks of 32 positions"):
            decoder(np.ones((1, 1, 2, 8), np.float32), shard)
        decoder(np.ones((1, 1, 2, 8), np.float32), k, k)


def test_more_tokens_than_64_bits_hold_are_refused_on_every_rank(comm):
    tokens = 3 if comm.rank else ((1 << 23) - 1) // comm.size + 1
    k = np.zeros((1, tokens, 1, 8), ml_dtypes.float8_e5m2)
    shard = Shard(k, k, k_scale=1.0, v_scale=1.0)
    with pytest.raises(TreeattnError, match="a shard of .* tokens: reproducible= takes at most"):
        treeattn.decode(np.zeros((1, 1, 1, 8), np.float32), shard, comm=comm, reproducible="tokens")


@pytest.mark.parametrize("seed", range(4))
def test_a_token_tree_has_the_bits_of_one_rank(seed, comm):
    case = Case.draw(500 + seed, comm.size, ("float32", "float16"))
    drafts = case.draft_k, case.draft_v, case.tree
    whole = {"comm": MPI.COMM_SELF, "lengths": case.lengths, "reproducible": "tokens"}
    want = verify(case.q, case.k, case.v, *drafts, **whole)
    k, v, lengths = case.shard(comm.rank)
    for owner, scheme in (("single", "chain"), ("position", "ring"), ("round_robin", "mpi_allreduce")):
        given = {"comm": comm, "lengths": lengths, "owner": owner, "scheme": scheme, "reproducible": "tokens"}
        got = verify(case.q, k, v, *drafts, **given)
        assert [x.tobytes() for x in got] == [x.tobytes() for x in want], (owner, scheme)


def test_the_certificate_says_whose_the_bits_are(comm):
    planned = {"heads": 2, "kv_heads": 2, "head_dim": 8, "comm": comm}
    for name, bits in ((None, "of the schedule"), ("tokens", "of the tokens")):
        with treeattn.Decoder(**planned, reproducible=name) as decoder:
            assert decoder.certificate.bits == bits


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ({"scheme": "kv_ring"}, "kv_ring folds in an order of its own"),
        ({"reproducible": "blocks of 7"}, "'blocks of 7' is unknown"),
        ({"device": "cuda"}, "for device='cpu'"),
    ],
)
def test_what_is_not_served_is_refused_by_name(comm, what, error):
    planned = {"heads": 4, "kv_heads": 4, "head_dim": 64, "dtype": "float32", "reproducible": "tokens"}
    with pytest.raises(TreeattnError, match=error):
        treeattn.Decoder(comm, **(planned | what))

"""What cannot be computed is one line, the same on every rank, and nobody is left waiting."""

import re

import ml_dtypes
import numpy as np
import pytest

import treeattn
from tests.support import arguments
from tests.support.exporters import Dlpack
from tests.support.problems import random_qkv
from tests.support.public_verbs import VERBS
from tests.support.ranks import raised_by_all
from tests.support.schedules import star
from treeattn import CacheFormat, Decoder, Reduction, Rules, Shard, collectives
from treeattn.decoder.request import INCOMPATIBLE
from treeattn.errors import ArgumentError, RestrictionError, ScheduleError, StateError

Q, K, V = random_qkv(9)
ONE = np.ones((1, 1, 1, 8), np.float32)
LATENT = {name: np.ones((1, n, heads, 576), np.float32) for name, n, heads in (("q", 1, 16), ("k", 20, 1))}
E5M2 = ml_dtypes.float8_e5m2
SMALL = {"heads": 1, "kv_heads": 1, "head_dim": 8, "dtype": "float32"}
TALL = {"heads": 16, "kv_heads": 1, "head_dim": 576, "dtype": "float32"}
TABLE = np.zeros((1, 1), np.int32)

#: What a call passes but for what is wrong.
CALLS = {
    "plain": lambda comm: {"q": Q, "k": K, "v": V},
    "8 bits": lambda comm: {"q": Q, "k": K.astype(E5M2), "v": V.astype(E5M2), "k_scale": 1.0, "v_scale": 1.0},
    "latent": lambda comm: {**LATENT, "v": None, "v_dim": 512, "scale": 1.0},
    "pages": lambda comm: {
        "q": ONE, **{name: np.ones((5, 4, 1, 8), np.float32) for name in "kv"},
        "block_table": np.array([[2, 0]]), "lengths": [6],
    },
    "rules": lambda comm: {
        **dict.fromkeys("qkv", ONE), "causal": True, "positions": [comm.rank], "q_positions": [9],
    },
}  # fmt: skip


def raises(comm, call, match, kind=treeattn.TreeattnError, **changes):
    given = arguments.call(**CALLS[call](comm) | changes)
    return raised_by_all(comm, lambda: treeattn.decode(comm=comm, **given), match, kind)


#: Of each way in which a shard is looked at; tests/unit/attention has the rest of what is refused there.
ON_ONE_RANK = [
    ("plain", {"q": Q[:, :, :3]}, "3 query heads cannot be grouped over 2 KV heads"),
    ("plain", {"q": Q[..., :60], "k": K[..., :60], "v": V[..., :60]}, "head_dim 60 is not supported: use a"),
    ("plain", {"q": Q.astype(int), "k": K.astype(int), "v": V.astype(int)}, "arrays of int64 are not"),
    ("plain", {"v": V[:, :-1]}, r"k has shape \[1, 9, 2, 64\] and v \[1, 8, 2, 64\]"),
    ("plain", {"v": V[:, :, :1]}, r"k has shape \[1, 9, 2, 64\] and v \[1, 9, 1, 64\]"),
    ("plain", {"q": Q[0]}, r"expected four axes \[batch, queries, heads, head_dim\]"),
    ("plain", {"q": Q.tolist()}, "q is a list: pass an array with DLPack or the array interface"),
    ("plain", {"k": K[..., ::2], "v": V[..., ::2]}, r"k and v have shape \[1, 9, 2, 32\], expected"),
    ("plain", {"q": Dlpack(Q, kind=2), "device": "cpu"}, "device='cpu': move the array"),
    ("plain", {"lengths": [10**6]}, r"lengths \[1000000\] must lie between 0 and the shard's 9 tokens"),
    ("plain", {"lengths": [-1]}, r"lengths \[-1\] must lie between 0 and"),
    ("plain", {"lengths": [1, 1]}, r"whole numbers of shape \[1\] .one per sequence., not int64 of shape"),
    ("plain", {"lengths": [[1], [2, 3]]}, "ValueError: .*inhomogeneous shape"),
    ("plain", {"scale": float("nan")}, "scale must be a finite number of float32, not nan"),
    ("plain", {"scale": True}, "scale must be a finite number of float32, not True"),
    ("plain", {"scale": 10**400}, "scale must be a finite number of float32, not 1000"),
    ("plain", {"v": None}, r"v is missing: pass it, or Shard\(v_dim="),
    ("plain", {"q_root": print}, "q_root must be a whole number from 0 on, not <built-in function print>"),
    ("plain", {"q_root": "first"}, "q_root must be a whole number from 0 on, not 'first'"),
    ("plain", {"device": "tpu"}, "device 'tpu' is unknown: use 'cpu' or 'cuda'"),
    ("plain", {"begins": [1], "scheme": "kv_ring"}, "lets every query see every token: begins need"),
    ("8 bits", {"k_scale": None}, "a cache of float8_e5m2 needs k_scale: a number, or one for each KV head"),
    ("8 bits", {"v_scale": [1.0, 2.0, 3.0]}, "v_scale must be a number, or one for each of 2 KV heads"),
    ("8 bits", {"k": K.astype("f2"), "v": V.astype("f2")}, "k_scale is for caches of float8_e4m3fn and"),
    ("8 bits", {"k": K.astype("u1"), "v": V.astype("u1")}, r"carry float8 bits: say of which, Shard\(dtype="),
    ("8 bits", {"k": K.astype("i1"), "v": V.astype("i1")}, "arrays of int8 are not supported"),
    ("8 bits", {"k": K.astype("f8"), "v": V.astype("f8")}, "k and v are float64, but q is float32"),
    ("8 bits", {"dtype": "float8_e4m3fn"}, "the array is float8_e5m2, but dtype='float8_e4m3fn'"),
    ("latent", {"v_dim": 584}, "v_dim 584 must be a number of k's 576 channels"),
    ("latent", {"scale": None}, "the scale has to be given"),
    ("latent", {"v_dim": None}, r"v is missing: pass it, or Shard\(v_dim="),
    ("latent", {"v_dim": None, "v": LATENT["k"][..., :100]}, "v_dim 100 is not supported"),
    ("pages", {"block_table": np.array([[2, 5]])}, r"block_table\[0, 1\] is 5, but k and v have 5 pages"),
    ("pages", {"lengths": [9]}, "a length of 9 is more than the block table holds"),
    ("pages", {"lengths": None}, "a paged cache needs lengths="),
    ("rules", {"mask": np.ones((1, 2, 1), bool)}, "the mask is bool"),
    ("rules", {"q_positions": [0, 1]}, "q_positions have shape"),
]


@pytest.mark.parametrize(
    ("call", "changes", "message"),
    [
        pytest.param(*row, id=str(at), marks=[pytest.mark.many_ranks] * (at % 3 == 0))
        for at, row in enumerate(ON_ONE_RANK)
    ],
)
def test_what_is_wrong_on_one_rank_is_raised_by_all(comm, call, changes, message):
    last = comm.rank == comm.size - 1
    raises(comm, call, message, **changes if last else {})


EVERYWHERE = [
    ({"scheme": "binary_three"}, "there is no scheme 'binary_three'; did you mean binary_tree.* known: "),
    ({"scheme": "hierarchical:nodes=100+1"}, "hierarchical: nodes=100[+]1 hold 101 ranks, but there are"),
    ({"q_root": 10**6}, "q_root 1000000 is not a rank of this communicator: use 0 to"),
    ({"scheme": "kv_ring", "output": "root"}, "kv_ring (leaves each rank|is no schedule)"),
    ({"scheme": "head_all_to_all", "output": "root"}, "head_all_to_all (leaves each rank|is no schedule)"),
]


@pytest.mark.parametrize(("changes", "message"), EVERYWHERE, ids=range(len(EVERYWHERE)))
def test_what_is_wrong_everywhere(comm, changes, message):
    raises(comm, "plain", message, **changes)


def test_what_is_given_twice_or_is_of_another_kind(comm):
    for given, message in (
        ({"k": Shard(K, V), "v": V}, "v is given twice: in the Shard and as an argument"),
        ({"k": Shard(K, V, [1]), "lengths": [1]}, "lengths is given twice: in the Shard and as an argument"),
        ({"k": K, "v": V, "scheme": 5}, "scheme must be a name or a Schedule, not 5"),
        ({"k": K, "v": V, "rules": {"causal": True}}, "rules must be a treeattn.Rules, not {'causal': True}"),
    ):
        raised_by_all(comm, lambda given=given: treeattn.decode(Q, comm=comm, **given), message)


#: `last`: is this the last rank? What it passes is another thing than what the others do.
DIFFERENT = [
    ("plain", lambda last, c: {"q": Q[:, :, : 2 if last else 4]}, "the shape or dtype of q, k, v differs"),
    (
        "plain",
        lambda last, c: {name: one.astype("f2" if last else "f4") for name, one in zip("qkv", (Q, K, V))},  # noqa: B905
        "the shape or dtype of q, k, v differs",
    ),
    ("plain", lambda last, c: {"scheme": "binary_tree" if last else "chain"}, "scheme differs between ranks"),
    ("plain", lambda last, c: {"scale": 2.0 if last else 1.0}, "scale differs between ranks: 1.0 on rank 0"),
    ("8 bits", lambda last, c: {"k_scale": 2.0 if last else 1.0}, "k_scale"),
    ("plain", lambda last, c: {"output": "root" if last else "replicated"}, "output differs between ranks"),
    ("plain", lambda last, c: {"executor": "mpi" if last else "program"}, "executor differs between ranks"),
    ("plain", lambda last, c: {"q_root": None if last else 0}, "q_root differs between ranks: 0 on rank 0"),
    ("plain", lambda last, c: {"begins": [c.rank]}, "begins differs between ranks"),
    ("plain", lambda last, c: {"positions": range(9) if last else None}, "positions being known differs"),
    ("rules", lambda last, c: {"positions": [3]}, "both claim position 3"),
    ("rules", lambda last, c: {"positions": [c.rank] if c.rank else None}, "rank 0 passed no positions"),
    ("rules", lambda last, c: {"window": (c.rank, 0)}, "rules differs"),
    ("rules", lambda last, c: {"positions": f"sizes={c.size}" + (c.size - 1) * ",0"}, "gives rank"),
    ("rules", lambda last, c: {"positions": "zigzag" if last else "interleaved"}, "the layout of positions"),
    ("rules", lambda last, c: {"positions": None, "q_positions": [c.rank]}, "q_positions"),
    ("rules", lambda last, c: {"positions": None, "q_positions": [0] if last else None}, "q_positions"),
    (
        "pages",
        lambda last, c: {name: np.ones((5, 8 if last else 4, 1, 8), np.float32) for name in "kv"},
        r"page_size \(None without a block_table\) differs",
    ),
    (
        "pages",
        lambda last, c: {"k": K20, "v": K20, "block_table": None} if last else {},
        r"page_size \(None without a block_table\) differs",
    ),
]
K20 = np.ones((1, 20, 1, 8), np.float32)


@pytest.mark.many_ranks
@pytest.mark.parametrize(("call", "changes", "message"), DIFFERENT, ids=range(len(DIFFERENT)))
def test_what_ranks_say_together_cannot_be(comm, several, call, changes, message):
    raises(comm, call, message, **changes(comm.rank == comm.size - 1, comm))


@pytest.mark.parametrize("few", [1, 2])
def test_numbers_of_queries_that_differ_between_ranks(comm, several, few):
    count = 4 if comm.rank == comm.size - 1 else few
    raised_by_all(
        comm,
        lambda: Decoder(comm, **SMALL, queries=count),
        "the shape or dtype of q, k, v differs",
        ArgumentError,
    )
    plan = treeattn.token_tree.Verifier
    raised_by_all(comm, lambda: plan(comm, **SMALL, nodes=count), "nodes differs", ArgumentError)


def test_a_hole_between_blocks_is_named(comm, several):
    q, k = np.ones((2, 1, 1, 8), np.float32), np.ones((2, 3, 1, 8), np.float32)
    given = {"lengths": np.array([3, 1 if comm.rank == 0 else 3]), "rules": Rules(causal=True), "comm": comm}
    said = "sequence 1 has a hole: rank 0 holds fewer"
    raised_by_all(comm, lambda: treeattn.decode(q, k, k, **given), said, ArgumentError)


def test_a_ring_refuses_the_mask_of_one_rank_on_all(comm):
    mask = np.ones((1, 1, 1), bool) if comm.rank == comm.size - 1 else None
    said = "lets every query see every token: mask need"
    raises(comm, "plain", said, RestrictionError, scheme="query_ring", mask=mask)


#: What a Decoder is planned with, what its step is given (None: the plan is refused), and what is said.
PLANNED = [
    ({**TALL, "v_dim": 512}, None, "the scale has to be given"),
    ({**TALL, "v_dim": 580, "scale": 1.0}, None, "v_dim 580 is not supported"),
    ({**TALL, "scale": 1.0}, {**LATENT, "v": None}, "v is missing"),
    ({**TALL, "v_dim": 512, "scale": 1.0}, {**LATENT, "v": LATENT["k"]}, r"expected \[.*, kv_heads, v_dim\]"),
    ({**SMALL, "causal": True, "positions": "zigzag"}, None, "depends on the number of tokens"),
    ({**SMALL, "causal": True}, {"q_positions": [0]}, "pass positions="),
    ({**SMALL, "causal": True}, {"positions": [0]}, "pass q_positions="),
    ({**SMALL, "softcap": 3.0}, {"block_table": TABLE, "lengths": [1]}, "page_size=None: plan with cache="),
    (SMALL, {"block_table": TABLE, "lengths": [1]}, "page_size=None: plan with cache="),
    ({**SMALL, "page_size": 1}, {"lengths": [1]}, r"page_size=1: pass Shard\(block_table="),
    ({**SMALL, "page_size": 1}, {"block_table": TABLE}, "needs lengths="),
    (
        {**SMALL, "page_size": 1, "softcap": 3.0},
        {"k": ONE[:, :0], "v": ONE[:, :0], "block_table": TABLE, "lengths": [1]},
        r"expected \[pages, page_size, kv_heads, head_dim\]",
    ),
]


@pytest.mark.parametrize(("plan", "step", "message"), PLANNED, ids=range(len(PLANNED)))
def test_what_a_decoder_is_not_planned_for(comm, plan, step, message):
    with pytest.raises(ArgumentError, match=message), Decoder(comm, **arguments.plan(**plan)) as decoder:
        decoder.local(**arguments.call(**dict.fromkeys("qkv", ONE) | (step or {})))


#: What a Decoder is planned with so that it has a property of the table.
ASKED = {
    "ring": {"scheme": "kv_ring"},
    "groups": {"groups": 2},
    "rules": {"rules": Rules(causal=True)},
    "pages": {"cache": CacheFormat(page_size=16)},
    "types": {"cache": CacheFormat(dtype="float16")},
    "v_dim": {"cache": CacheFormat(v_dim=16)},
    "float64": {"dtype": "float64"},
    "reproducible": {"reproducible": "tokens"},
    "sum": {"scheme": "two_allreduce"},
    "no schedule": {"scheme": "mpi_allreduce"},
    "slices": {"scheme": "head_scatter"},
    "whole": {"scheme": "chain"},
    "replicated": {"output": "replicated"},
    "heads": {"output": "heads"},
    "root": {"output": "root"},
}
PAIRS = [pair for pair in INCOMPATIBLE if ASKED.keys() >= set(pair)]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_what_excludes_each_other_is_refused(comm, pair):
    assert len(PAIRS) > 15
    one, other = (ASKED[name] for name in pair)
    plan = {"heads": 2, "kv_heads": 2, "head_dim": 8, "dtype": "float32", **one, **other}
    how = Reduction(**{name: plan.pop(name) for name in ("scheme", "groups", "output") if name in plan})
    said = re.sub(r"\\\{[^}]*\}", ".*", re.escape(INCOMPATIBLE[pair]))
    with pytest.raises(RestrictionError, match=said):
        Decoder(comm, **plan, scheme=how)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        *((lambda n=n: CacheFormat(page_size=n), "page_size must be a positive whole number")
          for n in (0, -1, 1.5, True)),
        (lambda: Shard(K, V, k_scale=1.0, v_scale=np.nan), "v_scale must be finite and above 0"),
        (lambda: Shard(K, V, v_dim=32), "pass v=None, or leave v_dim out"),
        (lambda: Shard(K, v_dim=0), "v_dim must be a positive whole number, not 0"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_are_refused_where_they_are_made(make, said):
    with pytest.raises(ArgumentError, match=said):
        make()


@pytest.mark.parametrize("scheme", ["counts twice", "a list", "lists", "nameless", "halves"])
def test_wrong_schedules_are_refused_by_all(comm, several, scheme):
    rounds = star(comm.size).rounds
    made, message = {
        "counts twice": ((scheme, comm.size, 1, (rounds[0],) * 2), "twice"),
        "a list": ((scheme, comm.size, 1, list(rounds)), "a tuple of rounds"),
        "lists": ((scheme, comm.size, 1, tuple(map(list, rounds))), "a round is a tuple of Transfer"),
        "nameless": ((None, comm.size, 1, rounds), "has a name"),
        "halves": ((scheme, comm.size, 1.5, rounds), "whole numbers"),
    }[scheme]
    wrong = collectives.Schedule(*made)
    raises(comm, "plain", message, ScheduleError, scheme=wrong)
    alone = wrong if comm.rank == comm.size - 1 else star(comm.size, str(wrong.name))
    raises(comm, "plain", "the schedule .* differs" if scheme == "counts twice" else message, scheme=alone)


@pytest.mark.many_ranks
def test_schedules_that_differ_between_ranks_are_refused_by_all(comm):
    """Of one name, but another order of messages on the last rank."""
    if comm.size < 3:
        pytest.skip("three ranks have the first order to differ in")
    schedule, last = star(comm.size), comm.rank == comm.size - 1
    first, *rest = schedule.rounds
    other = collectives.Schedule("star", comm.size, 1, (first[::-1], *rest))
    raises(comm, "plain", "the schedule star differs", ArgumentError, scheme=other if last else schedule)
    said = "scheme differs .* 'star' on rank 0, 'chain'"
    raises(comm, "plain", said, ArgumentError, scheme="chain" if last else schedule)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_ranks_at_different_calls_are_told_which(comm, several, verb):
    """Rank 0 makes a call that no other rank makes: nobody waits, or takes what was said for an answer."""
    with pytest.raises(StateError, match=r"rank \d is at another call") as told:
        VERBS[verb](comm=comm) if comm.rank == 0 else treeattn.ShardedCache.load("nowhere", comm)
    assert (": load; this is rank 0" in str(told.value)) == (comm.rank == 0)
    assert treeattn.decode(Q, K, V, comm=comm)[0].shape == Q.shape


def test_a_save_beside_a_load(comm, several, tmp_path):
    cache = treeattn.ShardedCache(comm, capacity=8, kv_heads=2, head_dim=8)
    with pytest.raises(StateError, match="is at another call: (load|save); "):
        cache.save(tmp_path / "new") if comm.rank else treeattn.ShardedCache.load(tmp_path, comm)


def test_plans_of_a_cache_that_differ_are_named(comm, several):
    odd = comm.rank == comm.size - 1
    plan = {"capacity": 8, "kv_heads": 1, "head_dim": 8}
    for name, other in (("layers", 2), ("latent", True), ("v_dim", 16), ("dtype", "float32")):
        with pytest.raises(ArgumentError, match=f"{name}.* differs between ranks"):
            treeattn.ShardedCache(comm, **plan | ({name: other} if odd else {}))

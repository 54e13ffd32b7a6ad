"""Token trees over the job's ranks: what one rank decides for all, and what all compute together."""

import numpy as np
import pytest

from tests.support.ranks import assert_same_bits, raised_by_all
from tests.support.token_trees import DTYPES, Case
from treeattn.token_tree import TokenTree, Verifier, accept_greedy, accept_speculative, verify

TREE = TokenTree.from_beams(np.array([[[0, 1, 2], [0, 2, 3]], [[0, 3, 1], [0, 3, 2]]]))
#: Schedules of both kinds of determinism, and what has none.
SCHEMES = ["hierarchical", "chain", "ring", "mpi_allreduce", "two_allreduce"]
OWNERS = ("single", "position", "round_robin", "drawn")


def owner_of(name, case, comm):
    if name != "drawn":
        return name
    return np.random.default_rng(1).integers(0, comm.size, case.tree.tokens.shape)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_packed_is_each_beam_alone(comm, scheme):
    """Every owner, layouts with empty shards, ragged batches; the cases differ from scheme to scheme."""
    dtypes = DTYPES[1:] if scheme == "mpi_allreduce" else DTYPES  # which has no float64
    for turn in range(len(OWNERS)):
        case = Case.draw(1000 * SCHEMES.index(scheme) + turn, comm.size, dtypes)
        k, v, lengths = case.shard(comm.rank)
        owner = owner_of(OWNERS[turn], case, comm)
        out, lse = verify(
            *(case.q, k, v, case.draft_k, case.draft_v, case.tree),
            comm=comm, scheme=scheme, lengths=lengths, owner=owner,
        )  # fmt: skip
        case.check(out, lse)
        assert_same_bits(comm, out, lse)


def test_each_key_is_counted_once(comm):
    """Keys of 0 and values that name their key: the result says who was seen, and how often."""
    case = Case.draw(6, comm.size)
    tree, tokens = case.tree, 5
    dim = -(-(tokens + tree.nodes) // 8) * 8
    names = np.eye(dim)[None, :, None]
    q = np.zeros((tree.batch, tree.nodes, 1, dim))
    own = slice(comm.rank, tokens, comm.size)
    k, draft_k = np.zeros((tree.batch, len(range(*own.indices(tokens))), 1, dim)), q
    v = np.broadcast_to(names[:, :tokens][:, own], k.shape)
    draft_v = np.broadcast_to(names[:, tokens : tokens + tree.nodes], q.shape)
    for owner in OWNERS:
        out, _ = verify(
            q, k, v, draft_k, draft_v, tree, comm=comm, owner=owner_of(owner, case, comm)
        )  # fmt: skip
        seen = np.concatenate([np.ones((*q.shape[:2], tokens), bool), tree.mask], 2) & tree.real[..., None]
        counted = out[:, :, 0, : tokens + tree.nodes] * np.maximum(seen.sum(2), 1)[..., None]
        np.testing.assert_allclose(counted, seen, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "poison"), [("float32", np.nan), ("float16", np.inf), ("float64", -np.inf)]
)
def test_pads_change_no_bit(comm, dtype, poison):
    tree = TokenTree.from_parents([[1] * 6] * 3, [[-1, 0, 0, 1, 1, 2]] * 3, lengths=[6, 2, 0])
    draw = np.random.default_rng(3)
    q, draft_k, draft_v = (draw.standard_normal((3, 6, heads, 16)).astype(dtype) for heads in (4, 2, 2))
    k, v = np.random.default_rng(comm.rank).standard_normal((2, 3, 9, 2, 16)).astype(dtype)
    lengths = np.array([9 if comm.rank else 0, 4, 5])
    with Verifier(comm, heads=4, kv_heads=2, head_dim=16, nodes=6, batch=3, dtype=dtype) as verifier:
        results = []
        for filled in (0, poison):
            for array in (q, draft_k, draft_v):
                array[~tree.real] = filled
            for row, length in enumerate(lengths):
                k[row, length:], v[row, length:] = filled, filled
            out, lse = verifier(q, k, v, draft_k, draft_v, tree, lengths)
            results.append(out.tobytes() + lse.tobytes())
    assert results[0] == results[1]
    assert not out[~tree.real].any()


@pytest.mark.parametrize("scheme", ["binary_tree", "recursive_doubling"])
def test_the_message_is_the_records_alone(comm, scheme):
    """However long the context is; and nothing else is sent in a step."""
    nodes, heads, head_dim = 12, 4, 16
    plan = {"heads": heads, "kv_heads": 2, "head_dim": head_dim, "dtype": "float32", "scheme": scheme}
    with Verifier(comm, nodes=nodes, **plan) as verifier:
        sent = verifier.decoder.sent
    wanted = {nodes * heads * (head_dim + 2) * 4} if comm.size > 1 else set()
    assert {size for _, size in sent} == wanted


def verified(comm, **changes):
    case = Case.draw(2, comm.size)
    k, v, lengths = case.shard(comm.rank)
    given = {"q": case.q, "k": k, "v": v, "draft_k": case.draft_k, "draft_v": case.draft_v, "tree": case.tree}
    return verify(**given | {"comm": comm, "lengths": lengths} | changes)


def test_what_ranks_disagree_about(comm, several):
    case = Case.draw(2, comm.size)
    moved = TokenTree.from_parents(case.tree.tokens + 1, case.tree.parents, case.tree.lengths)
    for words, change in {
        "q differs between ranks": {"q": case.q + 1},
        "draft_k differs between ranks": {"draft_k": case.draft_k + 1},
        "draft_v differs between ranks": {"draft_v": case.draft_v * 2},
        "the tree differs": {"tree": moved},
        "owner differs between ranks": {"owner": "round_robin"},
        f"rank {comm.size - 1}: draft_k has shape .* and draft_v": {"draft_v": case.draft_v[:, 1:]},
    }.items():
        mine = change if comm.rank == comm.size - 1 else {}
        raised_by_all(comm, lambda mine=mine: verified(comm, **mine), words)


def test_what_cannot_be_verified(comm):
    case = Case.draw(2, comm.size)
    for words, change in {
        "the tree has": {"tree": TokenTree.chain([[1]])},
        "is needed": {"tree": case.tree.mask},
        "draft_k has shape": {"draft_k": case.draft_k[..., :4]},
        "owner 'nobody' is unknown": {"owner": "nobody"},
        f"ranks from 0 to {comm.size - 1}": {"owner": np.full(case.tree.tokens.shape, comm.size)},
        "must lie between 0 and": {"lengths": case.shard(comm.rank)[2] + 1000},
        "not supported": {"q": case.q.astype(int)},
        "kv_ring attends while it communicates": {"scheme": "kv_ring"},
    }.items():
        raised_by_all(comm, lambda change=change: verified(comm, **change), words)


def test_rank_0_decides_for_all(comm):
    """The others hold other numbers, or nothing that could be judged."""
    p = np.random.default_rng(comm.rank).dirichlet(np.ones(4), TREE.tokens.shape)
    q = np.random.default_rng(99).dirichlet(np.ones(4), TREE.tokens.shape)
    targets = p.argmax(-1) if comm.rank == 0 else None
    generator = np.random.default_rng(comm.rank) if comm.rank == 0 else None
    for accepted in (
        accept_greedy(TREE, targets, comm=comm),
        accept_speculative(TREE, p, q, generator, comm=comm),
    ):
        everyone = comm.allgather([array.tolist() for array in accepted])
        assert everyone == [everyone[0]] * comm.size
        for row, count in enumerate(accepted.counts):
            TREE.check_path(row, accepted.path[row, :count])


def test_whatever_fails_on_rank_0_no_rank_is_left_waiting(comm):
    """Errors of any type: of another shape, a generator that is none, targets that are no array."""
    p, targets = (
        np.full((*TREE.tokens.shape, 4), 0.25),
        np.zeros(TREE.tokens.shape if comm.rank else (2, 3), int),
    )
    for words, call in {
        r"integers \[2, 5\] are needed": lambda: accept_greedy(TREE, targets, comm=comm),
        "AttributeError": lambda: accept_speculative(TREE, p, p, None, comm=comm),
        "inhomogeneous": lambda: accept_greedy(TREE, [[1], [2, 3]], comm=comm),
    }.items():
        raised_by_all(comm, call, words)

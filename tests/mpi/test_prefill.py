"""The prefill over real ranks against the float64 reference: drawn shapes, layouts, rules and types."""

from dataclasses import replace

import numpy as np
import pytest
from mpi4py import MPI

import treeattn
from tests.support.problems import draw
from tests.support.ranks import raised_by_all
from treeattn import Rules
from treeattn.errors import ArgumentError, StateError
from treeattn.shards import parse_layout


@pytest.fixture
def drawn(comm):
    """Called with a seed: a case with a query for each token, this rank's tokens, and what goes with them."""

    def drawn(seed):
        case = draw(seed, comm.size)
        tokens = case.k.shape[1] % 131  # a query each
        own = case.held[comm.rank][0]
        own = own[own < tokens]
        k, v = case.k[:, :tokens], case.v[:, :tokens]
        q = np.repeat(k, case.q.shape[2] // k.shape[2], axis=2)[..., ::-1].copy()
        rest = {
            "q_positions": np.arange(tokens),
            "valid": [tokens] * len(k),
            "mask": np.zeros((len(k), tokens, 0), bool),
        }
        none = {
            "drafts": tuple(one[:, :0] for one in case.drafts),
            "draft_positions": np.zeros((len(k), 0), int),
        }
        case = replace(case, q=q, k=k, v=v, **rest, **none)
        given = {"positions": own, "rules": Rules(**case.rules), "begins": case.begins, "scale": case.scale}
        return case, own, given

    return drawn


def test_every_query_sees_what_the_rules_let_it_see(comm, drawn):
    for seed in range(20):
        case, own, given = drawn(seed)
        arrays = [array[:, own] for array in (case.q, case.k, case.v)]
        got = treeattn.prefill(*arrays, comm=comm, **given)
        out, lse, *bounds = case.expected()
        for one, wanted, bound in zip(got, (out[:, own], lse[..., own]), bounds, strict=True):
            np.testing.assert_allclose(one, wanted, rtol=0, atol=bound)


@pytest.mark.parametrize("layout", [None, "zigzag", "interleaved"])
def test_reproducible_queries_have_the_bits_of_one_rank(comm, drawn, layout):
    for seed in (2, 5, 7, 13):
        case, _, given = drawn(seed)
        arrays = [array.astype(np.float32) for array in (case.q, case.k, case.v)]
        runs = parse_layout(layout or "contiguous").runs(case.k.shape[1], comm.rank, comm.size)
        own = np.concatenate([np.arange(case.k.shape[1])[run] for run in runs])
        given |= {"reproducible": "tokens", "positions": layout}
        out, lse = treeattn.prefill(*(array[:, own] for array in arrays), comm=comm, **given)
        whole, whole_lse = treeattn.prefill(*arrays, comm=MPI.COMM_SELF, **given | {"positions": None})
        assert out.tobytes() == whole[:, own].tobytes()
        assert lse.tobytes() == whole_lse[..., own].tobytes()


def test_bits_of_bfloat16_are_taken_for_it(comm, drawn):
    case, own, given = drawn(3)
    arrays = [array[:, own].astype("bfloat16") for array in (case.q, case.k, case.v)]
    wanted = treeattn.prefill(*arrays, comm=comm, **given)
    found = treeattn.prefill(*(array.view(np.uint16) for array in arrays), comm=comm, **given)
    assert [one.tobytes() for one in found] == [one.tobytes() for one in wanted]


def test_what_cannot_be_is_told_by_all(comm):
    one = np.ones((1, 2, 2, 8), np.float32)
    odd = comm.rank == comm.size - 1
    cases = {
        "v is float64": {"v": one.astype(float) if odd else one},
        "k is float32 .1, 3, 2, 8.": {"k": np.ones((1, 3, 2, 8), np.float32)},
        "k has heads of 16": {"k": np.ones((1, 2, 2, 16), np.float32) if odd else one},
        "2 query heads cannot be grouped over 3": {"k": np.ones((1, 2, 3, 8), np.float32)},
    }
    plan = {"heads": 2, "kv_heads": 2, "head_dim": 8}
    for tokens in (2.0, -1):
        number = "tokens must be a whole number from 0 on"
        raised_by_all(comm, lambda n=tokens: treeattn.Prefill(comm, tokens=n, **plan), number, ArgumentError)
    if comm.size > 1:
        cases["both claim position 0"] = {"positions": [0, 1 + comm.rank]}
        cases["scale differs between ranks"] = {"scale": 0.1 + odd}
    for words, change in cases.items():
        given = {"q": one, "k": one, "v": one, "comm": comm, **change}
        raised_by_all(comm, lambda given=given: treeattn.prefill(**given), words, ArgumentError)


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("other", [(1, 5, 2, 8), (1, 5, 4, 8), (2, 0, 4, 8), (1, 3, 2, 16)])
def test_arrays_of_another_shape_than_planned_are_refused(tokens, other):
    right = [np.ones((1, tokens, heads, 8), np.float32) for heads in (4, 2, 2)]
    plan = {"heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": "float32"}
    with treeattn.Prefill(MPI.COMM_SELF, tokens=tokens, **plan) as planned:
        for wrong in range(3):
            given = [np.ones(other, np.float32) if at == wrong else one for at, one in enumerate(right)]
            with pytest.raises(ArgumentError, match="shape"):
                planned(*given)
        with pytest.raises(ArgumentError, match="k has shape .*, expected .*: this rank is planned with"):
            planned(right[0], *(np.ones((1, 5, 2, 8), np.float32) for _ in "kv"))
        assert planned(*right)[0].shape == (1, tokens, 4, 8)
    with pytest.raises(StateError, match="a prefill that is closed"):
        planned(*right)
    planned.close()

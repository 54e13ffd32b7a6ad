"""A decoder planned for n queries serves steps of fewer, with the bits of one planned for just as many."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.ranks import assert_same_bits
from treeattn import Decoder, Reduction, Rules, Shard
from treeattn.collectives.runtime import mpi_communicator
from treeattn.errors import ArgumentError, StateError

pytestmark = pytest.mark.mpi

SHAPE = {"heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": "float32", "batch": 2}
CASES = [
    ({"scheme": "reduce_scatter_gather"}, {}),
    ({"scheme": "hierarchical", "rules": Rules(causal=True, window=(9, None))}, {"causal": True}),
    ({"scheme": Reduction("ring", executor="mpi")}, {}),
    ({"scheme": Reduction("binary_tree", executor="program")}, {}),
    ({"scheme": "mpi_allreduce"}, {}),
    ({"scheme": "kv_ring"}, {}),
    ({"scheme": Reduction("head_scatter", output="heads")}, {}),
    ({"scheme": Reduction(groups=2)}, {}),
]


def step(comm, draw, queries):
    k, v = draw.standard_normal((2, 2, 12, 2, 16)).astype(np.float32)
    own = np.arange(12)[comm.rank :: comm.size]
    return draw.standard_normal((2, queries, 4, 16)).astype(np.float32), Shard(
        k[:, own], v[:, own], positions=own
    )


@pytest.mark.parametrize(("options", "seen"), CASES, ids=lambda case: str(case.get("scheme", ""))[:40])
def test_the_bits_are_those_of_a_decoder_of_as_many(comm, options, seen, monkeypatch):
    draw, made = np.random.default_rng(4), []
    dup = mpi_communicator.MpiCommunicator.dup
    with Decoder(comm, queries=5, **SHAPE, **options) as decoder:
        monkeypatch.setattr(mpi_communicator.MpiCommunicator, "dup", lambda self: made.append(1) or dup(self))
        for queries in (5, 2, 5, 1, 2, 3, 1):
            q, shard = step(comm, draw, queries)
            given = {"q_positions": np.arange(queries) + 6} if seen else {}
            if options["scheme"] == "kv_ring" or queries % 2:
                out, lse = decoder(q, shard, **given)
            else:
                decoder.begin(q, shard, **given)
                decoder.test()
                out, lse = decoder.finish()
            if decoder.heads == slice(0, 4):
                assert_same_bits(comm, out, lse)
            assert out.shape[1] == queries
            assert made == []  # one communicator serves all
            with monkeypatch.context() as patch:
                patch.setattr(mpi_communicator.MpiCommunicator, "dup", dup)
                with Decoder(comm, queries=queries, **SHAPE, **options) as exactly:
                    wanted = exactly(q, shard, **given)
                    np.testing.assert_array_equal(out, wanted[0])
                    np.testing.assert_array_equal(lse, wanted[1])
        monkeypatch.undo()


def test_what_is_out_of_order_or_too_many(comm):
    draw = np.random.default_rng(4)
    with Decoder(comm, queries=3, **SHAPE) as decoder:
        few, many = step(comm, draw, 2), step(comm, draw, 3)
        decoder.begin(*few)
        with pytest.raises(StateError, match="finish\\(\\) must end"):
            decoder.local(*many)
        with pytest.raises(StateError, match="finish\\(\\) must end"):
            decoder(*many)
        with pytest.raises(StateError, match="finish\\(\\) must end"):
            decoder.begin(*step(comm, draw, 1))
        decoder.finish()
        decoder(*many)
        with pytest.raises(StateError, match="local\\(\\) comes before"):
            decoder.reduce()
        with pytest.raises(ArgumentError, match="q has shape"):
            decoder(*step(comm, draw, 4))

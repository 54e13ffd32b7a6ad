"""The published vectors of attention over split keys: `decode`, and `merge` of what each rank finds."""

import numpy as np
import pytest
from mpi4py import MPI

import treeattn
from tests.data.split_kv_vectors import conformance


def of_this_rank(comm, case):
    """The arguments of `decode`."""
    shard = case.shards(comm.size)[comm.rank]
    window = None if case.window < 0 else (case.window, 0)
    rules = treeattn.Rules(causal=case.causal, window=window, sink_logits=case.sinks)
    held = treeattn.Shard(shard["k"], shard["v"], shard["lengths"], positions=shard["positions"])
    return {"q": case.q, "k": held, "scale": case.scale, "q_positions": case.q_positions, "rules": rules}


@pytest.mark.parametrize("case", conformance.cases(), ids=lambda case: case.name)
def test_decode_is_right(comm, case):
    case.check(*treeattn.decode(comm=comm, **of_this_rank(comm, case)))


@pytest.mark.parametrize("case", conformance.cases(), ids=lambda case: case.name)
def test_merge_is_right_where_one_rank_brings_the_sinks(comm, case):
    given = of_this_rank(comm, case)
    if case.sinks is not None and comm.rank:
        given["rules"] = treeattn.Rules(causal=case.causal, window=given["rules"].window)
    out, lse = treeattn.decode(comm=MPI.COMM_SELF, **given)
    out, lse = treeattn.merge(out, np.ascontiguousarray(lse.swapaxes(1, 2)), comm=comm)
    case.check(out, lse.swapaxes(1, 2))


def test_sinks_that_every_rank_brings_are_found(comm):
    case = next(case for case in conformance.cases() if case.name == "sinks")
    out, lse = treeattn.decode(comm=MPI.COMM_SELF, **of_this_rank(comm, case))
    out, lse = treeattn.merge(out, np.ascontiguousarray(lse.swapaxes(1, 2)), comm=comm)
    if comm.size > 1:
        with pytest.raises(AssertionError, match="sinks: out is"):
            case.check(out, lse.swapaxes(1, 2))

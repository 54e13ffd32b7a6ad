"""A scheme of the command line, whatever it is, and the output that it offers."""

import numpy as np

import treeattn
from tests.support.problems import assert_exact
from tests.support.ranks import assert_same_bits
from treeattn import collectives
from treeattn.baselines import BASELINES

#: Schedules that leave the whole result on every rank.
REPLICATED = [
    name for name in collectives.names("schedule") if collectives.build(name, 4).result == "replicated"
]
SHAPE = {"heads": 4, "kv_heads": 4, "head_dim": 64, "dtype": "float32"}


class Way:
    """A scheme over the ranks of a communicator, with the output that it offers."""

    def __init__(self, comm, scheme):
        self.comm, self.scheme, self.name = comm, scheme, scheme.partition(":")[0]
        row = BASELINES.get(self.name)
        self.scattered = row.scattered if row else self.name == "head_scatter"
        self.attends = bool(row and row.fused)  # while it communicates

    def how(self, **more):
        return treeattn.Reduction(self.scheme, output="heads" if self.scattered else "replicated", **more)

    def own_heads(self, count):
        """Those whose result is here."""
        rank, size = self.comm.rank, self.comm.size
        return slice(rank * count // size, (rank + 1) * count // size) if self.scattered else slice(None)

    def decode(self, q, k, v, **given):
        return treeattn.decode(q, k, v, comm=self.comm, scheme=self.how(), **given)

    def planned(self, **shape):
        return treeattn.Decoder(self.comm, **SHAPE | shape, scheme=self.how())

    def check(self, results, q, k, v, **rules):
        """Of whole arrays with as many KV heads as heads are grouped over: exact here, equal everywhere."""
        heads, group = self.own_heads(q.shape[2]), q.shape[2] // k.shape[2]
        wide = (np.repeat(one, group, axis=2)[:, :, heads] for one in (k, v))
        if results[0].size:
            assert_exact(results, q[:, :, heads], *wide, **{"scale": 1 / 8} | rules)
        if not self.scattered:
            assert_same_bits(self.comm, *results)


def copies(results):
    return [one.copy() for one in results]


def assert_equal(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)

"""The sharded cache of 1 to 4 ranks in this process, by rules: what it holds, and what schemes read of it."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.fuzz.settings import fuzzed
from tests.support.caches import LAYOUTS, Plain
from tests.support.schedules import catalogued
from treeattn import reference
from treeattn.backends.cpu import MergeOperator, blocked
from treeattn.collectives.executors import loopback
from treeattn.partial import finish


class Cache(RuleBasedStateMachine):
    @initialize(kind=LAYOUTS, size=st.integers(1, 4), batch=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
    def make(self, kind, size, batch, seed):
        self.plain = Plain(kind, size, batch, seed)

    @rule()
    def append(self):
        self.plain.append()

    @rule()
    def append_own(self):
        self.plain.append_own()

    @rule()
    def commit(self):
        self.plain.commit()

    @rule()
    def rollback(self):
        self.plain.rollback()

    @rule()
    def select(self):
        self.plain.select()

    @rule(data=st.data())
    def attend(self, data):
        """Every rank its shard, then the records over a schedule."""
        ranks = self.plain.ranks
        schedule = data.draw(catalogued(st.just(len(ranks))))
        width = 8 if self.plain.latent else self.plain.widths[1]
        for layer, caches in self.plain.each_layer():
            if caches[0].k.dtype != np.float32:
                continue
            batch = len(self.plain.totals)
            q = self.plain.draw.standard_normal((batch, 1, 4, 16)).astype(np.float32)
            parts = []
            for cache in caches:
                records = np.empty((batch, 4, 1, width + 2), np.float32)
                blocked.partial_attention(
                    q, cache.k, values_of(cache.k, cache.v), records, scale=0.25, lengths=cache.lengths
                )
                parts.append(records.reshape(-1, width + 2))
            merged = loopback.run(schedule, parts, MergeOperator(width))
            if schedule.result == "scattered":
                merged = [np.concatenate(merged)]
            out, lse = np.empty((batch, 1, 4, width), np.float32), np.empty((batch, 4, 1), np.float32)
            finish(merged[0].reshape(batch, 4, 1, -1), out, lse)
            for row, whole in enumerate(self.plain.whole[layer]):
                k, v = whole[0][None], values_of(*whole, *(None,) * self.plain.latent)[None]
                wanted, wanted_lse = reference.attention(q[row : row + 1], k, v, scale=0.25)
                np.testing.assert_allclose(out[row], wanted[0], rtol=0, atol=1e-5)
                np.testing.assert_allclose(lse[row], wanted_lse[0], rtol=0, atol=1e-5)

    @invariant()
    def holds_what_was_put_in(self):
        if hasattr(self, "plain"):
            self.plain.check()


def values_of(k, v):
    """Of a latent cache, the first channels of its keys."""
    return k[..., :8] if v is None else v


TestCache = Cache.TestCase
TestCache.settings = fuzzed(40, stateful_step_count=20)

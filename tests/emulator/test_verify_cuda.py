"""Token trees verified with device="cuda", one rank, on the emulator."""

from typing import Any

import numpy as np

from tests.support.token_trees import Case
from treeattn import ShardedCache
from treeattn.token_tree import TokenTree, Verifier, verify

from .runtime import EmulatorRuntime


def test_packed_is_each_beam_alone(runtime: EmulatorRuntime) -> None:
    for seed in range(6):
        case = Case.draw(seed, 1, ("float32",), (64,))
        k, v, lengths = case.shard(0)
        drafts = case.draft_k, case.draft_v, case.tree
        case.check(*verify(case.q, k, v, *drafts, lengths=lengths.tolist(), device="cuda"))


def test_nothing_is_allocated_from_step_to_step(runtime: EmulatorRuntime) -> None:
    """With another tree and other lengths every time, over a cache that lies on the device."""
    draw, nodes = np.random.default_rng(0), 7
    plan = {"batch": 2, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16", "device": "cuda"}
    cache = ShardedCache(capacity=60, drafts=nodes, **plan)

    def rows(count: int, heads: int) -> Any:
        wide = draw.standard_normal((2, count, heads, 64)).astype(np.float32)
        return (wide.view(np.uint32) >> 16).astype(np.uint16)  # the bits of bfloat16

    with Verifier(heads=4, nodes=nodes, **plan) as verifier:
        for step in range(4):
            parents = [[int(draw.integers(-1, node)) for node in range(nodes)] for _ in range(2)]
            tree = TokenTree.from_parents([list(range(nodes))] * 2, parents, [nodes, 3])
            q, draft_k, draft_v = rows(nodes, 4), rows(nodes, 2), rows(nodes, 2)
            allocated = runtime.allocations
            out, _ = verifier(
                *(q, cache.k, cache.v, draft_k, draft_v, tree, cache.lengths),
                shard_lengths=cache.shard_lengths,
            )  # fmt: skip
            assert step < 2 or runtime.allocations == allocated
            assert np.isfinite(out).all()
            cache.propose(draft_k, draft_v, tree)
            paths = [tree.path(row, int(tree.depths[row].argmax())) for row in range(2)]
            longest = max(map(len, paths))
            cache.commit([[*path, *[-1] * (longest - len(path))] for path in paths])
    assert (cache.totals > 0).all()

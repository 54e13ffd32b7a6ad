"""A tree of 16 drafts verified at once against 16 decode steps: python benchmarks/verify.py [--json FILE]

One rank and thread, float32, 65536 tokens, 8 KV heads, head_dim 128. Goals: at least 3 times cheaper with one
query head per KV head, 1.3 times with four. Limits, verification and steps are run in turn; the median of the
pairs' ratios is judged. Of everything else the best of the run counts: percent of the bound is that of the
slower of reading the cache once and of 2 * tokens * heads * nodes * head_dim multiply-adds.
"""

from __future__ import annotations

import math
from typing import Any

import harness
import numpy as np

import treeattn
from treeattn import communicators
from treeattn.backends.cpu import compile
from treeattn.study.roofline import cpu as roofline
from treeattn.token_tree import TokenTree, Verifier

TOKENS, KV_HEADS, HEAD_DIM = 65536, 8, 128
TREE = TokenTree.from_parents([range(16)], [[-1, 0, 0, 0, 1, 1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 9]])
GOALS = {1: 3.0, 4: 1.3}


def measure(group: int, repeats: int) -> dict[str, Any]:
    """One grouping: the best times in milliseconds, and the ratio pair by pair."""
    draw, nodes = np.random.default_rng(0), TREE.nodes
    q = draw.standard_normal((1, nodes, group * KV_HEADS, HEAD_DIM), np.float32)
    draft_k, draft_v = draw.standard_normal((2, 1, nodes, KV_HEADS, HEAD_DIM), np.float32)
    k, v = draw.standard_normal((2, 1, TOKENS, KV_HEADS, HEAD_DIM), np.float32)
    alone = [np.ascontiguousarray(q[:, node : node + 1]) for node in range(nodes)]
    plan = {"heads": group * KV_HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "dtype": "float32"}
    limits, reading, times = roofline.Limits(compile.library(compile.chosen_isa())), math.inf, []
    world = communicators.world()
    with Verifier(world, nodes=nodes, **plan) as verifier, treeattn.Decoder(world, **plan) as decoder:
        for _ in range(repeats + 1):
            reading = min(reading, limits.read_time(k, 1) + limits.read_time(v, 1))
            limits.run_arithmetic()
            together = harness.seconds(lambda: verifier(q, k, v, draft_k, draft_v, TREE))
            drafts = harness.seconds(lambda: verifier._drafts.attend(q, draft_k, draft_v, TREE, TREE.real))
            steps = harness.seconds(lambda: [decoder(one, k, v) for one in alone])
            times.append((together, steps, drafts))
    together, steps, drafts = (1e3 * min(column) for column in zip(*times[1:], strict=True))
    arithmetic = 2 * TOKENS * group * KV_HEADS * nodes * HEAD_DIM / limits.multiply_add_rate
    cheaper, *ratios = harness.quartiles(steps / together for together, steps, _ in times[1:])
    return {
        "group": group,
        "verify_ms": together,
        "steps_ms": steps,
        "draft_pass_ms": drafts,
        "times_cheaper": cheaper,
        "quartiles": ratios,
        "read_ms": 1e3 * reading,
        "multiply_add_ms": 1e3 * arithmetic,
        "percent_of_bound": 1e5 * max(reading, arithmetic) / together,
    }


def main() -> None:
    options = harness.options(__doc__, repeats=9)
    rows = []
    for group in GOALS:
        rows.append(measure(group, options.repeats))
        print("{group} query heads per KV head: {verify_ms:.1f} ms (drafts {draft_pass_ms:.2f}) against "
              "{steps_ms:.1f}, {times_cheaper:.1f} times cheaper, {percent_of_bound:.0f} % of the bound "
              "(read {read_ms:.1f} ms, multiply-add {multiply_add_ms:.1f})".format(**rows[-1]))  # fmt: skip
    about = {"isa": compile.chosen_isa(), "tokens": TOKENS, "nodes": TREE.nodes, "goals": GOALS}
    options.write(harness.source() | about | {"rows": rows})


if __name__ == "__main__":
    main()

"""How long packing takes: python benchmarks/token_tree.py

Goal: `pack` of 8 batch rows of 32 beams of 16 tokens in less than 2 ms on one core. Beams that share nothing
(the most nodes), those that share much (two words), and those that share everything.
"""

from __future__ import annotations

from collections.abc import Callable

import harness
import numpy as np

from treeattn.token_tree import TokenTree, pack

SHAPE = (8, 32, 16)
WORDS = {"nothing shared": 32000, "much shared": 2, "all shared": 1}


def milliseconds(call: Callable[[], object], repeats: int) -> dict[str, float]:
    """Median and quartiles of single calls."""
    times = [1e3 * harness.seconds(call) for _ in range(repeats)]
    return dict(zip(("median", "low", "high"), harness.quartiles(times), strict=True))


def main() -> None:
    options = harness.options(__doc__, repeats=400)
    draw, rows = np.random.default_rng(0), []
    for name, words in WORDS.items():
        beams = draw.integers(0, words, SHAPE)
        nodes = pack(beams).lengths.tolist()
        row = {
            "beams": name,
            "nodes": nodes,
            "pack_ms": milliseconds(lambda b=beams: pack(b), options.repeats),
        }
        row["tree_ms"] = milliseconds(lambda b=beams: TokenTree.from_beams(b), options.repeats)
        rows.append(row)
        print(f"{name:15} {max(nodes):4} nodes: pack {row['pack_ms']['median']:.2f} ms, "
              f"TokenTree.from_beams {row['tree_ms']['median']:.2f} ms")  # fmt: skip
    options.write(harness.source() | {"shape": SHAPE, "rows": rows})


if __name__ == "__main__":
    main()

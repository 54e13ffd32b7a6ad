"""A step of cache nodes against a Decoder over the same tokens, in turn in one job.

    mpiexec -n 2 python benchmarks/cache_nodes.py --json docs/results/cache_nodes.json

Rank 0 is the model process, the others are cache nodes. `alone`: a Decoder over the processes of the
cache nodes and their cache, its result on all of them: what attention costs there without a model process.
`step`: q and the new key and value from rank 0, the result on rank 0. Both take turns in blocks; a time is
the median or the fastest of a block, of rank 0 or of the slowest node. Then the messages of a reduction that
ends on rank 0 next to one that ends everywhere, on all processes, and their times on rank 0.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import harness
import numpy as np

import treeattn
from treeattn import cache_nodes
from treeattn.mpi import communicators
from treeattn.study import environment

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SHAPE: dict[str, Any] = {"kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "dtype": "float32"}


def main() -> None:
    asked = harness.options(__doc__, tokens=(1024, 4096, 16384), blocks=12, steps=40)
    world = communicators.world()
    everyone = [measure(world, tokens, asked) for tokens in asked.tokens]
    ends = reductions(world, asked)
    placed = environment.placement(world)
    if world.rank == 0:
        facts: dict[str, Any] = {"heads": HEADS, **SHAPE, "nodes": world.size - 1}
        facts |= {"steps": everyone, "reductions": ends, "ranks": placed}
        asked.write(facts | {"software": environment.software()})
        for row in everyone:
            for what in ("median", "fastest"):
                alone, step, ratio = (row[what][name] for name in ("alone_us", "step_us", "ratio"))
                print(f"{row['tokens']:>7,} tokens, {what}: {alone:.1f} us, {step:.1f} us, ratio {ratio:.3f}")
        for output, row in ends.items():
            times = f"{row['us']:.1f} us, at best {row['fastest_us']:.1f}"
            print(f"{output:>10}: {row['messages']} messages, {times}")


def measure(world: Any, tokens: int, asked: Any) -> dict[str, Any]:
    """Blocks in turn. Nodes leave `serve` before each block of their own."""
    nodes = world.Split(int(world.rank > 0), world.rank)
    draw = np.random.default_rng(world.rank)
    alone, steps = [], []
    for block in range(asked.blocks + 1):
        world.barrier()
        if world.rank:
            alone.append(decoder_alone(nodes, tokens, asked.steps, draw))
        times = world.gather(alone[-1] if world.rank else (0.0, 0.0))
        took = node_steps(world, tokens, asked.steps, draw)
        if world.rank == 0 and block:  # the first one warms up
            steps.append(took)
            alone.append(tuple(map(max, zip(*times, strict=True))))
    nodes.free()
    if world.rank:
        return {}
    return {"tokens": tokens} | {
        what: {
            "alone_us": 1e6 * statistics.median(one[at] for one in alone),
            "step_us": 1e6 * statistics.median(step[at] for step in steps),
            "ratio": statistics.median(step[at] / one[at] for step, one in zip(steps, alone, strict=True)),
        }
        for at, what in enumerate(("median", "fastest"))
    }


def drawn(draw: Any, tokens: int, heads: int) -> Any:
    return draw.standard_normal((1, tokens, heads, HEAD_DIM), np.float32)


def decoder_alone(nodes: Any, tokens: int, steps: int, draw: Any) -> tuple[float, float]:
    cache = treeattn.ShardedCache(nodes, capacity=tokens + steps + 1, **SHAPE)
    cache.append(drawn(draw, tokens, KV_HEADS), drawn(draw, tokens, KV_HEADS))
    q, k, v = drawn(draw, 1, HEADS), drawn(draw, 1, KV_HEADS), drawn(draw, 1, KV_HEADS)
    with treeattn.Decoder(nodes, heads=HEADS, **SHAPE) as decoder:

        def step() -> None:
            cache.append(k, v)
            end = int(cache.lengths[0])
            decoder(q, cache.k[:, :end], cache.v[:, :end])

        return median_and_fastest(step, steps)


def median_and_fastest(step: Callable[[], object], steps: int) -> tuple[float, float]:
    """Seconds, after a step that warms up."""
    took = harness.timed({"step": step}, steps, warm=1)["step"]
    return statistics.median(took), min(took)


def node_steps(world: Any, tokens: int, steps: int, draw: Any) -> tuple[float, float]:
    if world.rank:
        cache_nodes.serve(world)
        return 0.0, 0.0
    with cache_nodes.connect(world) as nodes:
        cache = nodes.cache(layers=1, **SHAPE, capacity=tokens + 600)
        while cache.totals[0, 0] < tokens:
            chunk = min(512, tokens - int(cache.totals[0, 0]))
            cache.append(0, drawn(draw, chunk, KV_HEADS), drawn(draw, chunk, KV_HEADS))
        q, k, v = drawn(draw, 1, HEADS), drawn(draw, 1, KV_HEADS), drawn(draw, 1, KV_HEADS)
        return median_and_fastest(lambda: cache.step(0, q, k, v), steps)


def reductions(world: Any, asked: Any) -> dict[str, Any]:
    """Of the partials of one query, without tokens: messages, and how long rank 0 takes."""
    how = {out: treeattn.Reduction("binary_tree", output=out) for out in ("replicated", "root")}
    decoders = {out: treeattn.Decoder(world, heads=HEADS, scheme=one, **SHAPE) for out, one in how.items()}
    q, none = np.ones((1, 1, HEADS, HEAD_DIM), np.float32), np.ones((1, 0, KV_HEADS, HEAD_DIM), np.float32)

    def step(decoder: treeattn.Decoder) -> float:
        world.barrier()
        return harness.seconds(lambda: decoder(q, none, none))

    steps = {out: functools.partial(step, decoder) for out, decoder in decoders.items()}
    times = harness.in_turn(steps, 10 * asked.steps)
    sent = {out: sum(map(len, world.allgather(decoder.sent))) for out, decoder in decoders.items()}
    for decoder in decoders.values():
        decoder.close()
    return {
        out: {
            "messages": sent[out],
            "us": 1e6 * statistics.median(times[out]),
            "fastest_us": 1e6 * min(times[out]),
        }
        for out in how
    }


if __name__ == "__main__":
    main()

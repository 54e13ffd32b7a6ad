"""What a planned Decoder adds to kernel and reduction at one rank: python benchmarks/decoder_overhead.py

Goal: 0.5 microseconds with the same arrays every step, 3 with new array objects, as slicing a growing cache
gives. A step of the decoder is timed against bare C calls (attention and finish through ctypes, everything
bound) and against its three parts (local, reduce, finish), interleaved; new arrays have to be made, too.
Causal steps hide nothing; tensors of torch are there where it is installed. At most 5 microseconds a layer is
the goal for `ShardedCache.append`, which this process alone makes in 30 layers.
"""

from __future__ import annotations

import harness
import numpy as np

import treeattn
from treeattn.backends import cpu
from treeattn.mpi import communicators


def tensors(decoder, q, k, v) -> dict:
    """Steps with the tensors of torch, where it is installed."""
    try:
        import torch
    except ImportError:
        return {}
    tq, tk, tv = map(torch.from_numpy, (q, k, v))
    return {
        "the same tensors of torch": lambda: decoder(tq, tk, tv),
        "new tensors of torch": lambda: decoder(tq[:], tk[:, :4], tv[:, :4]),
        "making new tensors alone": lambda: (tq[:], tk[:, :4], tv[:, :4]),
    }


def append(layers: int = 30, tokens: int = 2000) -> float:
    """Microseconds that a token takes a layer."""
    new = np.ones((1, 1, 8, 128), np.float32)
    cache = treeattn.ShardedCache(
        communicators.alone(), capacity=2 * tokens, kv_heads=8, head_dim=128, dtype="float32", layers=layers
    )

    def token() -> None:
        for layer in cache.layers:
            layer.append(new, new)

    harness.seconds(token, tokens // 2)  # until its memory is there
    for layer in cache.layers:
        layer.rollback([0])
    return harness.seconds(token, tokens // 2) / layers * 1e6


def main() -> None:
    options = harness.options(__doc__)
    draw = np.random.default_rng(0)
    q, k, v = (draw.random((1, n, 16, 128), np.float32) for n in (1, 8, 8))
    lengths = np.array([1])
    planned = {"heads": 16, "kv_heads": 16, "head_dim": 128, "dtype": "float32"}
    planned |= {"scheme": "recursive_doubling"}
    seen = {"rules": treeattn.Rules(causal=True), "cache": treeattn.CacheFormat(positions="interleaved")}
    with (
        treeattn.Decoder(communicators.world(), **planned) as decoder,
        treeattn.Decoder(communicators.world(), **planned, **seen) as causal,
    ):
        last = np.array([7])
        attention = cpu.PlannedAttention(decoder.records, scale=decoder.scale)
        attention(q, k, v, lengths)
        bare = attention._kernels.partial_attention
        finish = cpu.planned_finish(decoder.records, decoder.out, decoder.lse)

        def new():
            return q, k[:, :4], v[:, :4], np.array([1])

        def parts(*arrays):
            decoder.local(*arrays)
            decoder.reduce()
            return decoder.finish()

        steps = {
            "bare kernels": lambda: (bare(attention._pointer), finish()),
            "same arrays": lambda: decoder(q, k, v, lengths),
            "same arrays, in three parts": lambda: parts(q, k, v, lengths),
            "new arrays and lengths": lambda: decoder(*new()),
            "new arrays and lengths, in three parts": lambda: parts(*new()),
            "making new arrays alone": new,
            "causal, same arrays": lambda: causal(q, k, v, q_positions=last),
            "causal, same arrays and lengths": lambda: causal(q, k, v, lengths, q_positions=last),
            **tensors(decoder, q, k, v),
        }
        medians = harness.medians(harness.timed(steps, 50, each=2000, scale=1e6))
    for name, value in medians.items():
        print(f"{name:38s} {value:7.2f} us, {value - medians['bare kernels']:6.2f} more than bare kernels")
    appended = append()
    print(f"ShardedCache.append {appended:.2f} us a layer and token")
    options.write(harness.source() | {"median_us": medians, "append_us": appended})


if __name__ == "__main__":
    main()

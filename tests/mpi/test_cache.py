"""The sharded cache over real ranks: what a decoder reads of it, whatever was done to it."""

from __future__ import annotations

import numpy as np
import pytest

from treeattn import Decoder, ShardedCache, reference
from treeattn.errors import ArgumentError

HEADS, DIM = 2, 16


@pytest.mark.parametrize("layout", ["contiguous", "interleaved", "drawn"])
@pytest.mark.parametrize("latent", [False, True])
def test_a_decoder_reads_what_is_there(comm, layout, latent):
    """After drawn appends, selects and rollbacks, in two layers of one plan; the interleaved cache grows."""
    draw, batch, capacity, v_dim = np.random.default_rng(3), 3, 40, 8
    where = draw.integers(0, comm.size, capacity) if layout == "drawn" else layout
    plan = {"batch": batch, "kv_heads": 1 if latent else HEADS, "head_dim": DIM, "dtype": "float64"}
    cache = ShardedCache(
        comm, capacity=5 if layout == "interleaved" else capacity, layout=where, layers=2, v_dim=v_dim,
        latent=latent, **plan,
    )  # fmt: skip
    whole = [[np.zeros((0, plan["kv_heads"], DIM + v_dim)) for _ in range(batch)] for _ in cache.layers]
    with Decoder(comm, heads=HEADS, scale=0.3, cache=cache.format, **plan) as decoder:
        for _ in range(6):
            counts = draw.integers(0, 7, batch)
            rows, back = draw.integers(0, batch, batch), draw.integers(0, 4, batch)
            for layer, sequences in zip(cache.layers, whole, strict=True):
                new = draw.standard_normal((batch, int(counts.max()), plan["kv_heads"], DIM + v_dim))
                layer.append(new[..., :DIM].copy(), None if latent else new[..., DIM:].copy(), counts)
                layer.select(rows)
                layer.rollback(np.maximum(layer.totals - back, 0))
                longer = [np.concatenate([sequences[row], new[row, : counts[row]]]) for row in range(batch)]
                chosen = [longer[row] for row in rows]
                sequences[:] = [one[: max(0, len(one) - n)] for one, n in zip(chosen, back, strict=True)]
            q = draw.standard_normal((batch, 1, HEADS, DIM))
            for layer, sequences in zip(cache.layers, whole, strict=True):
                assert layer.totals.tolist() == list(map(len, sequences))
                for out, _ in (decoder(q, layer.shard), decoder(q, layer.k, layer.v, layer.lengths)):
                    for row, tokens in enumerate(sequences):
                        if not len(tokens):
                            assert not out[row].any()
                            continue
                        k, v = tokens[None, ..., :DIM], tokens[None, ..., DIM:]
                        v = k[..., :v_dim] if latent else v
                        wanted, _ = reference.attention(q[row : row + 1], k, v, scale=0.3)
                        np.testing.assert_allclose(out[row : row + 1], wanted, rtol=0, atol=1e-12)


def test_what_ranks_disagree_about(comm):
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    odd = comm.rank == comm.size - 1
    plan = {"capacity": 8, "kv_heads": 1, "head_dim": 8}
    for name, other in (("layers", 2), ("latent", True), ("v_dim", 16), ("dtype", "float32")):
        with pytest.raises(ArgumentError, match=f"{name}.* differs between ranks"):
            ShardedCache(comm, **plan | ({name: other} if odd else {}))

"""Latent attention through the verbs with device="cuda", in pages and of 8 bits, on the emulator."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import treeattn
from tests.support.drawn import sample
from treeattn import reference
from treeattn.backends import cuda
from treeattn.backends.cuda import variants
from treeattn.errors import ArgumentError, BackendError

from .raw_module import compiler_problem
from .runtime import EmulatorRuntime

Array = np.ndarray[Any, Any]
needs_emulator = pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem()))
SCALE = 192**-0.5  # of the heads before they were made latent
LATENT = {"cache": treeattn.CacheFormat(v_dim=512), "scale": SCALE}


def made_up(dtype: Any, tokens: int, heads: int = 16, batch: int = 1) -> tuple[Array, Array]:
    draw = np.random.default_rng(tokens)
    q = draw.standard_normal((batch, 1, heads, 576)).astype(dtype)
    return q, draw.standard_normal((batch, tokens, 1, 576)).astype(dtype)


def assert_exact(q: Array, k: Array, out: Array, lse: Array, **rules: Any) -> None:
    part = reference.partial(q, k, k[..., :512], scale=SCALE, **rules)
    wanted, wanted_lse = reference.combine([part])
    bound, lse_bound = reference.error_bounds([part])
    bound = max(bound, 4e-3 * part.largest_value)  # weights are rounded to 16 bits
    np.testing.assert_allclose(out, wanted, rtol=0, atol=bound)
    np.testing.assert_allclose(lse, wanted_lse, rtol=0, atol=lse_bound)


@needs_emulator
@pytest.mark.parametrize(
    ("dtype", "heads"),
    sample(2, itertools.product([np.float16, ml_dtypes.bfloat16], [3, 16, 128])),
)
def test_decode_is_exact(runtime: EmulatorRuntime, dtype: Any, heads: int) -> None:
    q, k = made_up(dtype, 90, heads)
    shard = treeattn.Shard(k, v_dim=512)
    out, lse = treeattn.decode(q, shard, device="cuda", scale=SCALE)
    assert out.shape == (1, 1, heads, 512)
    assert_exact(q, k, out, lse)
    window = {"rules": treeattn.Rules(window=(30, 0), softcap=9.0), "q_positions": [70]}
    out, lse = treeattn.decode(q, shard, device="cuda", scale=SCALE, **window)
    seen = ((np.arange(90) >= 40) & (np.arange(90) <= 70))[None, None]
    assert_exact(q, k, out, lse, seen=seen, softcap=9.0)


@needs_emulator
def test_a_decoder_follows_a_growing_cache(runtime: EmulatorRuntime) -> None:
    """As a longer view and by lengths, and in a captured step, without allocating."""
    q, k = made_up(ml_dtypes.bfloat16, 90, batch=2)
    planned = {"heads": 16, "kv_heads": 1, "head_dim": 576, "batch": 2, "device": "cuda", **LATENT}
    lengths = np.array([90, 90])
    with treeattn.Decoder(**planned) as decoder:
        decoder(q, k)
        step = decoder.capture(q, k, None, lengths)
        allocations = runtime.allocations
        for length in (1, 33, 90):
            assert_exact(q, k[:, :length], *decoder(q, k[:, :length]))
            lengths[:] = length, length - 1
            wanted = {"lengths": lengths.tolist()}
            assert_exact(q, k, *decoder(q, k, None, lengths.tolist()), **wanted)
            assert_exact(q, k, *step(), **wanted)
        assert runtime.allocations <= allocations + 1  # room for lengths of the host


def test_stages_are_as_many_as_fit() -> None:
    """By the shared memory of a block on sm_75, 86, 80 and 90."""
    kernels = [variants.mma_kernel("float16", "float16", 576, 16, kib << 10) for kib in (64, 99, 163, 227)]
    assert kernels[0] is None
    assert [kernel.expression[-2] for kernel in kernels[1:] if kernel] == ["2", "3", "2"]


def test_many_heads_are_one_tile_where_shared_memory_holds_it() -> None:
    """Of 64 rows by eight warps, on sm_80 and 90; on sm_86 of 32."""
    kernels = [variants.mma_kernel("float16", "float16", 576, 128, kib << 10) for kib in (64, 99, 163, 227)]
    assert [(kernel.rows, kernel.threads) for kernel in kernels[1:] if kernel] == [(32, 128)] + [
        (64, 256)
    ] * 2


@needs_emulator
@pytest.mark.parametrize(("splits", "launches"), [(1, 1), (5, 2)])
def test_splits_are_merged_by_many_blocks(splits: int, launches: int) -> None:
    """One for each row and 64 channels, in a launch of its own."""
    q, k = made_up(np.float16, 200)
    runtime, records = EmulatorRuntime(), np.zeros((1, 16, 1, 514), np.float32)
    planned = cuda.PlannedAttention(records, scale=SCALE, num_splits=splits, runtime=runtime)
    planned(q, k, k[..., :512])
    assert (planned.load.merging, runtime.launches) == (16 * 8, launches)


def test_what_cannot_be(runtime: EmulatorRuntime) -> None:
    q, k = made_up(np.float16, 9)
    with pytest.raises(ArgumentError, match="the first ones of the keys: pass v=None and v_dim=512"):
        treeattn.decode(q, k, k[..., :512].copy(), device="cuda", scale=SCALE)
    with pytest.raises(BackendError, match="keys of 192 and values of 128 channels.*576 and 512"):
        treeattn.decode(q[..., :192], k[..., :192], k[..., :128], device="cuda")
    for query, keys in ((q.astype(np.float32), k.astype(np.float32)), (q, k.astype(np.float32))):
        with pytest.raises(
            BackendError, match=r"latent attention with q of float\d\d and a cache of float32: it"
        ):
            treeattn.decode(query, treeattn.Shard(keys, v_dim=512), device="cuda", scale=SCALE)
    with pytest.raises(BackendError, match="keys of 576 and values of 64"):
        treeattn.Decoder(
            heads=16, kv_heads=1, head_dim=576, cache=treeattn.CacheFormat(v_dim=64), scale=1.0, device="cuda"
        )

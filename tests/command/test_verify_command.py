"""``treeattn verify`` as a user runs it."""

import numpy as np
import pytest

from tests.support.drawn import sample
from treeattn import files, reference

from .launch import treeattn

NODES = 8
PARENTS = np.array([[-1, 0, 1, 2, 1, 4, 1, 6], [-1, 0, 1, -1, -1, -1, -1, -1]])
DRAFT_LENGTHS = np.array([8, 3])


def tensors(**changes):
    draw = np.random.default_rng(0)

    def rows(count, heads):
        return draw.standard_normal((2, count, heads, 16), np.float32)

    given = {
        "q": rows(NODES, 4),
        "k": rows(50, 2),
        "v": rows(50, 2),
        "draft_k": rows(NODES, 2),
        "draft_v": rows(NODES, 2),
        "parents": PARENTS,
        "draft_lengths": DRAFT_LENGTHS,
        "lengths": np.array([50, 7]),
    }
    return {name: array for name, array in (given | changes).items() if array is not None}


def written(path, **changes):
    path.write_bytes(files.save_tensors(tensors(**changes), {"scale": "0.3"}))
    return path


def dense(given):
    """(out, lse): each node over its context and its ancestors, found by climbing."""
    seen = np.zeros((2, NODES, 50 + NODES), bool)
    for row, count in enumerate(given["draft_lengths"]):
        seen[row, :count, : given["lengths"][row]] = True
        for node in range(count):
            at = node
            while at >= 0:
                seen[row, node, 50 + at], at = True, given["parents"][row, at]
    k, v = (np.concatenate([given[name], given[f"draft_{name}"]], 1) for name in "kv")
    return reference.attention(given["q"], k, v, scale=0.3, seen=seen)


@pytest.mark.parametrize(("ranks", "options"), sample(2, [
    (1, []), (3, ["--layout", "zigzag", "--owner", "round_robin"]), (4, ["--layout", "sizes=0,50,0,0"]),
    (2, ["--owner", "position", "--layout", "interleaved"]),
]))  # fmt: skip
def test_a_tree_of_a_file(tmp_path, ranks, options):
    source = written(tmp_path / "tree.safetensors")
    result, words = tmp_path / "out.safetensors", ("--json", tmp_path / "facts.json", "--repeat", 2)
    done = treeattn("verify", source, *options, "--out", result, *words, ranks=ranks)
    assert done.stderr == ""
    assert "tree.safetensors: 50 tokens and 8+3 drafts (" in done.said
    read = files.open_cache(result)
    wanted, wanted_lse = dense(tensors())
    np.testing.assert_allclose(read["out"], wanted, atol=2e-5)
    np.testing.assert_allclose(read["lse"], wanted_lse, atol=2e-5)
    (row,) = done.facts["results"]
    assert row["passed"] and row["same_bits"] and 0 < row["errors"]["oracle"][0] < row["bounds"][0]  # noqa: PT018


def test_several_schemes_side_by_side(tmp_path):
    source = written(tmp_path / "tree.safetensors")
    done = treeattn("verify", source, "--scheme", "binary_tree,recursive_doubling", ranks=2)
    assert done.stderr == ""
    assert "drafts (single)" in done.stdout
    assert done.stdout.count("pass") == 2


def test_reproducible_results_have_one_hash_on_any_ranks(tmp_path):
    source, said = written(tmp_path / "drafts.safetensors"), set()
    for ranks, words in ((None, ()), (3, ("--scheme", "chain,hierarchical", "--layout", "interleaved"))):
        done = treeattn("verify", source, "--reproducible", "--repeat", 1, *words, ranks=ranks)
        said |= {line for line in done.stdout.splitlines() if line.startswith("SHA-256")}
    assert len(said) == 1

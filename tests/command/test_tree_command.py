"""``treeattn tree`` as a user runs it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from treeattn import files
from treeattn.token_tree import TokenTree

from .launch import in_process

BEAMS = np.array([[[5, 6, 7], [5, 8, 7]], [[9, 9, 9], [9, 9, 9]]])


@pytest.fixture(params=["npz", "safetensors"])
def write(request, tmp_path):
    def written(**arrays):
        path = tmp_path / f"tree.{request.param}"
        if request.param == "npz":
            np.savez(path, **arrays)
        else:
            path.write_bytes(files.save_tensors(arrays, {}))
        return path

    return written


def test_beams_of_a_file(write, tmp_path):
    done = in_process("tree", write(beams=BEAMS), "--json", tmp_path / "tree.json")
    assert done.stderr == ""
    assert done.stdout == (
        "row 0\nslot  sees   tree\n   0  #....  5\n   1  +#...  ├─ 6\n   2  ++#..  │  └─ 7\n"
        "   3  +..#.  └─ 8\n   4  +..+#     └─ 7\n\n"
        "row 1\nslot  sees  tree\n   0  #..   9\n   1  +#.   └─ 9\n   2  ++#      └─ 9\n\n"
        "12 tokens given, 8 nodes kept\n"
    )
    facts, tree = json.loads((tmp_path / "tree.json").read_text()), TokenTree.from_beams(BEAMS)
    assert (facts["batch"], facts["nodes"]) == (2, 5)
    for name in ("tokens", "parents", "lengths", "depths", "origin", "unpack_map"):
        assert facts[name] == getattr(tree, name).tolist()
    assert facts["mask_words"] == tree.mask_words().tolist()


def test_parents_of_a_file_as_a_picture(write, tmp_path):
    source = write(tokens=np.array([[1, 2, 3]]), parents=np.array([[-1, 2, 0]]), lengths=np.array([3]))
    done = in_process("tree", source, "--format", "svg", "--out", tmp_path / "tree.svg")
    assert done.stderr == ""
    assert done.stdout == f"the drawing is in {tmp_path / 'tree.svg'}\n3 tokens given, 3 nodes kept\n"
    drawn = (tmp_path / "tree.svg").read_text()
    ElementTree.fromstring(drawn)
    assert drawn == TokenTree.chain([[1, 3, 2]]).svg()


def test_words_of_unequal_beams(tmp_path):
    (tmp_path / "beams.txt").write_text("a b c\na d\n\nx\n")
    done = in_process("tree", tmp_path / "beams.txt", "--row", 0)
    assert done.stdout.splitlines()[2:6] == ["   0  #...  a", "   1  +#..  ├─ b", "   2  ++#.  │  └─ c",
                                             "   3  +..#  └─ d"]  # fmt: skip


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"beams": BEAMS.astype(float)}, "beams are float64: token ids are integers"),
        ({"beams": BEAMS[0]}, "expected [batch, beams, tokens]"),
        ({"tokens": BEAMS[0]}, "needs beams, or tokens and parents; it holds tokens"),
        ({"tokens": np.array([[1, 2]]), "parents": np.array([[1, 0]])}, "nodes [0, 1] form a cycle"),
    ],
)
def test_bad_trees(write, arrays, words, tmp_path):
    done = in_process("tree", write(**arrays), "--json", tmp_path / "tree.json", code=2)
    assert words in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "tree.json").exists()


def test_bad_files(tmp_path):
    (tmp_path / "damaged.npz").write_bytes(b"PK\x03\x04 no more")
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "good.txt").write_text("a b\n")
    for words, reason in (
        ([tmp_path / "damaged.npz"], "not a readable .npz file"),
        ([tmp_path / "missing.safetensors"], "no such file"),
        ([tmp_path / "missing.txt"], "cannot be read (No such file"),
        ([tmp_path / "empty.txt"], "no beams"),
        ([tmp_path / "binary.txt"], "cannot be read (not a text)"),
        ([tmp_path / "good.txt", "--row", "1"], "rows 0 to 0"),
        ([tmp_path / "good.txt", "--out", tmp_path / "good.txt"], "named twice"),
    ):
        done = in_process("tree", *words, code=2)
        assert reason in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr

"""``treeattn check-partials`` as a user runs it."""

import json

import numpy as np
import pytest

from treeattn import files

from .launch import in_process


@pytest.fixture(params=["npz", "safetensors"])
def written(request, tmp_path):
    """Dumps of three ranks, the whole that a merge in base e makes of them, and one that base 2 makes."""
    draw = np.random.default_rng(0)
    out, lse = draw.standard_normal((3, 4, 8)).astype(np.float32), draw.standard_normal((3, 4)) * 4

    def write(name, **arrays):
        path = tmp_path / f"{name}.{request.param}"
        if request.param == "npz":
            np.savez(path, **arrays)
        else:
            path.write_bytes(files.save_tensors(arrays, {}))
        return path

    paths = [write(f"rank{rank}", out=out[rank], lse=lse[rank].astype(np.float32)) for rank in range(3)]
    for base in ("e", "2"):
        weight = np.exp(lse * {"e": 1.0, "2": np.log(2)}[base])[..., None]
        write(f"base_{base}", out=((weight * out).sum(0) / weight.sum(0)).astype(np.float32))
    return tmp_path, request.param, paths


def test_verdicts(written):
    folder, kind, paths = written
    words = ("check-partials", *paths, "--json", folder / "f.json", "--whole")
    done = in_process(*words, folder / f"base_e.{kind}")
    assert (done.stdout, done.stderr) == ("no fault in 3 parts and the whole\n", "")
    assert json.loads((folder / "f.json").read_text())["findings"] == []
    done = in_process(*words, folder / f"base_2.{kind}", code=1)
    assert "fault: wrong base: reading lse of every rank in base 2 makes the out of the whole" in done.stdout
    (finding,) = json.loads((folder / "f.json").read_text())["findings"]
    assert (finding["kind"], finding["ranks"]) == ("wrong base", [0, 1, 2])
    in_process(*words, folder / f"base_2.{kind}", "--base", "2")


def test_without_a_whole_it_says_what_one_would_tell(written):
    _, _, paths = written
    done = in_process("check-partials", paths[0], paths[1], paths[1], code=1)
    assert "fault: counted twice: ranks 1 and 2 hold the same part" in done.stdout
    done = in_process("check-partials", *paths)
    assert done.stdout == "no fault in 3 parts: with --whole FILE a wrong merge is found, too\n"


@pytest.mark.parametrize("content", [None, b"", b"not an archive", np.zeros(1), np.array([None])])
def test_bad_input(tmp_path, content):
    path = tmp_path / "bad.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        with path.open("wb") as file:
            np.savez(file, out=content, lse=np.zeros(1)) if content.dtype == object else np.save(
                file, content
            )
    said = in_process("check-partials", path, code=2).stderr
    assert "not a readable .npz file" in said
    assert content is not None or "No such file" in said

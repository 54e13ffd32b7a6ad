"""``treeattn cache``: what is saved, shown, checked and dealt out anew."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from tests.support.caches import caches
from tests.support.thread_ranks import on_all_ranks
from treeattn.cache import saved
from treeattn.cache.index import read_index
from treeattn.cli.cache import command
from treeattn.errors import ArgumentError


@pytest.fixture
def directory(tmp_path):
    """11 and 9 tokens of 2 layers, saved by 3 ranks."""
    ranks, new = caches(3, batch=2, capacity=64, layers=2), np.ones((2, 11, 2, 8), np.float32)
    for layer in (layer for cache in ranks for layer in cache.layers):
        layer.append(new, new, [11, 9])
    path = tmp_path / "saved"
    told = on_all_ranks(3, lambda comm: saved.save(comm, ranks[comm.rank].layers, path, {"text": "Mars"}))
    assert told == [None] * 3
    return path


def said(*words):
    done = CliRunner().invoke(command, list(map(str, words)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_a_screen_obeys_no_file(directory):
    index = read_index(directory)
    strange = msgspec.structs.replace(index, about={"text": "Mars\x1b[2J\x07"})
    (directory / "index.json").write_bytes(strange.encode())
    assert r"text: Mars\x1b[2J\x07" in said("info", directory)


def test_what_is_shown(directory):
    shown = said("info", directory, "--check")
    assert "2 layers, 2 KV heads x 8, values of 8, float32" in shown
    assert "11, 9 tokens, layout interleaved, room for 64" in shown
    assert "text: Mars" in shown
    for part in read_index(directory).parts:
        assert part.file in shown


def test_dealt_out_anew_for_other_ranks(directory, tmp_path):
    out = tmp_path / "anew"
    assert "layout zigzag, room for 32" in said(
        "reshard", directory, out, "--ranks", 5, "--layout", "zigzag", "--capacity", 32
    )
    assert len(read_index(out).parts) == 5
    said("info", out, "--check")
    said("reshard", out, tmp_path / "back", "--ranks", 3, "--capacity", 64)
    back, before = read_index(tmp_path / "back"), read_index(directory)
    assert (back.parts, back.sha256) == (before.parts, before.sha256)


def test_damage_is_named(directory):
    path = directory / read_index(directory).parts[2].file
    content = bytearray(path.read_bytes())
    content[-700] ^= 4
    path.write_bytes(content)
    said("info", directory)  # the file is there and as long as it was
    with pytest.raises(ArgumentError, match=f"{path}: damaged: k of layer 1 at position 5"):
        said("info", directory, "--check")
    path.unlink()
    with pytest.raises(ArgumentError, match=f"{path}: no such file"):
        said("info", directory)

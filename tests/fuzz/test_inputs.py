"""Damaged files of every kind: a good result or one line, in bounded time and memory."""

import io
import struct
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.inputs import INPUTS
from tests.fuzz.limits import limited_memory, limited_time
from tests.fuzz.mutations import mutant
from tests.fuzz.settings import fuzzed
from treeattn.errors import TreeattnError
from treeattn.files import save_tensors


def assert_read_or_refused(read, path: Path) -> None:
    with limited_time(), warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            read(path)
        except TreeattnError as error:
            said = str(error)
        except SystemExit as error:  # of a tool
            said = str(error.code)
        else:
            return
    assert said.strip()
    assert len(said.splitlines()) == 1, said
    assert len(said) < 2000, said


def _header(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _zip(**members: str) -> bytes:
    """An archive of texts."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return content.getvalue()


def _gguf(length: int, kind: int) -> bytes:
    """A file of one field, which says that it is an array of so many elements; none follow."""
    version, tensors, fields, name, array = 3, 0, 1, b"x", 9
    head = (version, tensors, fields, len(name), name, array, kind, length)
    return b"GGUF" + struct.pack("<IQQQ1sIIQ", *head)


LONG = "9" * 5000
#: What was found, in short: each was a traceback, or more than a line.
FOUND = [
    ("schedule", '{"name": "x", "collective": "allreduce", "inplace": true, "gpus": [{"id": "x"}]}'),
    ("cluster", "x = " + "[" * 3000),
    ("scheme", "k_nomial_tree:radix=a\nb"),
    ("scheme", f"k_nomial_tree:radix={LONG}"),
    ("launcher", f'{{"PMI_RANK": "0", "PMI_SIZE": "{LONG}"}}'),
    ("weights", '{"weight_map": {"lm_head.weight": "a\\nb"}}'),
    ("weights", f'{{"weight_map": {{"lm_head.weight": "{LONG}"}}}}'),
    ("weights", "[" * 100_000),
    ("model", "[" * 100_000),
    ("safetensors", save_tensors({"k": np.zeros(3)}, {"scale": LONG})),
    ("safetensors", _header('{"__metadata__": null}')),
    ("safetensors", _header('{"k": {"dtype": "U8", "shape": [%s0], "data_offsets": [0, 0]}}' % ("1, " * 99))),
    ("cluster", f"{'x' * 5000} = 1"),
    ("saved_cache", f'{{"{LONG}": 1}}'),
    ("npz", _zip(beams="no array")),
    ("line", f"schedule chain --ranks 2 {LONG}"),
    ("gguf", _gguf(2**60, kind=4)),
    ("gguf", _gguf(2**19, kind=0) + bytes(2**19)),
    ("gguf", _gguf(2**60, kind=8) + bytes(2**21)),
    ("gguf", _gguf(2**17, kind=9) + bytes(2**21)),
]


def _needed(name):
    if name == "gguf":
        pytest.importorskip("gguf", reason="no gguf: pip install 'treeattn[models]'")


@pytest.mark.parametrize(("name", "content"), FOUND, ids=[name for name, _ in FOUND])
def test_what_was_found(name, content, tmp_path):
    _needed(name)
    INPUTS[name].seeds(tmp_path)
    path = tmp_path / INPUTS[name].name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert_read_or_refused(INPUTS[name].read, path)


@pytest.mark.parametrize("name", INPUTS)
def test_a_damaged_file_is_read_or_refused_in_one_line(name, tmp_path):
    _needed(name)
    kind = INPUTS[name]
    seeds = kind.seeds(tmp_path)
    path = tmp_path / kind.name

    @fuzzed(200)
    @given(st.integers(0, 2**48))
    def check(seed):
        path.write_bytes(mutant(seeds, kind.damage, seed))
        assert_read_or_refused(kind.read, path)

    for seed in seeds:
        path.write_bytes(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kind.read(path)
    with limited_memory():
        check()

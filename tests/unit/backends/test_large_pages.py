"""Arrays that are put one behind the other are what they were, and lie as lines of memory do."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from treeattn.backends.cpu import device
from treeattn.backends.cpu.device import LargePages


def test_copies_are_their_arrays_and_no_bytes_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one takes more than a piece, or nothing."""
    monkeypatch.setattr(device, "_PIECE", 4096)
    rng, pages = np.random.default_rng(0), LargePages()
    shapes = [(0, 7), (3, 5), (1, 1), (100, 30), (7, 0), *map(tuple, rng.integers(1, 40, (30, 2)))]
    dtypes = [np.float32, np.int8, ml_dtypes.bfloat16]
    given = [rng.integers(-9, 9, shape[::-1]).astype(dtypes[at % 3]).T for at, shape in enumerate(shapes)]
    copies = [pages.put(one) for one in given]
    for one, copy in zip(given, copies, strict=True):
        assert copy.dtype == one.dtype
        assert np.array_equal(copy, one)
        assert copy.flags.c_contiguous
        assert copy.ctypes.data % 64 == 0 or not copy.size
    spans = sorted((copy.ctypes.data, copy.ctypes.data + copy.nbytes) for copy in copies if copy.size)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))

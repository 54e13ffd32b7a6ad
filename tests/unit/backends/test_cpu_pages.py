"""Caches in pages on the processor: the bits of a cache in a row, whatever lies in the other places."""

import numpy as np
import pytest

from tests.support import verbs
from tests.support.pages import in_pages
from tests.support.problems import random_qkv
from treeattn.backends import cpu
from treeattn.errors import ArgumentError


def attend(q, k, v, lengths=None, table=None, **plan):
    given = {"scale": 0.2, "lengths": lengths, "block_table": table, **plan}
    return verbs.records_of(cpu, q, k, v, **given).tobytes()


def test_threads_change_no_bit(build):
    if build == "numpy":
        pytest.skip("NumPy has no threads here")
    for queries in (1, 40):
        q, k, v = random_qkv(3000, queries=queries, kv_heads=4)
        (pages, table), (values, _) = in_pages(k, 64), in_pages(v, 64)
        given = q, pages, values, np.array([3000]), table
        assert attend(*given, threads=3) == attend(*given, threads=1)


@pytest.mark.usefixtures("build")
def test_pages_of_any_strides():
    """Keys and values in one array, heads before slots: as engines hold them."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 1, 4, 64)).astype(np.float32)
    both = rng.standard_normal((9, 2, 2, 16, 64)).astype(np.float32)  # page, k or v, head, slot
    k, v = both[:, 0].swapaxes(1, 2), both[:, 1].swapaxes(1, 2)
    table, lengths = np.array([[3, 0, 8], [5, 1, 2]]), np.array([40, 48])
    row = [one[table].reshape(2, 48, 2, 64) for one in (k, v)]
    assert attend(q, k, v, lengths, table) == attend(q, *row, lengths)


@pytest.mark.usefixtures("build")
def test_a_table_that_cannot_be_is_refused():
    """As tests/unit/attention/test_pages.py has it."""
    q, k = np.zeros((1, 1, 2, 64), np.float32), np.zeros((5, 16, 2, 64), np.float32)
    with pytest.raises(ArgumentError, match="twice"):
        attend(q, k, k, np.array([20]), np.array([[1, 1]]))

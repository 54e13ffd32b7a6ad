"""Every layout gives every token to exactly one rank."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.drawn import examples
from treeattn import ArgumentError
from treeattn.attention.positions import as_runs, check_owners
from treeattn.shards import parse_layout

LAYOUTS = ("contiguous", "interleaved", "zigzag")


def owned(layout, tokens, rank, size):
    return np.concatenate([np.arange(tokens)[run] for run in layout.runs(tokens, rank, size)])


@examples(100)
@given(st.sampled_from(LAYOUTS), st.integers(0, 200), st.integers(1, 17))
def test_tokens_are_partitioned(name, tokens, size):
    layout = parse_layout(name)
    shards = [owned(layout, tokens, rank, size) for rank in range(size)]
    assert sorted(np.concatenate(shards)) == list(range(tokens))
    assert all((np.diff(shard) > 0).all() for shard in shards)
    everyone = [as_runs(layout.runs(tokens, rank, size)) for rank in range(size)]
    assert max(len(runs.table) for runs in everyone) <= 2
    check_owners(everyone)


@examples(100)
@given(st.sampled_from(LAYOUTS), st.integers(0, 60), st.integers(1, 9), st.data())
def test_lengths_count_the_valid_tokens_of_the_shard(name, tokens, size, data):
    layout = parse_layout(name)
    lengths = np.array(data.draw(st.lists(st.integers(0, tokens), min_size=1, max_size=3)))
    for rank in range(size):
        own = owned(layout, tokens, rank, size)
        wanted = [(own < length).sum() for length in lengths]
        assert layout.shard_lengths(lengths, tokens, rank, size).tolist() == wanted


def test_what_the_layouts_mean():
    shard = lambda name, rank: owned(parse_layout(name), 10, rank, 3).tolist()  # noqa: E731
    assert [shard("contiguous", r) for r in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
    assert [shard("interleaved", r) for r in range(3)] == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert [shard("zigzag", r) for r in range(3)] == [[0, 8, 9], [1, 2, 6, 7], [3, 4, 5]]
    assert [shard("sizes=0,9,1", r) for r in range(3)] == [[], list(range(9)), [9]]


@pytest.mark.parametrize("text", ["spiral", "sizes", "sizes=", "sizes=1,a", "sizes=3,-1", "contiguous=3", ""])
def test_unreadable_layouts(text):
    with pytest.raises(ArgumentError, match="layout"):
        parse_layout(text)


@pytest.mark.parametrize("text", ["sizes=1,2", "sizes=1,2,3,4", "sizes=9,1,1"])
def test_sizes_that_do_not_fit(text):
    with pytest.raises(ArgumentError, match="one size per rank|add up"):
        parse_layout(text).runs(10, 0, 3)

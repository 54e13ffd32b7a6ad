"""Schedules of one's own that are a scheme of the catalogue."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.support.drawn import examples
from treeattn.collectives import Schedule, Transfer, build, names
from treeattn.collectives.equal import equal_to
from treeattn.errors import RestrictionError


@examples(12)
@given(st.sampled_from(names("schedule")), st.integers(2, 7), st.randoms())
def test_a_scheme_under_another_name_is_found(name, size, drawn):
    """However its rounds are written down: in another order, in finer chunks, with an empty round."""
    try:
        ours = build(name, size)
    except RestrictionError:
        return
    finer = [
        [t._replace(chunks=range(2 * t.chunks.start, 2 * t.chunks.stop)) for t in round_]
        for round_ in ours.rounds
    ]
    for round_ in finer:
        drawn.shuffle(round_)
    mine = Schedule("mine", size, 2 * ours.chunks, ((), *map(tuple, finer)), ours.result)
    found = equal_to(mine)
    assert found is not None
    again = build(found, size).rounds
    assert [len(round_) for round_ in again] == [len(round_) for round_ in ours.rounds]


def test_what_rail_direct_is():
    """Everyone to its own rank of every node, then within the node: known, with its nodes or without."""
    nodes = tuple(tuple(range(first, first + 4)) for first in (0, 4, 8))
    mine = build("split_rail", 12, nodes=nodes, rail="all_gather_merge")
    for given_nodes in (nodes, None):
        assert equal_to(replace(mine, name="rail direct"), given_nodes).startswith("split_rail:rail=")
    star = (tuple(Transfer(r, 0) for r in (1, 2)), tuple(Transfer(0, r, range(1), False) for r in (1, 2)))
    assert equal_to(Schedule("star", 3, 1, star)) == "binary_tree"
    assert equal_to(Schedule("mine", 3, 1, tuple(reversed(star)))) is None

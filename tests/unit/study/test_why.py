"""Which scheme is fastest and what it sends less of, counted by hand."""

from treeattn.collectives import Schedule, Transfer, build
from treeattn.study.why import counts, equal_messages, headline

NODES = ((0, 1), (2, 3))
#: Of 4 ranks on 2 nodes: up within the nodes, across, and back.
UP = (Transfer(1, 0), Transfer(3, 2))
ACROSS = (Transfer(0, 2), Transfer(2, 0))
BACK = (Transfer(0, 1, merge=False), Transfer(2, 3, merge=False))


def test_counts_by_hand():
    found = counts(Schedule("made", 4, 1, (UP, ACROSS, BACK)), NODES, records=3, record_bytes=10)
    assert found.pop("sends")
    assert found == {
        "rounds": 3, "rounds_inter": 1, "busiest_bytes": 30,
        "messages_intra": 4, "bytes_intra": 120, "messages_inter": 2, "bytes_inter": 60,
    }  # fmt: skip
    doubling = counts(build("recursive_doubling", 4), NODES, 3, 10)
    assert (doubling["rounds_inter"], doubling["busiest_bytes"]) == (1, 60)  # both ranks of a node send
    alone = counts(build("chain", 4), ((0, 1, 2, 3),), 3, 10)
    assert (alone["rounds_inter"], alone["messages_inter"]) == (0, 0)
    assert alone["busiest_bytes"] == 60  # a rank within the chain takes the sum, and later the result


def row(label, like_fastest, schedule=None):
    counted = {} if schedule is None else counts(schedule, NODES, 4, 10)
    return {"label": label, "like_fastest": like_fastest, **counted}


def test_a_headline_names_what_is_less_than_of_the_next_that_can_be_told_apart():
    ours, ring = Schedule("made", 4, 1, (UP, ACROSS, BACK)), build("ring", 4)
    first, sum_ = row("made", None, ours), row("SUM", False)
    rows = [first, row("chain", True, build("chain", 4)), sum_, row("ring", False, ring)]
    assert headline("made", "0.38 of SUM (0.28 to 0.49)", rows) == (
        "fastest here: made, 0.38 of SUM (0.28 to 0.49); cannot be told apart from chain; because, ring in "
        "brackets: rounds between nodes 1 (6), messages between nodes 2 (12), bytes on the busiest link "
        "40 (60), rounds 3 (6), messages within nodes 4 (12)"
    )
    assert headline("made", "1 µs", [first, sum_]) == "fastest here: made, 1 µs"  # a library tells nothing
    assert headline("SUM", "2", [sum_, row("ring", False, ring)], True) == (
        "fastest here: SUM (each rank ends with its heads alone), 2"
    )
    assert headline("ring", "1", [row("ring", None, ring), row("made", False, ours)]).endswith(
        "; not for what it sends: made has no more rounds, nor more between nodes"
    )
    few = headline("ring", "1", [row("ring", None), row("made", None), row("SUM", None)])
    assert few == "fastest here: ring, 1; too few blocks to tell it from made, SUM"


def test_equal_messages_are_said_once():
    rows = [row("a", None, build("chain", 4)), row("b", True, build("ring", 4)), row("SUM", False)]
    assert equal_messages(rows) is None
    block, cyclic = (counts(build("ring", 4), nodes, 4, 10) for nodes in (NODES, ((0, 2), (1, 3))))
    assert equal_messages([{"label": "block", **block}, {"label": "cyclic", **cyclic}]) is None
    assert equal_messages([*rows, row("mine", True, build("chain", 4))]) == "the same messages: a = mine"

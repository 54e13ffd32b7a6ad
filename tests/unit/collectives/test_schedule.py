"""Schedules as data: chunks, folds and JSON. What combinators make is in the golden drawings."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.drawn import examples
from tests.support.refusals import refused
from treeattn.collectives import Schedule, Transfer, build
from treeattn.collectives import schedule as schedules_
from treeattn.collectives.schedule import RESULTS
from treeattn.errors import RestrictionError, ScheduleError

PAIR = ((Transfer(1, 0),),)


@st.composite
def schedules(draw):
    """Anything of the right types: JSON does not care whether it is a correct reduction."""
    size, chunks = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    ranks = st.integers(0, size - 1)
    bounds = st.tuples(st.integers(0, chunks), st.integers(0, chunks)).map(lambda b: range(min(b), max(b)))
    rounds = st.lists(
        st.lists(st.builds(Transfer, ranks, ranks, bounds, st.booleans()), max_size=5).map(tuple), max_size=5
    )
    return Schedule(draw(st.text()), size, chunks, tuple(draw(rounds)), draw(st.sampled_from(RESULTS)))


@pytest.mark.slow
@given(schedules())
@examples(100)
def test_json_round_trip(schedule):
    again = Schedule.from_json(schedule.to_json())
    # Empty ranges are equal wherever they lie, so compare the text as well.
    assert again == schedule
    assert again.to_json() == schedule.to_json()
    assert hash(again) == hash(schedule)
    assert "\n" not in schedule.to_json()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"size": "4"}, "Expected `int`, got `str` - at `$.size`"),
        ({"size": True}, "size"),
        ({"size": 10**11}, "<= 262144 - at `$.size`"),  # filled the memory
        ({"chunks": 1.0}, "chunks"),
        ({"chunks": 0}, ">= 1 - at `$.chunks`"),
        ({"name": 3}, "name"),
        ({"result": "gone"}, "'gone' - at `$.result`"),
        ({"rounds": [[[0, 1, 0, 1, 1], [0, 1]]]}, "length 5 - at `$.rounds[0][1]`"),
        ({"rounds": [[[0, 1.5, 0, 1, 1]]]}, "`$.rounds[0][0][1]`"),
        ({"rounds": [[[0, 1, 0, 1, 7]]]}, "7 - at `$.rounds[0][0][4]`"),
        ({"transfer": ["dst", "src", "first_chunk", "end_chunk", "merge"]}, "transfer are src, dst"),
    ],
    ids=str,
)
def test_json_written_by_hand_is_told_the_key_and_what_stands_there(change, words):
    whole = json.loads(Schedule("pair", 2, 1, PAIR).to_json())
    with refused("not the JSON of a schedule", words, error=ScheduleError):
        Schedule.from_json(json.dumps(whole | change))
    for key in whole.keys() - {"transfer"}:
        with pytest.raises(ScheduleError, match=f"field `{key}`"):
            Schedule.from_json(json.dumps({name: value for name, value in whole.items() if name != key}))


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "{", "[" * 100_000])
def test_text_that_is_not_a_schedule_is_refused(text):
    with pytest.raises(ScheduleError, match="not the JSON of a schedule"):
        Schedule.from_json(text)


@examples(100)
@given(st.integers(1, 40), st.integers(0, 200))
def test_chunks_cut_the_records_without_gap_or_overlap(chunks, records):
    schedule = Schedule("cut", 1, chunks, ())
    cut = [schedule.chunk_slice(range(chunk, chunk + 1), records) for chunk in range(chunks)]
    assert [index for part in cut for index in range(part.start, part.stop)] == list(range(records))
    sizes = {part.stop - part.start for part in cut}
    assert max(sizes) - min(sizes) <= 1
    assert schedule.chunk_slice(range(chunks), records) == slice(0, records)


@pytest.mark.parametrize("scheme", ["all_gather_merge", "all_gather_trees", "double_binary_tree", "ring"])
def test_transfers_are_counted_before_they_are_made(scheme, monkeypatch):
    made = [build(scheme, size) for size in (8, 12)]
    for one in made:
        monkeypatch.setattr(schedules_, "TRANSFER_LIMIT", one.messages)
        assert build(scheme, one.size) == one
        monkeypatch.setattr(schedules_, "TRANSFER_LIMIT", one.messages - 1)
        with pytest.raises(RestrictionError, match=f"needs {one.messages} transfers.*take a scheme"):
            build(scheme, one.size)

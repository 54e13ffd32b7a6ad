"""The states of every reducer, and the order that they allow."""

from __future__ import annotations

import os

import pytest

from treeattn.collectives.runtime.reducer import Reducer
from treeattn.errors import StateError


class Logged(Reducer):
    """Writes down what it is asked for; `fails` names what raises."""

    def __init__(self, fails=""):
        super().__init__("logged")
        self.log, self.fails = [], fails

    def _part(self, name):
        self.log.append(name)
        if name == self.fails:
            raise KeyError(name)

    def _begin(self):
        self._part("begin")

    def _complete(self):
        self._part("complete")

    def _advance(self):
        self._part("advance")
        return False

    def _release(self):
        self._part("release")

    def _abandon(self):
        self._part("abandon")


def test_closing_ends_a_step_in_flight_once():
    """What may follow what is of the contract of all reducers."""
    reducer = Logged()
    reducer()
    reducer.start()
    reducer.close()
    reducer.close()
    assert reducer.log == ["begin", "complete", "begin", "complete", "release"]


@pytest.mark.parametrize("fails", ["begin", "complete"])
@pytest.mark.parametrize("halves", [False, True])
def test_a_step_that_fails_is_never_finished_nor_followed(fails, halves):
    """Others may have gone on: what is left is the end of this rank alone."""
    reducer = Logged(fails)
    with pytest.raises(KeyError):
        (reducer.start(), reducer.wait()) if halves else reducer()
    with pytest.raises(StateError, match="failed"):
        reducer()
    with pytest.raises(StateError, match="without start"):
        reducer.wait()
    reducer.close()
    assert reducer.log[-1] == "abandon"
    assert "release" not in reducer.log


def test_an_error_outside_of_a_step_leaves_without_the_others():
    reducer = Logged()
    reducer()
    reducer.__exit__(ZeroDivisionError)
    assert reducer.log == ["begin", "complete", "abandon"]


def test_what_a_fork_inherits_is_disowned():
    reducer = Logged()
    reducer.start()
    if (child := os.fork()) == 0:
        try:
            reducer.wait()
        except StateError as error:
            os._exit(0 if "another process's" in str(error) and not reducer.in_flight else 2)
        os._exit(3)
    assert os.waitpid(child, 0)[1] == 0
    reducer.close()
    assert reducer.log == ["begin", "complete", "release"]


def test_a_part_that_fails_is_seen_by_whoever_asks():
    """A step that works, one that rests, and one that failed: which may wait for other ranks."""
    reducer = Logged("complete")
    assert (reducer.blocking, reducer.in_flight) == (0, False)
    reducer.start()
    assert (reducer.blocking, reducer.in_flight, reducer.test()) == (0, True, False)
    with pytest.raises(KeyError):
        reducer.wait()
    assert (reducer.blocking, reducer.in_flight) == (0, True)
    with pytest.raises(StateError, match=r"test\(\) without start\(\)"):
        reducer.test()


def test_what_fails_on_the_way_is_never_finished():
    reducer = Logged("advance")
    reducer.start()
    with pytest.raises(KeyError):
        reducer.test()
    with pytest.raises(StateError, match=r"wait\(\) without start\(\)"):
        reducer.wait()


def test_other_work_in_place_of_a_step():
    reducer = Logged()
    step = reducer._step_by(lambda: reducer.log.append("work"))
    step()
    step()
    assert (reducer.log, reducer.in_flight) == (["work", "work"], False)
    reducer.start()
    with pytest.raises(StateError, match="already running"):
        step()

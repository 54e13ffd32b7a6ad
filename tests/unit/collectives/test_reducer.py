"""The states of every reducer, and the order that they allow."""

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
    assert (reducer.blocking, reducer.in_flight) == (0, False)
    reducer.start()
    assert (reducer.blocking, reducer.in_flight, reducer.test()) == (0, True, False)
    reducer.close()
    reducer.close()
    assert reducer.log == ["begin", "complete", "begin", "advance", "complete", "release"]


@pytest.mark.parametrize(
    ("fails", "calls"),
    [
        ("begin", ["__call__"]),
        ("begin", ["start"]),
        ("complete", ["__call__"]),
        ("complete", ["start", "wait"]),
        ("advance", ["start", "test"]),
    ],
)
def test_a_step_that_fails_is_never_finished_nor_followed(fails, calls):
    """Others may have gone on: what is left is the end of this rank alone."""
    reducer, *before, last = Logged(fails), *calls
    for call in before:
        getattr(reducer, call)()
    with pytest.raises(KeyError):
        getattr(reducer, last)()
    assert (reducer.blocking, reducer.in_flight) == (0, True), "it waits for no one"
    with pytest.raises(StateError, match="failed"):
        reducer()
    for call in (reducer.wait, reducer.test):
        with pytest.raises(StateError, match=r"\w+\(\) without start\(\)"):
            call()
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


def test_other_work_in_place_of_a_step():
    reducer = Logged()
    step = reducer.step_by(lambda: reducer.log.append("work"))
    step()
    step()
    assert (reducer.log, reducer.in_flight) == (["work", "work"], False)
    reducer.start()
    with pytest.raises(StateError, match="already running"):
        step()

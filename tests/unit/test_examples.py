"""Every public function, and every class that a user makes, shows in its docstring how it is called."""

import pytest

import treeattn
from tests.support.examples import run_examples
from treeattn import collectives, energy, token_tree
from treeattn.collectives.clusters.description import load
from treeattn.collectives.clusters.simulate import simulate

#: What functions return: nobody makes one.
RESULTS = {"Accepted", "Certificate", "FoldOrder", "Packed", "Proof"}
PUBLIC = [
    getattr(package, name)
    for package in (treeattn, collectives, token_tree, energy)
    for name in package.__all__
    if callable(getattr(package, name)) and name not in RESULTS and not name.endswith("Error")
]


@pytest.mark.parametrize("named", [*PUBLIC, load, simulate], ids=lambda named: named.__qualname__)
def test_the_example_of_a_docstring_shows_what_comes_out(named):
    assert run_examples(named)


def test_an_example_that_shows_something_else_fails():
    def wrong():
        """
        >>> 1 + 1
        3
        """

    with pytest.raises(AssertionError, match="Got:\n    2"):
        run_examples(wrong)

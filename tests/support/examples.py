"""Examples in docstrings, run by doctest."""

import doctest
import inspect
from typing import Any

import numpy as np

import treeattn
from treeattn import collectives


def run_examples(named: Any, **given: Any) -> int:
    """Run the example of a function or class: how many lines it has. Fails where one shows something else."""
    module = inspect.getmodule(named)
    names = vars(module) | {"np": np, "treeattn": treeattn, "collectives": collectives} | given
    test = doctest.DocTestParser().get_doctest(named.__doc__ or "", names, named.__name__, None, None)
    told: list[str] = []
    failed = doctest.DocTestRunner(verbose=False).run(test, out=told.append).failed
    assert not failed, "".join(told)
    return len(test.examples)

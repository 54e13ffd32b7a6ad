"""The jobs of `tests.fuzz.machines` over MPI, by rules that all ranks draw alike: `make fuzz`."""

import hypothesis
import pytest
from hypothesis.stateful import run_state_machine_as_test

from tests.fuzz.machines import Serving, Writing, machine
from tests.fuzz.settings import FUZZ, fuzzed, new_seed

pytestmark = pytest.mark.timeout(0)


@pytest.mark.parametrize(("model", "count"), [(Serving, 6), (Writing, 2)])
def test_a_job_is_its_model(comm, model, count):
    rules = machine(model, comm)
    if FUZZ > 1:
        rules = hypothesis.seed(comm.bcast(new_seed()))(rules)
    run_state_machine_as_test(rules, settings=fuzzed(count, stateful_step_count=12))

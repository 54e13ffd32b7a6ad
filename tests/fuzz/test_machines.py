"""Jobs of 1 to 4 ranks in this process, by rules, whose schedules the loopback runs."""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from tests.fuzz.machines import Serving, Writing, machine
from tests.fuzz.settings import fuzzed
from tests.support.thread_ranks import ThreadJob, by_loopback


@pytest.mark.parametrize(("model", "count"), [(Serving, 15), (Writing, 4)])
def test_a_job_is_its_model(model, count):
    with by_loopback():
        run_state_machine_as_test(machine(model, ThreadJob), settings=fuzzed(count, stateful_step_count=12))

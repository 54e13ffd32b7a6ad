"""Ranks that torchrun has started: no MPI anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.torchrun import needs_torch, torchrun

pytestmark = needs_torch
HERE = Path(__file__).parent


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.deep)])
def test_every_schedule_has_the_bits_of_its_definition(ranks):
    done = torchrun(HERE / "torchrun_schedules.py", ranks=ranks)
    assert done.returncode == 0, done.stderr

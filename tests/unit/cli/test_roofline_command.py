"""The command measures only when all else is known that its results say."""

import pytest

from treeattn.cli import roofline as command
from treeattn.study import environment


class Measured(Exception):
    """Instead of results."""


def test_nothing_is_measured_before_the_software_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """It loads the MPI library, which may end the process: then no measurement is lost."""
    order: list[str] = []

    def measure(*_: object, **__: object) -> None:
        order.append("measured")
        raise Measured

    monkeypatch.setattr(command.roofline, "measure", measure)
    monkeypatch.setattr(environment, "software", lambda: order.append("software"))
    with pytest.raises(Measured):
        command.command.main([], standalone_mode=False)
    assert order == ["software", "measured"]

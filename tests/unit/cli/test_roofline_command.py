"""The command measures only when all else is known that its results say."""

from __future__ import annotations

import pytest

from treeattn.backends.cuda import cupy_runtime
from treeattn.cli import roofline as command
from treeattn.study import environment


class Measured(Exception):
    """Instead of results."""


@pytest.mark.parametrize("words", [[], ["--device", "cuda"], ["--tune"]])
def test_nothing_is_measured_before_the_software_is_known(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """It loads the MPI library, which may end the process: then no measurement is lost."""
    order: list[str] = []

    def measure(*_: object, **__: object) -> None:
        order.append("measured")
        raise Measured

    monkeypatch.setattr(cupy_runtime, "problem", lambda: None)
    for module in (command.roofline, command.roofline_cuda):
        monkeypatch.setattr(module, "measure", measure)
    monkeypatch.setattr(command.tuning, "tune", measure)
    monkeypatch.setattr(environment, "software", lambda: order.append("software"))
    with pytest.raises(Measured):
        command.command.main(words, standalone_mode=False)
    assert order == ["software", "measured"]


@pytest.mark.parametrize(
    ("kept", "said"), [("/there", "kept in /there"), (None, "the defaults are the fastest")]
)
def test_what_was_tuned_is_told(monkeypatch: pytest.MonkeyPatch, capsys, kept: str | None, said: str) -> None:
    row = {"dtype": "float32", "setting": "BLOCK_TOKENS", "number": 128, "microseconds": 1.0, "chosen": True}
    monkeypatch.setattr(command.tuning, "tune", lambda *_, **__: {"isa": "avx2", "rows": [row], "file": kept})
    command.command.main(["--tune"], standalone_mode=False)
    assert said in capsys.readouterr().out

"""Reports: the same rows as a table and as JSON, and colours for terminals alone."""

import io
import json
import time
from dataclasses import dataclass

import pytest

from treeattn import report
from treeattn.report import Column, Progress, Report, microseconds


@dataclass
class Point:
    name: str
    error: float | None = None


COLUMNS = [Column("name", words=True), Column("time, µs", "us", microseconds), Column("bound", wide=True)]
ROWS = [{"name": "chain", "us": 1234.5, "bound": 0.5}, {"name": ":ring:", "us": None, "bound": float("inf")}]


def shown(made: Report, wide: bool = False, file: io.StringIO | None = None) -> str:
    file = file or io.StringIO()
    made.show(wide, file)
    return file.getvalue()


def test_the_rows_of_the_table_are_those_of_the_file():
    made = Report({"rows": ROWS, "ranks": 2})
    made.line(":x: schemes")
    made.table(ROWS, COLUMNS)
    made.note(None)
    made.note("too many")
    lines = [line.split() for line in shown(made).splitlines()]
    assert lines == [
        [":x:", "schemes"], ["name", "time,", "µs"], ["chain", "1,234"], [":ring:", "-"],
        ["note:", "too", "many"],
    ]  # fmt: skip
    assert shown(made, wide=True).splitlines()[3].split() == [":ring:", "-", "inf"]
    facts = json.loads(made.json(), parse_constant=pytest.fail)
    assert facts == {"rows": [ROWS[0], ROWS[1] | {"bound": "inf"}], "ranks": 2}


def test_rows_may_be_objects():
    made = Report([])
    columns = [Column("name"), Column("error", form=".1e"), Column("both", lambda row: len(row.name))]
    made.table([Point("a", 2e-6), Point("bc")], columns)
    assert [line.split() for line in shown(made).splitlines()[1:]] == [
        ["a", "2.0e-06", "1"],
        ["bc", "-", "2"],
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_launchers_terminal_gets_no_colours(monkeypatch):
    """Open MPI gives ranks a terminal of its own, whose bytes it may write to a file."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    made = Report([])
    made.line("wrong", style="red")
    assert "\x1b[" in shown(made, file=Terminal())
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    assert shown(made, file=Terminal()) == "wrong\n"


def test_progress_is_a_line_now_and_then(capsys, monkeypatch):
    now = 100.0
    monkeypatch.setattr(report.time, "monotonic", lambda: now)
    say, other_rank = Progress(first=3, every=10), Progress(False)
    for second in range(30):
        now = 100.0 + second
        say(f"second {second}")
        other_rank("silent")
    assert capsys.readouterr() == ("", "second 3\nsecond 13\nsecond 23\n")


def test_one_long_computation_is_no_silence(capsys):
    """The text is said from beside it; what ends sooner says nothing."""
    with Progress(first=3600.0) as say:
        say("proving")
    with Progress(False) as say:
        say("another rank")
    assert capsys.readouterr() == ("", "")
    with Progress(first=0.01, every=0.01) as say:
        say("proving")
        said, until = "", time.monotonic() + 60
        while said.count("proving") < 2 and time.monotonic() < until:
            said += capsys.readouterr().err
    assert said.splitlines()[:2] == ["proving", "proving"]


def test_a_ratio_is_never_nothing():
    assert [report.ratio(value) for value in (1.0, 0.384, 0.1, 0.0951, 0.00042)] == [
        "1.00", "0.38", "0.10", "0.095", "0.00042",
    ]  # fmt: skip

"""Thousands of tests stay in memory from their collection on: the garbage collector need not look at them,
neither while they are collected nor while they run. A run of many files ends with the slowest of them."""

import gc
from collections import Counter
from collections.abc import Iterator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if len(seconds) > 10:
        terminalreporter.section("ten slowest files")
        for file, took in seconds.most_common(10):
            terminalreporter.line(f"{took:6.1f} s  {file}")

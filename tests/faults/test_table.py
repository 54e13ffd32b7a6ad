"""The table has a row for every command, and the page shows the table."""

from __future__ import annotations

import click

from treeattn.cli import commands

from . import jobs, page, table

#: Whose faults are in tests/command/test_cache_nodes.py, and in tests/mpi/test_saved_cache.py.
STARTED_OTHERWISE = {"cache-node", "cache"}


def test_every_command_has_a_row():
    names = set(commands.list_commands(click.Context(commands)))
    assert names == {*table.TOGETHER, *table.WRITERS} | STARTED_OTHERWISE


def test_what_is_done_elsewhere_is_there():
    for row in table.ELSEWHERE:
        file, function = row.test.split("::")
        assert f"def {function}(" in (jobs.ROOT / "tests" / file).read_text(), row


def test_the_page_shows_the_table():
    assert page.PAGE.read_text() == page.text(page.read())

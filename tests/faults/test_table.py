"""The table has a row for every command, and the page shows the table."""

import ast
import importlib
import inspect
import json
import re

import click

from treeattn.cli import commands

from . import jobs, table

#: Whose faults are in tests/command/test_cache_nodes.py.
STARTED_OTHERWISE = {"cache-node"}

PROGRAM = jobs.ROOT / "tests/faults/program.py"
#: Where public names lie, but for those that need torch (tests/huggingface).
PUBLIC = ("treeattn", "treeattn.cache_nodes", "treeattn.energy", "treeattn.llama", "treeattn.token_tree")
#: Those that meet other ranks and that `program.py` does not name, and what there goes the same way.
BY_ANOTHER_NAME = {
    "Merger": "merge", "Prefill": "prefill", "verify": "Verifier", "CacheNodes": "connect",
    "accept_speculative": "accept_greedy",
}  # fmt: skip


def test_the_table_is_short():
    assert len(table.FAULTS + table.GRIEFS + table.SPOILED + table.ELSEWHERE) <= 16


def test_every_command_has_a_row():
    names = set(commands.list_commands(click.Context(commands)))
    assert names == {*table.TOGETHER, *table.WRITERS} | STARTED_OTHERWISE


def meeting_others():
    """Public names of what takes a communicator, also in a method."""
    for room in map(importlib.import_module, PUBLIC):
        for name in room.__all__:
            found = getattr(room, name)
            methods = [getattr(found, own) for own in vars(found)] if inspect.isclass(found) else []
            calls = [found, *methods]  # as one calls them: class methods, too
            if any(callable(call) and "comm" in inspect.signature(call).parameters for call in calls):
                yield name


def test_whatever_meets_other_ranks_comes_to_grief():
    """In the program, which stops before each of the table's phases."""
    nodes = ast.walk(ast.parse(PROGRAM.read_text()))
    calls = sorted((node for node in nodes if isinstance(node, ast.Call)), key=lambda call: call.lineno)
    called = {ast.unparse(call.func).rpartition(".")[2] for call in calls}
    meeting = {BY_ANOTHER_NAME.get(name, name) for name in meeting_others()}
    assert {"Decoder", "ShardedCache", "Session"} <= meeting <= called
    phases = [call.args[0].value for call in calls if ast.unparse(call.func) == "before"]
    assert phases == list(table.PHASES)


def test_what_is_done_elsewhere_is_there():
    for row in table.ELSEWHERE:
        file, function = row.test.split("::")
        assert f"def {function}(" in (jobs.ROOT / "tests" / file).read_text(), row


def test_the_page_shows_the_table():
    page = (jobs.ROOT / "docs/faults.md").read_text()
    rows = json.loads((jobs.ROOT / "docs/results/faults.json").read_text())["rows"]
    lines = [line.split(" | ") for line in re.findall(r"^\| (.*) \|$", page, re.MULTILINE)]
    shown = {name: cells for name, *cells in lines}
    assert f"{sum(row['jobs'] for row in rows.values())}\njobs" in page
    assert f"{jobs.LIMIT} in these" in page
    for row in (*table.FAULTS, *table.GRIEFS, *table.SPOILED, *table.ELSEWHERE):
        assert row.shown == shown[row.name][0]
        if row not in table.ELSEWHERE:
            assert f"{rows[row.name]['seconds']:.1f} s" in shown[row.name]
    for fault in table.FAULTS:
        assert shown[fault.name][1::2] == [", ".join(map(str, fault.codes)), fault.kept]

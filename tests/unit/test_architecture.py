"""The page that shows the way of a step names every import between rooms, and no more."""

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

from treeattn.baselines import BASELINES
from treeattn.collectives import catalog

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"


def sources():
    """Module name -> file. The link treeattn/collectives leads to collectives/."""
    for top, package in (("treeattn", "treeattn"), ("collectives", "treeattn.collectives")):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT / top).with_suffix("").parts
            if top == "treeattn" and parts[0] in ("collectives", "kernels"):
                continue
            yield ".".join((package, *(part for part in parts if part != "__init__"))), path


MODULES = dict(sources())


def room(module):
    """The folder of a module below the package, of two levels where a folder has folders; else the module."""
    _, *parts = module.split(".")
    if not parts:
        return "treeattn"
    packages = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    deep = parts[0] in ("backends", "collectives")
    return "/".join(
        part
        for depth, part in enumerate(parts[: 2 if deep else 1], 1)
        if depth == 1 or ".".join(("treeattn", *parts[:depth])) in packages
    )


def imported(path):
    """Modules of ours that a file imports when it runs, inside functions too."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("treeattn"):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)


@functools.cache
def edges():
    found = defaultdict(set)
    for module, path in MODULES.items():
        found[room(module)] |= {room(other) for other in imported(path)} - {room(module)}
    for row in (*catalog.CATALOG.values(), *BASELINES.values()):  # imported by name, when they are planned
        module = row.module or row.generator.__module__
        found[room(catalog.__name__)] |= {room(module)} - {"baselines", room(catalog.__name__)}
    return {name: sorted(others) for name, others in sorted(found.items()) if others}


def shown():
    (block,) = re.findall(r":name: rooms\n\n(.*?)```", PAGE.read_text(), re.DOTALL)
    rows = [line.partition("->") for line in block.splitlines()]
    return {name.strip(): others.split() for name, _, others in rows}


def test_the_picture_shows_the_imports():
    assert shown() == edges()


def test_collectives_know_nothing_of_attention():
    reached = {
        other for name, others in edges().items() if name.startswith("collectives") for other in others
    }
    assert {name for name in reached if not name.startswith("collectives")} == {"errors"}


def test_folders_of_collectives_do_not_import_in_a_circle():
    among = {
        name: [other for other in others if "/" in other]
        for name, others in edges().items()
        if name.startswith("collectives/")
    }
    while among:
        leaves = [name for name, others in among.items() if not set(others) & set(among)]
        assert leaves, f"a circle among {sorted(among)}"
        among = {name: others for name, others in among.items() if name not in leaves}


def test_nobody_knows_the_command_line():
    assert {name for name, others in edges().items() if "cli" in others} <= {"__main__"}


def test_every_file_named_on_the_page_is_where_it_says():
    named = set(re.findall(r"[\w/*]+\.(?:py|c)\b", PAGE.read_text()))
    assert len(named) > 45
    for name in named:
        top = ROOT if name.startswith(("collectives/", "kernels/", "tests/")) else ROOT / "treeattn"
        assert list(top.glob(name)), name


# What only one of the backends has: NumPy in place of compiled kernels, reproducible records, products; the
# GPU's libraries, and how its kernels are built,
# cut into blocks and given pages.
ALONE = {
    "cpu": {"bins", "blocked", "multiply_rows", "reproducible"},
    "cuda": {
        "arguments", "block_table", "cache", "cupy_runtime", "driver", "pull", "runtime", "splits",
        "step", "variants",
    },
}  # fmt: skip


def test_backends_have_files_of_the_same_names():
    names = {
        backend: {path.stem for path in (ROOT / "treeattn" / "backends" / backend).glob("*.py")} - alone
        for backend, alone in ALONE.items()
    }
    assert names["cpu"] == names["cuda"]

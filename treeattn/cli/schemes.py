"""``treeattn schemes``: the catalogue."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from treeattn import files
from treeattn.collectives.catalog import Scheme
from treeattn.decoder.plan import CATALOG
from treeattn.study import environment

__all__ = ["command"]


@click.command("schemes")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the catalogue here.")
def command(json_path: Path | None) -> None:
    """List every scheme: what it is, what it costs, its parameters and restrictions."""
    files.output_writer(json_path)(environment.as_json([_row(scheme) for scheme in CATALOG.values()]))
    table = Table(box=None, pad_edge=False)
    for heading in ("scheme", "what it is", "time (p ranks, n bytes)", "parameters"):
        table.add_column(heading, overflow="fold")
    for scheme in CATALOG.values():
        table.add_row(scheme.name, scheme.summary, scheme.cost, _parameters(scheme))
    Console(width=None if sys.stdout.isatty() else 160, markup=False).print(table)
    print("\nscheme strings: name:key=value:key=value, lists as 4+4+2, nested schemes in parentheses")


def _parameters(scheme: Scheme) -> str:
    rows = [f"{p.name}={'from the machine' if p.kind == 'nodes' else p.default}" for p in scheme.parameters]
    return "\n".join(rows)


def _row(scheme: Scheme) -> dict[str, Any]:
    return {
        "name": scheme.name,
        "kind": scheme.kind,
        "summary": scheme.summary,
        "cost": scheme.cost,
        "restriction": scheme.restriction,
        "rooted": scheme.rooted,
        "parameters": [
            {"name": p.name, "default": p.default, "allowed": p.allowed, "doc": p.doc}
            for p in scheme.parameters
        ],
    }

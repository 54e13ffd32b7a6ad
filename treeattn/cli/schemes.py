"""``treeattn schemes``: the catalogue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from treeattn import files
from treeattn.cli.console import LEGEND, WIDE, console, table
from treeattn.collectives.catalog import Scheme
from treeattn.decoder.plan import CATALOG
from treeattn.study import environment

__all__ = ["command"]


@click.command("schemes")
@WIDE
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the catalogue here.")
def command(wide: bool, json_path: Path | None) -> None:
    """List every scheme with its parameters: what it is and, with --wide, its time and restriction."""
    files.output_writer(json_path)(environment.as_json([_row(scheme) for scheme in CATALOG.values()]))
    headings = ["scheme", "identical\nbits", "what it is", "time (p ranks, n bytes)", "restriction"]
    shown = table(headings if wide else headings[:3], words=5)
    for scheme in CATALOG.values():
        bits = "-" if scheme.scattered else "proved" if scheme.kind == "schedule" else "measured"
        cells = [_with_parameters(scheme), bits, scheme.summary, scheme.cost, scheme.restriction]
        shown.add_row(*cells[: len(shown.columns)])
    screen = console(wide)
    screen.print(shown)
    screen.print(f"\n{LEGEND}")
    screen.print("scheme strings: name:key=value:key=value, lists as 4+4+2, schemes in parentheses")


def _with_parameters(scheme: Scheme) -> str:
    rows = [f"  :{p.name}={'(the machine)' if p.kind == 'nodes' else p.default}" for p in scheme.parameters]
    return "\n".join([scheme.name, *rows])


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

"""``treeattn schemes``: the catalogue."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import click

from treeattn import files
from treeattn.cli.console import LEGEND, WIDE, console, identical, table
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
    screen = console(wide)
    table(screen, _COLUMNS | _MORE if wide else _COLUMNS, CATALOG.values(), words=5)
    screen.print(f"\n{LEGEND}")
    screen.print("scheme strings: name:key=value:key=value, lists as 4+4+2, schemes in parentheses")


def _identical(scheme: Scheme) -> str:
    how = "" if scheme.kind == "schedule" else "measured"
    return identical(how, None if scheme.scattered else bool(scheme.transports))


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


_COLUMNS: dict[str, Callable[[Scheme], str]] = {
    "scheme": _with_parameters,
    "identical\nbits": _identical,
    "what it is": attrgetter("summary"),
}
_MORE = {"time (p ranks, n bytes)": attrgetter("cost"), "restriction": attrgetter("restriction")}

"""``treeattn schemes``: the catalogue."""

from __future__ import annotations

import click

from treeattn.cli.options import Output, output_options
from treeattn.collectives.catalog import Scheme
from treeattn.report import LEGEND, Column, Report, identical
from treeattn.selection import CATALOG

_HOW = {"schedule": "proved", "library": "measured", "baseline": "measured"}


@click.command("schemes")
@output_options(wide=True, json="Write the catalogue here.")
def command(output: Output) -> None:
    """List every scheme with its parameters: what it is and, with --wide, its time and restriction."""
    output.open()
    made = Report([_facts(scheme) for scheme in CATALOG.values()])
    made.table(CATALOG.values(), [
        Column("scheme", _with_parameters, words=True),
        Column("identical\nbits", lambda s: identical(_HOW[s.kind], not s.scattered or None), words=True),
        Column("what it is", "summary", words=True),
        Column("time (p ranks, n bytes)", "cost", words=True, wide=True),
        Column("restriction", words=True, wide=True),
    ])  # fmt: skip
    made.line(f"\n{LEGEND}")
    made.line("scheme strings: name:key=value:key=value, lists as 4+4+2, schemes in parentheses")
    output.report(made)


def _with_parameters(scheme: Scheme) -> str:
    rows = [f"  :{p.name}={'(the machine)' if p.kind == 'nodes' else p.default}" for p in scheme.parameters]
    return "\n".join([scheme.name, *(f"  = {alias}" for alias in scheme.aliases), *rows])


def _facts(scheme: Scheme) -> dict[str, object]:
    names = ("name", "default", "allowed", "doc")
    facts = {
        key: getattr(scheme, key)
        for key in ("name", "aliases", "kind", "summary", "cost", "restriction", "rooted")
    }
    parameters = [{name: getattr(parameter, name) for name in names} for parameter in scheme.parameters]
    return facts | {"parameters": parameters}

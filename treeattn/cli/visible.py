"""``treeattn visible``: what queries see of a sharded sequence, drawn."""

from __future__ import annotations

from pathlib import Path

import click

from treeattn import files
from treeattn.attention import drawing
from treeattn.attention.mask import Rules
from treeattn.attention.positions import as_runs
from treeattn.cli.rules import rule_options
from treeattn.cli.rules import window as read_window
from treeattn.errors import ArgumentError
from treeattn.shards import LAYOUTS, parse_layout

__all__ = ["command"]

_MOST = 512  # tokens: beyond, a character or a cell of a drawing cannot be told apart


@click.command("visible")
@click.option("--tokens", type=click.IntRange(1, _MOST), default=64, show_default=True)
@click.option("--ranks", type=click.IntRange(1, 64), default=4, show_default=True)
@click.option("--layout", default="contiguous", show_default=True, metavar="|".join(LAYOUTS),
              help="Which tokens go to which rank.")  # fmt: skip
@click.option("--queries", metavar="T[,T..]", help="Positions of queries; default the last one.")
@rule_options
@click.option("--format", "form", type=click.Choice(["text", "svg"]), default="text", show_default=True)
@click.option(
    "--out", type=click.Path(path_type=Path), help="Write the drawing here instead of to the screen."
)
def command(
    tokens: int,
    ranks: int,
    layout: str,
    queries: str | None,
    causal: bool,
    window: str | None,
    leading: int,
    softcap: float | None,
    form: str,
    out: Path | None,
) -> None:
    """Show which tokens of which rank queries see, and the intervals of each shard that kernels read."""
    asked = queries or str(tokens - 1)
    if not all(one.isdecimal() for one in asked.split(",")):
        raise ArgumentError(f"--queries {asked}: whole numbers, separated by commas")
    stands = [int(one) for one in asked.split(",")]
    if max(stands) >= tokens:
        raise ArgumentError(f"--queries {asked}: a drawing of {tokens} tokens ends at {tokens - 1}")
    rules = Rules(causal=causal, window=read_window(window), leading=leading, softcap=softcap)
    chosen = parse_layout(layout)
    shards = [as_runs(chosen.runs(tokens, rank, ranks)) for rank in range(ranks)]
    if form == "svg":
        drawn = drawing.svg(rules, shards, stands, f"{chosen} shards of {tokens} tokens on {ranks} ranks")
    else:
        drawn = drawing.text(rules, shards, stands)
    files.output_writer(out)((drawn + "\n").encode())
    print(f"the drawing is in {out}" if out else drawn)

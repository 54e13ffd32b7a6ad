"""``treeattn visible``: what queries see of a sharded sequence, drawn."""

from __future__ import annotations

import click

from treeattn.attention import drawing
from treeattn.attention.mask import Rules
from treeattn.attention.positions import as_runs
from treeattn.cli.options import Output, layout_option, output_options, read, rule_options, whole_numbers
from treeattn.errors import ArgumentError
from treeattn.shards import Layout

_MOST = 512  # tokens: beyond, a character or a cell of a drawing cannot be told apart


@click.command("visible")
@click.option("--tokens", type=click.IntRange(1, _MOST), default=64)
@click.option("--ranks", type=click.IntRange(1, 64), default=4)
@layout_option()
@click.option("--queries", callback=read(whole_numbers), metavar="T[,T..]",
              help="Positions of queries; default the last one.")  # fmt: skip
@rule_options
@click.option("--format", "form", type=click.Choice(["text", "svg"]), default="text")
@output_options("Write the drawing here instead of to the screen.", wide=False, json=None)
def command(
    tokens: int,
    ranks: int,
    layout: Layout,
    queries: list[int] | None,
    rules: Rules,
    form: str,
    output: Output,
) -> None:
    """Show which tokens of which rank queries see, and the intervals of each shard that kernels read."""
    stands = queries or [tokens - 1]
    if max(stands) >= tokens:
        raise ArgumentError(f"--queries {max(stands)}: a drawing of {tokens} tokens ends at {tokens - 1}")
    shards = [as_runs(layout.runs(tokens, rank, ranks)) for rank in range(ranks)]
    output.open()
    if form == "svg":
        title = f"{layout} shards of {tokens} tokens on {ranks} ranks"
        output.draw(drawing.svg(rules, shards, stands, title))
    else:
        output.draw(drawing.text(rules, shards, stands))

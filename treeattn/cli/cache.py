"""``treeattn cache``: what a saved cache holds, and the same for another number of ranks."""

from __future__ import annotations

from pathlib import Path

import click

from treeattn import launch
from treeattn.attention.positions import Runs
from treeattn.cache import parts
from treeattn.cache.index import Index, read_index
from treeattn.cache.saved import reshard
from treeattn.cli.options import FILE, RANKS, Output, number, output_options, read
from treeattn.errors import ArgumentError
from treeattn.report import Column, Report
from treeattn.shards import LAYOUTS


@click.group("cache")
def command() -> None:
    """Show or deal out anew a KV cache that ranks have saved."""


@command.command()
@click.argument("directory", type=FILE)
@click.option("--check", is_flag=True, help="Read every row, too: damage is named.")
@output_options(wide=False, json="Write the index.")
def info(directory: Path, check: bool, output: Output) -> None:
    """Show what the cache in DIRECTORY holds, and that its files are there and whole."""
    output.open()
    index = read_index(directory)
    for part in index.parts:
        parts.check(directory, part, rows=check)
    output.report(_report(directory, index))


@command.command("reshard")
@click.argument("directory", type=FILE)
@click.argument("target", metavar="OUT", type=FILE)
@click.option("--ranks", type=RANKS, required=True, help="How many files there will be.")
@click.option("--layout", default="interleaved", metavar="|".join(LAYOUTS),
              help="Which token goes to which rank.")  # fmt: skip
@click.option("--capacity", callback=read(number), metavar="N",
              help="Tokens that the layout is made for; those of the cache unless given.")  # fmt: skip
@output_options(wide=False, json="Write the new index.")
def _reshard(
    directory: Path, target: Path, ranks: int, layout: str, capacity: int | None, output: Output
) -> None:
    """Write the cache in DIRECTORY to OUT as so many ranks would have.

    Any number of ranks can load either; this one process holds one rank's part at a time.
    """
    if launch.launched_as()[1] > 1:
        raise ArgumentError("treeattn cache reshard is one process: start it without mpiexec")
    output.open()
    output.report(_report(target, reshard(directory, target, ranks, layout, capacity)))


def _report(directory: Path, index: Index) -> Report:
    files = [
        {"rank": rank, "file": part.file, "tokens": len(Runs(part.runs)), "bytes": part.bytes}
        for rank, part in enumerate(index.parts)
    ]
    made = Report({**index.described, "parts": files})
    widths = f"{index.head_dim}, values of {index.v_dim}{' of them' if index.latent else ''}"
    heads = f"{index.kv_heads} KV heads x {widths}"
    made.line(f"{directory}: {index.layers} layers, {heads}, {index.dtype}")
    totals = ", ".join(f"{total:,}" for total in index.totals)
    made.line(f"{totals} tokens, layout {index.layout}, room for {index.capacity:,}")
    made.table(files, [
        Column("rank", form="d"), Column("tokens", form=",d"), Column("bytes", form=",d"),
        Column("file", words=True),
    ])  # fmt: skip
    for name, value in index.about.items():
        made.line(f"{name}: {value!s:.80}")
    return made

"""``treeattn roofline``: how close the attention kernels come to the memory they read."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from treeattn import files, report, roofline
from treeattn.errors import ArgumentError

__all__ = ["command"]


@click.command("roofline")
@click.option("--tokens", default="65536", show_default=True, help="Context length; Ki = 1024.")
@click.option("--dtypes", default=",".join(roofline.DTYPES), show_default=True, metavar="D[,D..]")
@click.option("--groups", default="1,4", show_default=True, metavar="N[,N..]",
              help="Query heads per KV head.")  # fmt: skip
@click.option("--threads", default="1", show_default=True, metavar="N[,N..]")
@click.option("--repeat", type=click.IntRange(1), default=7, show_default=True,
              help="How often limits and attention are run in turn; the best counts.")  # fmt: skip
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write what was measured here.")
def command(tokens: str, dtypes: str, groups: str, threads: str, repeat: int, json_path: Path | None) -> None:
    """Measure decoding steps (one query, 8 KV heads x 128) against what this machine's memory delivers.

    The read rate is measured in the same loop as the attention, so that both see the same machine.
    """
    console = Console(stderr=True)
    write = files.output_writer(json_path)
    measured = roofline.measure(
        _number("--tokens", tokens),
        dtypes.split(","),
        [_number("--groups", part) for part in groups.split(",")],
        [_number("--threads", part) for part in threads.split(",")],
        repeat,
        progress=console.print if sys.stderr.isatty() else lambda _: None,
    )
    measured |= {"cpu": report.cpu_name(), "software": report.software()}
    write(report.as_json(measured))
    table = Table(title=f"{measured['cpu']}, {measured['isa']}", title_justify="left")
    headings = ("dtype", "query heads per KV head", "threads", "µs", "GB/s", "% of read rate", "% of bound")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "dtype" else "right")
    for row in measured["rows"]:
        table.add_row(
            row["dtype"], str(row["group"]), str(row["threads"]), f"{row['microseconds']:.0f}",
            f"{row['gb_s']:.1f}", f"{row['percent_of_read_rate']:.0f}", f"{row['percent_of_bound']:.0f}",
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print(f"read rate of one core: {measured['read_rate_gb_s']:.1f} GB/s, measured between the steps;")
    print("bound: the slower of reading and multiplying, with as many threads")


def _number(option: str, text: str) -> int:
    """A whole number; k = 1000, Ki = 1024, M and Mi likewise."""
    units = {"Ki": 1024, "Mi": 1024**2, "k": 1000, "M": 1000**2}
    for unit, factor in units.items():
        if text.endswith(unit):
            text, times = text.removesuffix(unit), factor
            break
    else:
        times = 1
    if not text.strip().isdecimal():
        raise ArgumentError(f"{option} {text!r}: give a whole number, such as 65536 or 64Ki")
    return int(text) * times

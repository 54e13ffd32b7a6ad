"""``treeattn roofline``: how close the attention kernels come to the memory they read."""

from __future__ import annotations

from typing import Any

import click

from treeattn.cli.options import COUNT, Output, choices, number, numbers, output_options, read
from treeattn.errors import ArgumentError
from treeattn.mpi import launch
from treeattn.report import Column, Progress, Report
from treeattn.study import environment, roofline

_COLUMNS: list[Column[dict[str, Any]]] = [
    Column("dtype"),
    Column("query heads\nper KV head", "group"),
    Column("threads"),
    Column("µs", "microseconds", ".0f"),
    Column("GB/s", "gb_s", ".1f"),
    Column("% of\nread rate", "percent_of_read_rate", ".0f"),
    Column("% of\nbound", "percent_of_bound", ".0f"),
]


@click.command("roofline")
@click.option("--tokens", callback=read(number), default="65536", help="Context length; Ki = 1024.")
@click.option(
    "--dtypes", callback=read(choices(roofline.DTYPES)), default=",".join(roofline.DTYPES), metavar="D[,D..]"
)
@click.option("--groups", callback=read(numbers), default="1,4", metavar="N[,N..]",
              help="Query heads per KV head.")  # fmt: skip
@click.option("--threads", callback=read(numbers), default="1", metavar="N[,N..]")
@click.option("--repeat", type=COUNT, default=7,
              help="How often limits and attention are run in turn; the best counts.")  # fmt: skip
@output_options(json="Write what was measured here.")
def command(
    tokens: int,
    dtypes: tuple[str, ...],
    groups: list[int],
    threads: list[int],
    repeat: int,
    output: Output,
) -> None:
    """Measure decoding steps (one query, 8 KV heads x 128) against what this machine's memory delivers.

    The limit is measured in the same loop as the attention, so that both see the same machine: the read rate.
    On a GPU benchmarks/gpu.py times the kernels.
    """
    if launch.launched_as()[1] > 1:
        raise ArgumentError(
            "roofline measures one process, which others would slow down: start it without mpiexec"
        )
    output.open()
    # Before measuring: it loads the MPI library, which may end the process.
    facts = {"cpu": environment.cpu_name(), "software": environment.software()}
    measured = roofline.measure(tokens, dtypes, groups, threads, repeat, Progress()) | facts
    made = Report(measured)
    made.line(f"{measured['cpu']}, {measured['isa']}")
    made.table(measured["rows"], _COLUMNS)
    made.text(f"read rate of one core: {measured['read_rate_gb_s']:.1f} GB/s, measured between the steps,")
    made.text(f"in the fastest of many ways ({measured['reader']})")
    made.text("bound: the slower of reading and multiplying, with as many threads")
    made.note(launch.outside_job())
    output.report(made)

"""``treeattn roofline``: how close the attention kernels come to the memory they read."""

from __future__ import annotations

from typing import Any

import click

from treeattn.backends.cuda import cupy_runtime
from treeattn.cli.options import COUNT, DEVICE, Output, number, numbers, output_options, read
from treeattn.errors import ArgumentError
from treeattn.mpi import launch
from treeattn.report import Column, Progress, Report
from treeattn.study import environment
from treeattn.study.roofline import cpu as roofline
from treeattn.study.roofline import cuda as roofline_cuda

_CASE: list[Column[dict[str, Any]]] = [Column("dtype"), Column("query heads\nper KV head", "group")]
_CPU = [
    *_CASE,
    Column("threads"),
    Column("µs", "microseconds", ".0f"),
    Column("GB/s", "gb_s", ".1f"),
    Column("% of\nread rate", "percent_of_read_rate", ".0f"),
    Column("% of\nbound", "percent_of_bound", ".0f"),
]
_CUDA = [
    *_CASE,
    Column("tokens"),
    Column("µs", "microseconds", ".1f"),
    Column("host µs", "host_microseconds", ".1f"),
    Column("GB/s", "gb_s", ".0f"),
    Column("% of\ncopy rate", "percent_of_copy_rate", ".0f"),
]


@click.command("roofline")
@DEVICE
@click.option("--tokens", callback=read(number), default="65536", help="Context length; Ki = 1024.")
@click.option("--dtypes", default=",".join(roofline.DTYPES), metavar="D[,D..]")
@click.option("--groups", callback=read(numbers), default="1,4", metavar="N[,N..]",
              help="Query heads per KV head.")  # fmt: skip
@click.option("--threads", callback=read(numbers), metavar="N[,N..]", help="On the CPU only; default 1.")
@click.option("--repeat", type=COUNT,
              help="How often limits and attention are run in turn: default 7, of which the best counts; "
                   "with cuda 21, of which the median counts.")  # fmt: skip
@output_options(wide=False, json="Write what was measured here.")
def command(
    device: str,
    tokens: int,
    dtypes: str,
    groups: list[int],
    threads: list[int] | None,
    repeat: int | None,
    output: Output,
) -> None:
    """Measure decoding steps (one query, 8 KV heads x 128) against what this machine's memory delivers.

    The limit is measured in the same loop as the attention, so that both see the same machine. On the
    CPU it is the read rate. With --device cuda it is the device-to-device copy rate, where a copy
    of n bytes counts as 2n: "% of copy rate" is the bytes of the cache that attention reads per second,
    from a cold L2 cache, against 2n over the time of the copy.
    """
    if launch.launched_as()[1] > 1:
        raise ArgumentError(
            "roofline measures one process, which others would slow down: start it without mpiexec"
        )
    if device == "cuda" and threads is not None:
        raise ArgumentError("--threads is about the CPU: leave it out with --device cuda")
    if device == "cuda" and (problem := cupy_runtime.problem()):
        raise ArgumentError(problem)
    output.open()
    # Before measuring: it loads the MPI library, which may end the process.
    facts = {"cpu": environment.cpu_name(), "software": environment.software()}
    what = tokens, dtypes.split(","), groups
    if device == "cuda":
        made = _of_cuda(roofline_cuda.measure(*what, repeat or 21, progress=Progress()) | facts)
    else:
        made = _of_cpu(roofline.measure(*what, threads or [1], repeat or 7, progress=Progress()) | facts)
    made.note(launch.outside_job())
    output.report(made)


def _of_cpu(measured: dict[str, Any]) -> Report:
    made = Report(measured)
    made.line(f"{measured['cpu']}, {measured['isa']}")
    made.table(measured["rows"], _CPU)
    made.text(f"read rate of one core: {measured['read_rate_gb_s']:.1f} GB/s, measured between the steps,")
    made.text(f"in the fastest of many ways ({measured['reader']})")
    made.text("bound: the slower of reading and multiplying, with as many threads")
    return made


def _of_cuda(measured: dict[str, Any]) -> Report:
    made = Report(measured)
    made.line("{name}, driver {driver}".format(**measured["device"]))
    made.table(measured["rows"], _CUDA)
    rate = measured["copy_rate_gb_s"]
    made.text(f"copy rate: {rate:.0f} GB/s, read and written, measured between the steps,")
    made.text("µs: on the device, with a cold L2 cache; host µs: to launch a planned step")
    return made

"""``treeattn roofline``: how close the attention kernels come to the memory they read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from treeattn import comm, files, launch
from treeattn.backends.cuda import cupy_runtime
from treeattn.cli.console import Lines, console, number, numbers, table
from treeattn.errors import ArgumentError
from treeattn.study import environment
from treeattn.study.roofline import cpu as roofline
from treeattn.study.roofline import cuda as roofline_cuda

__all__ = ["command"]

# Heading -> what a row of the results has there.
_CASE = {"dtype": "{dtype}", "query heads\nper KV head": "{group}"}
_CPU = _CASE | {
    "threads": "{threads}",
    "µs": "{microseconds:.0f}",
    "GB/s": "{gb_s:.1f}",
    "% of\nread rate": "{percent_of_read_rate:.0f}",
    "% of\nbound": "{percent_of_bound:.0f}",
}
_CUDA = _CASE | {
    "tokens": "{tokens}",
    "µs": "{microseconds:.1f}",
    "host µs": "{host_microseconds:.1f}",
    "GB/s": "{gb_s:.0f}",
    "% of\ncopy rate": "{percent_of_copy_rate:.0f}",
}


@click.command("roofline")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--tokens", default="65536", show_default=True, help="Context length; Ki = 1024.")
@click.option("--dtypes", default=",".join(roofline.DTYPES), show_default=True, metavar="D[,D..]")
@click.option("--groups", default="1,4", show_default=True, metavar="N[,N..]",
              help="Query heads per KV head.")  # fmt: skip
@click.option("--threads", default=None, metavar="N[,N..]", help="On the processor only; default 1.")
@click.option("--repeat", type=click.IntRange(1), default=None,
              help="How often limits and attention are run in turn: default 7, of which the best counts; "
                   "with cuda 21, of which the median counts.")  # fmt: skip
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write what was measured here.")
def command(
    device: str,
    tokens: str,
    dtypes: str,
    groups: str,
    threads: str | None,
    repeat: int | None,
    json_path: Path | None,
) -> None:
    """Measure decoding steps (one query, 8 KV heads x 128) against what this machine's memory delivers.

    The limit is measured in the same loop as the attention, so that both see the same machine. On the
    processor it is the read rate. With --device cuda it is the device-to-device copy rate, where a copy
    of n bytes counts as 2n: "% of copy rate" is the bytes of the cache that attention reads per second,
    from a cold L2 cache, against 2n over the time of the copy.
    """
    if comm.launched_as()[1] > 1:
        raise ArgumentError(
            "roofline measures one process, which others would slow down: start it without mpiexec"
        )
    if device == "cuda" and threads is not None:
        raise ArgumentError("--threads is about the processor: leave it out with --device cuda")
    problem = cupy_runtime.problem() if device == "cuda" else None
    if problem is not None:
        raise ArgumentError(problem)
    write = files.output_writer(json_path)
    # Before measuring: it loads the MPI library, which may end the process.
    facts = {"cpu": environment.cpu_name(), "software": environment.software()}
    what = number("--tokens", tokens), dtypes.split(","), numbers("--groups", groups)
    if device == "cuda":
        measured = roofline_cuda.measure(*what, repeat or 21, progress=Lines())
    else:
        counts = numbers("--threads", threads or "1")
        measured = roofline.measure(*what, counts, repeat or 7, progress=Lines())
    measured |= facts
    write(environment.as_json(measured))
    (_show_cuda if device == "cuda" else _show_cpu)(measured)
    if beside := launch.outside_job():
        print(f"note: {beside}")


def _show_cpu(measured: dict[str, Any]) -> None:
    _show(f"{measured['cpu']}, {measured['isa']}", _CPU, measured["rows"])
    print(f"read rate of one core: {measured['read_rate_gb_s']:.1f} GB/s, measured between the steps,")
    print(f"in the fastest of many ways ({measured['reader']})")
    print("bound: the slower of reading and multiplying, with as many threads")


def _show_cuda(measured: dict[str, Any]) -> None:
    _show("{name}, driver {driver}".format(**measured["device"]), _CUDA, measured["rows"])
    print(f"copy rate: {measured['copy_rate_gb_s']:.0f} GB/s, read and written, measured between the steps,")
    print("µs: on the device, with a cold L2 cache; host µs: to launch a planned step")


def _show(title: str, columns: dict[str, str], rows: Sequence[dict[str, Any]]) -> None:
    screen = console()
    screen.print(title)
    table(screen, {heading: partial(str.format_map, cell) for heading, cell in columns.items()}, rows)

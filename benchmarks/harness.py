"""What the benchmarks share: their options, steps that take turns, and results with their machine."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from treeattn.errors import TreeattnError
from treeattn.files import output_writer
from treeattn.mpi import launch
from treeattn.report import as_json
from treeattn.study import environment

Name = TypeVar("Name", bound=Hashable)


def options(about: str | None, *words: str, required: bool = False, **flags: Any) -> argparse.Namespace:
    """The command line's: words, a flag for each keyword, and ``--json FILE``, which may be required.

    A flag is its default, whose type it has; a tuple is given as words with commas between them, False is a
    switch, a type has None for a default, and a dict is what `argparse` takes. ``write(facts)`` of the result
    writes FILE on rank 0, whose place is tried now, before anything is measured; ``asked`` is what JSON takes
    of the flags.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawTextHelpFormatter)
    for word in words:
        parser.add_argument(word)
    for name, flag in flags.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **_argument(flag))
    parser.add_argument("--json", type=Path, required=required, help="write what was found here")
    given = parser.parse_args()
    given.asked = {
        name: ",".join(map(str, one)) if isinstance(flags.get(name), tuple) else one
        for name, one in vars(given).items()
    } | {"json": given.json and str(given.json)}
    given.write = writer(given.json)
    return given


def _argument(flag: Any) -> dict[str, Any]:
    if isinstance(flag, dict):
        return flag
    if flag is False:
        return {"action": "store_true"}
    if isinstance(flag, type):
        return {"type": flag}
    if isinstance(flag, tuple):
        kind = type(flag[0])
        return {"type": lambda words: [kind(word) for word in words.split(",")], "default": list(flag)}
    return {"type": type(flag), "default": flag}


def writer(path: Path | None) -> Callable[[Any], None]:
    """Of JSON into a file, on rank 0; the script ends where it cannot be written."""
    try:
        write = output_writer(None if launch.launched_as()[0] else path)
    except TreeattnError as error:
        stop(error)
    return lambda facts: write(as_json(facts))


def stop(why: object) -> Any:
    """End the script with one line."""
    sys.exit(f"{Path(sys.argv[0]).name}: {why}")


def source(command: str | None = None) -> dict[str, Any]:
    """What a result is of; `command` instead of the words that were given, which name folders."""
    facts = {"software": environment.software(), "cpu": environment.cpu_name()}
    if command is None:
        return facts
    del facts["software"]["command"]
    return {"command": command, **facts}


def machine() -> dict[str, Any]:
    return {
        "cpu": environment.cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg(),
    }


def seconds(
    call: Callable[[], object], calls: int = 1, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Of one call, of so many in a row."""
    began = clock()
    for _ in range(calls):
        call()
    return (clock() - began) / calls


def of_slowest(world: Any, call: Callable[[], object], calls: int = 1) -> float:
    """`seconds` on the rank that takes longest; all begin together. Collective."""
    world.barrier()
    return max(world.allgather(seconds(call, calls)))


def in_turn(
    steps: Mapping[Name, Callable[[], Any]], turns: int, warm: int = 0, shuffled: bool = False
) -> dict[Name, list[Any]]:
    """What each step returns in each turn. In the `warm` turns before, nothing is kept.

    shuffled: in another order each turn, the same on every rank.
    """
    kept: dict[Name, list[Any]] = {name: [] for name in steps}
    for turn in range(warm + turns):
        names = list(steps)
        order = np.random.default_rng(turn).permutation(len(names)) if shuffled else range(len(names))
        for name in (names[at] for at in order):
            took = steps[name]()
            if turn >= warm:
                kept[name].append(took)
    return kept


def timed(
    calls: Mapping[Name, Callable[[], object]],
    turns: int,
    warm: int = 0,
    *,
    each: int = 1,
    scale: float = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Name, list[float]]:
    """`seconds` of calls in turn, of `each` calls in a row, times `scale`."""
    steps = {name: lambda call=call: scale * seconds(call, each, clock) for name, call in calls.items()}
    return in_turn(steps, turns, warm)


def medians(times: Mapping[Name, list[float]]) -> dict[Name, float]:
    return {name: statistics.median(taken) for name, taken in times.items()}


def quartiles(values: Iterable[float]) -> tuple[float, float, float]:
    """The median, and the quartiles below and above it."""
    low, median, high = statistics.quantiles(values, n=4)
    return median, low, high


def show(rows: Iterable[Mapping[str, Any]], before: str = "") -> None:
    """A line for each row: names and values."""
    for row in rows:
        print(before + ", ".join(f"{name} {value}" for name, value in row.items()))


def of_each_isa(isas: Iterable[str], *words: object) -> Iterator[Any]:
    """What this script prints as JSON, with these words and ``--one``, in a process for each instruction
    set."""
    for isa in isas:
        command = [sys.executable, sys.argv[0], "--one", *map(str, words)]
        settings = {**os.environ, "TREEATTN_ISA": isa}
        done = subprocess.run(command, env=settings, capture_output=True, text=True, check=True)
        yield json.loads(done.stdout)

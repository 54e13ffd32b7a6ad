"""Results of measurements: JSON lines, appended one at a time, so that a killed run loses one point at most.

A file holds lines of three kinds; every line has ``kind``, ``format`` (`FORMAT`) and ``run``, the id of the
job that wrote it. Times are microseconds, sizes bytes. Numbers that JSON has no words for are strings.

``run``: once per job, before its points: ``started``; ``software``: Python, platform, packages, MPI library,
git commit, command, and ``isa``, what kernels are compiled for; ``ranks``: host, node, processor and usable
cores of each; ``gpu``: what nvidia-smi says on rank 0's machine; ``environment``: variables that change
times; ``options``; ``clock``: its source, how many ``clocks`` the ranks read, how they were compared and the
largest ``error``; ``warning``: ranks share cores, or None.

``point``: one block of iterations of one scheme:

* ``key``: every parameter, the fields of `Key`. ``launch``, ``repetition``: which block of this key it is.
* ``samples``: name of a series -> one value for each iteration. ``completion``: last exit minus first entry
  on the synchronised clock; ``after_last_entry``: last exit minus last entry; ``slowest``: the longest time
  between a rank's own entry and exit. For ``what="decode"`` also ``local``, ``reduce`` and ``finish``: the
  longest time of each part on any rank. For schedules with ``what="reduce"`` also ``null_merge``: completion
  with merges that do nothing.
* ``plan``, ``first``: the cold values, slowest rank: planning, and the first call after it.
* ``took``: the whole block from planning to checking, slowest rank.
* ``late``: iterations which some rank entered after the agreed instant. ``warmup``: untimed calls before.
* ``clock_error``: half the fastest round trip of the clocks' comparison, worst rank; 0 where all ranks read
  one clock.
* ``determinism``, ``rounds``, ``depth``: of the certificate; "measured" and None where there is none.
* ``same_bits``: whether all ranks held equal results; None where each holds other heads, or there is nothing
  to compare. ``digest``: of the whole result: more than one for a key means other bits in another block.
  ``error_out``, ``error_lse``: largest difference from the float64 reference; ``bound_out``, ``bound_lse``:
  what "exact" allows.
* ``sent``: tier -> [messages, bytes] of all ranks in one step, as handed to MPI; tiers are ``intra`` (within
  a node) and ``inter``. ``scheduled``: the same as the schedule says. None where the library decides.
* ``held``, ``step_peak``: bytes that planning and a first step leave allocated, and that a further step
  adds at its peak, worst rank, as tracemalloc sees them (NumPy's buffers, not the MPI library's); None for
  blocks after the first of a key in a run.

``error``: ``key``, ``launch`` and ``message``: a scheme that could not run there.

`treeattn.study.lines` checks all that is computed with.
"""

from __future__ import annotations

import dataclasses
import fcntl
import math
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from treeattn.errors import ArgumentError
from treeattn.study import environment
from treeattn.study.lines import FLOOR, FORMAT, NULL, checked
from treeattn.study.statistics import Statistics, describe

__all__ = [
    "FLOOR",
    "FORMAT",
    "NULL",
    "Key",
    "Results",
    "Summary",
    "Writer",
    "mixed_versions",
    "read",
    "summarise",
    "version",
]


@dataclass(frozen=True, slots=True)
class Key:
    """Every parameter of a point; two points with one key may be combined.

    what: ``"reduce"``, the reduction alone, or ``"decode"``, the whole step. scheme: as ``scheme=`` takes it,
    or ``"MPI_Allreduce(SUM)"``, the floor: the same bytes through the library's own sum; or ``"null"``:
    nothing, which is the harness's own cost. tokens: context length over all ranks, 0 where it has no part
    (reduce). wire: type of the records under way. skew: each rank enters up to so many microseconds late, at
    random.
    """

    what: str
    scheme: str
    ranks: int
    tokens: int
    batch: int
    queries: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    wire: str = "float32"
    skew: float = 0.0

    @property
    def case(self) -> tuple[Any, ...]:
        """All of it but the scheme; points of one case are compared with one another."""
        return tuple(value for name, value in asdict(self).items() if name != "scheme")


@dataclass(slots=True)
class Results:
    """What `read` found: run id -> run line; point and error lines with a `Key` as key; what is wrong."""

    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    points: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether there was any good line."""
        return bool(self.runs or self.points or self.errors)


@dataclass(frozen=True, slots=True)
class Summary:
    """All blocks of one key and one version. times: series -> statistics, with ``plan`` and ``first`` among
    them; facts: the other fields of a point: of errors and sizes the worst of all blocks, the sum of late
    starts, and ``digests``, every result that some block had."""

    key: Key
    version: str
    launches: int
    times: dict[str, Statistics]
    facts: dict[str, Any]


def read(*paths: str | Path) -> Results:
    """Everything readable in these files. Lines that are not are named in `problems`, and nothing else is
    lost; a file of something else is named once.

    Raises `ArgumentError` for a file that cannot be opened.
    """
    found = Results()
    for path in map(Path, paths):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ArgumentError(f"{path}: cannot be read ({error.strerror})") from None
        lines = [(number, line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]
        before = len(found.problems)
        for number, line in lines:
            _take(found, f"{path}:{number}", line)
        if not content.startswith(b"{") and len(found.problems) - before == len(lines) > 0:
            found.problems[before:] = [f"{path}: is not a file of results; left out"]
    _drop(found, "of a run whose line is missing", lambda point: point["run"] not in found.runs)
    # Copies of a block would make its interval narrower than it is.
    firsts = {_block(point): point for point in reversed(found.points)}
    _drop(found, "measured twice", lambda point: firsts[_block(point)] is not point)
    mixed = mixed_versions(found.runs.values())
    found.problems += [mixed] if mixed else []
    return found


def mixed_versions(runs: Iterable[dict[str, Any]]) -> str | None:
    """The versions of these run lines in words if there are several: their points are kept apart."""
    versions = sorted({version(run) for run in runs})
    return "runs of different versions, kept apart: " + "; ".join(versions) if len(versions) > 1 else None


def _take(found: Results, where: str, line: bytes) -> None:
    try:
        entry = checked(line)
    except ValueError as error:
        found.problems.append(f"{where}: not a result line ({error}); left out")
        return
    if entry["kind"] == "run":
        found.runs[entry["run"]] = entry
        return
    entry["key"] = Key(**{own.name: entry["key"][own.name] for own in dataclasses.fields(Key)})
    {"point": found.points, "error": found.errors}[entry["kind"]].append(entry)


def _block(point: dict[str, Any]) -> tuple[Any, ...]:
    return point["run"], point["key"], point["launch"], point["repetition"]


def _drop(found: Results, why: str, wrong: Callable[[dict[str, Any]], bool]) -> None:
    kept = [point for point in found.points if not wrong(point)]
    if len(kept) < len(found.points):
        found.problems.append(f"{len(found.points) - len(kept)} points {why}: left out")
    found.points = kept


def version(run: dict[str, Any]) -> str:
    """What must be equal for points of two runs to be combined: software, processors, ranks on nodes."""
    software = run["software"]
    layout: dict[int, int] = {}
    for rank in run["ranks"]:
        layout[rank["node"]] = layout.get(rank["node"], 0) + 1
    order = [rank["node"] for rank in run["ranks"]]
    nodes = "+".join(map(str, layout.values())) + ("" if order == sorted(order) else " cyclic")
    processors = " and ".join(sorted({rank["cpu"] for rank in run["ranks"]}))
    revision = (software["git"] or "no git")[:12] + ("+dirty" if "+dirty" in (software["git"] or "") else "")
    package = software["packages"]["treeattn"]
    mpi = " ".join(software["mpi"].split())
    return f"treeattn {package} ({revision}), {mpi}, {processors}, ranks {nodes}"


_OF_A_BLOCK = (
    "kind", "format", "run", "key", "launch", "repetition", "plan", "first", "took", "samples", "digest",
)  # fmt: skip
_WORST = ("error_out", "error_lse", "clock_error", "held", "step_peak")


def summarise(results: Results) -> list[Summary]:
    """One summary for each key and version, in the order of their first points."""
    groups: dict[tuple[Key, str], list[dict[str, Any]]] = {}
    for point in results.points:
        groups.setdefault((point["key"], version(results.runs[point["run"]])), []).append(point)
    return [_summary(key, name, points) for (key, name), points in groups.items()]


def _summary(key: Key, name: str, points: list[dict[str, Any]]) -> Summary:
    series = {name: None for point in points for name in point["samples"]}
    times = {name: describe([point["samples"].get(name, []) for point in points]) for name in series}
    times |= {name: describe([[point[name]] for point in points]) for name in ("plan", "first")}
    wrong = [point for point in points if point["scheduled"] and point["sent"] != point["scheduled"]]
    facts = {name: value for name, value in [*points, *wrong][-1].items() if name not in _OF_A_BLOCK}
    facts |= {name: _worst(points, name, _most) for name in _WORST}
    facts |= {name: _worst(points, name, min) for name in ("bound_out", "bound_lse")}
    held = {point["same_bits"] for point in points}
    facts["same_bits"] = None if held == {None} else False not in held
    facts["digests"] = sorted({point["digest"] for point in points if point["digest"]})
    facts["late"] = sum(point["late"] for point in points)
    return Summary(key, name, len({point["launch"] for point in points}), times, facts)


def _worst(points: list[dict[str, Any]], name: str, choose: Callable[[list[float]], float]) -> float | None:
    known = [float(point[name]) for point in points if point[name] is not None]
    return choose(known) if known else None


def _most(values: list[float]) -> float:
    """The largest; NaN, which compares with nothing, is worse than any."""
    return next(filter(math.isnan, values), max(values))


class Writer:
    """Appends lines to a results file, each on disk before `append` returns. One writer at a time.

    Raises `ArgumentError` if the file cannot be written, or if another run is appending to it.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        try:
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - held until close
        except OSError as error:
            raise self._unwritable(error) from None
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            self._file.close()
            raise ArgumentError(f"{path}: is not an ordinary file; name a file to write")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ArgumentError(
                f"{path}: another run is appending to it; wait for its end or name another file"
            ) from None
        except OSError as error:  # such as a place that knows no locks
            self._file.close()
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> ArgumentError:
        why = error.strerror or error
        return ArgumentError(f"{self._path}: cannot be written ({why}); name another place")

    def _ends_in_mid_line(self) -> bool:
        if not self._file.seek(0, os.SEEK_END):
            return False
        self._file.seek(-1, os.SEEK_END)
        return self._file.read(1) != b"\n"

    def append(self, kind: str, run: str, **entry: Any) -> None:
        """Write one line."""
        if isinstance(entry.get("key"), Key):
            entry["key"] = asdict(entry["key"])
        self._write(environment.as_json_line({"kind": kind, "format": FORMAT, "run": run, **entry}))

    def _write(self, line: bytes) -> None:
        try:
            # A line that a killed run left unfinished must not swallow this one.
            left = memoryview(b"\n" + line if self._ends_in_mid_line() else line)
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._unwritable(error) from None

    def close(self) -> None:
        """Give the file free for others."""
        self._file.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

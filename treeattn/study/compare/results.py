"""Results of measurements: read, kept apart by version, summarised, and appended a line at a time.

`treeattn.study.compare.schema` has the format. Each line is on disk before the next is measured, so a killed
run loses one point at most.
"""

from __future__ import annotations

import fcntl
import lzma
import math
import os
import secrets
import stat
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec

from treeattn.errors import ArgumentError, BackendError, one_line
from treeattn.launch import EMULATED
from treeattn.report import as_json
from treeattn.study.compare.schema import NULL, SUM, Failure, Key, Line, Place, Point, Run
from treeattn.study.statistics import Statistics, describe

#: Iterations that a block should have: with fewer its median moves with every one of them.
ENOUGH = 20
_LINE = msgspec.json.Decoder(Run | Point | Failure)
_NOT_A_LINE = (msgspec.DecodeError, ValueError, RecursionError)
_BEGINNING = b'{"kind":"'
_XZ = b"\xfd7zXZ\0"


@dataclass(slots=True)
class Results:
    """What `read` found: run id -> run; points and errors; what is wrong, in words."""

    runs: dict[str, Run] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    errors: list[Failure] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def version(self, point: Point) -> str:
        """The `version` of a point."""
        return version(self.runs[point.run], point.key.place)

    def used(self) -> list[tuple[Run, Place]]:
        """Each run with each choice of ranks that a point of it used, as `mixed_versions` takes them."""
        found = dict.fromkeys((point.run, point.key.place) for point in self.points)
        return [(self.runs[run], place) for run, place in found]


@dataclass(frozen=True, slots=True)
class Summary:
    """All blocks of one key and one version. times: series -> statistics, with ``plan`` and ``first`` among
    them; facts: the other fields of a point: of errors and sizes the worst of all blocks, the fewest
    iterations of one, the sum of late starts, ``digests``, every result that some block had, and
    ``of_ranks``, medians over blocks."""

    key: Key
    version: str
    launches: int
    times: dict[str, Statistics]
    facts: dict[str, Any]


def content(path: Path) -> bytes:
    """Read a file of results, which ``xz`` may have compressed. Raises `ArgumentError` for one that cannot be
    opened or is cut off."""
    try:
        held = path.read_bytes()
        return lzma.decompress(held) if held.startswith(_XZ) else held
    except lzma.LZMAError as error:
        raise ArgumentError(f"{path}: cannot be decompressed ({error})") from None
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be read ({error.strerror})") from None


def read(*paths: str | Path) -> Results:
    """Everything readable in these files. Lines that are not are named in `problems`, and nothing else is
    lost; a file of something else is named once.

    Raises `ArgumentError` for a file that cannot be opened.
    """
    found = Results()
    for path in map(Path, paths):
        held = content(path)
        lines = [(number, line) for number, line in enumerate(held.split(b"\n"), 1) if line.strip()]
        before = len(found.problems)
        for number, line in lines:
            _take(found, f"{path}:{number}", line)
        if not held.startswith(b"{") and len(found.problems) - before == len(lines) > 0:
            found.problems[before:] = [f"{path}: is not a file of results; left out"]
    _drop(found, "of a run whose line is missing", lambda point: point.run not in found.runs)
    # Copies of a block would make its interval narrower than it is.
    firsts = {_block(point): point for point in reversed(found.points)}
    _drop(found, "measured twice", lambda point: firsts[_block(point)] is not point)
    mixed = mixed_versions(found.used())
    found.problems = list(map(one_line, [*found.problems, *filter(None, [mixed])]))
    return found


def _take(found: Results, where: str, line: bytes) -> None:
    try:
        entry = _LINE.decode(line)
        if isinstance(entry, Point):
            entry.check()
    except _NOT_A_LINE as error:
        found.problems.append(f"{where}: not a result line ({error}); left out")
        return
    if isinstance(entry, Run):
        found.runs[entry.run] = entry
    elif isinstance(entry, Point):
        found.points.append(entry)
    else:
        found.errors.append(entry)


def _block(point: Point) -> tuple[Any, ...]:
    return point.run, point.key, point.launch, point.repetition


def _drop(found: Results, why: str, wrong: Callable[[Point], bool]) -> None:
    kept = [point for point in found.points if not wrong(point)]
    if len(kept) < len(found.points):
        found.problems.append(f"{len(found.points) - len(kept)} points {why}: left out")
    found.points = kept


def version(run: Run, place: Place) -> str:
    """What must be equal for points of two runs to be combined: software, of the ranks that a point used
    their GPUs or processors and how they lie on nodes, and what emulated these."""
    used = run.used(place)
    order = [rank.node for rank in used]
    nodes = "+".join(map(str, Counter(order).values()))
    processors = " and ".join(sorted({rank.gpu or rank.cpu for rank in used}))
    emulated = f" emulated ({made_by})" if (made_by := run.environment.get(EMULATED)) else ""
    return (
        f"{_build(run)}, {processors}, ranks {nodes}{'' if order == sorted(order) else ' cyclic'}{emulated}"
    )


def _build(run: Run) -> str:
    revision = run.software.git or "no git"
    dirty = "+dirty" if "+dirty" in revision else ""
    package, mpi = run.software.packages["treeattn"], " ".join(run.software.mpi.split())
    return f"treeattn {package} ({revision[:12]}{dirty}), {mpi}"


def run_id() -> str:
    """A name for this job that no other has."""
    return f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def mixed_versions(used: Iterable[tuple[Run, Place]]) -> str | None:
    """Says which points are kept apart, of runs that used these ranks; None if nothing is.

    Jobs of several sizes are not mixed: their points have different keys. Software is to be one everywhere.
    """
    builds: set[str] = set()
    by_place: dict[Place, set[str]] = {}
    for run, place in used:
        builds.add(_build(run))
        by_place.setdefault(place, set()).add(version(run, place))
    placed = {name for versions in by_place.values() if len(versions) > 1 for name in versions}
    apart = builds if len(builds) > 1 else placed
    return "runs of different versions, kept apart: " + "; ".join(sorted(apart)) if apart else None


def compared_series(rows: Iterable[Summary]) -> Literal["completion", "after_last_entry"]:
    """The series by which the schemes of a case are compared.

    Completion counts from the first entry, and so holds how far apart ranks entered: what a row that does
    nothing has of it beyond the time from the last entry. Where that is more than a tenth of the fastest
    scheme's completion, schemes are compared from the last entry on.
    """
    everyone = list(rows)
    times = [row.times["completion"].median for row in everyone if row.key.scheme not in (NULL, SUM)]
    spread = [
        row.times["completion"].median - row.times["after_last_entry"].median
        for row in everyone
        if row.key.scheme == NULL
    ]
    late = bool(times and spread) and max(spread) > min(times) / 10
    return "after_last_entry" if late else "completion"


def lacking(rows: Iterable[Summary]) -> str | None:
    """What tables and exports say of blocks with fewer than `ENOUGH` iterations; None where all have them."""
    fewest = min((row.facts["fewest"] for row in rows), default=ENOUGH)
    if fewest >= ENOUGH:
        return None
    more = "give more --iterations, --seconds or --patience"
    return f"as few as {fewest} iterations a block: a median wants {ENOUGH}; {more}"


_FACTS = ("warmup", "determinism", "rounds", "depth", "sent", "scheduled", "estimate")


def summarise(results: Results) -> list[Summary]:
    """One summary for each key and version, in the order of their first points."""
    groups: dict[tuple[Key, str], list[Point]] = {}
    for point in results.points:
        groups.setdefault((point.key, results.version(point)), []).append(point)
    return [_summary(key, name, points) for (key, name), points in groups.items()]


def _summary(key: Key, name: str, points: list[Point]) -> Summary:
    series = dict.fromkeys(name for point in points for name in point.samples)
    times = {name: describe([point.samples.get(name, []) for point in points]) for name in series}
    times |= {name: describe([[getattr(point, name)] for point in points]) for name in ("plan", "first")}
    wrong = [point for point in points if point.scheduled and point.sent != point.scheduled]
    facts: dict[str, Any] = {name: getattr([*points, *wrong][-1], name) for name in _FACTS}
    facts |= {name: _worst(points, name, choose) for name, choose in _WORST.items()}
    held = {point.same_bits for point in points}
    facts["same_bits"] = None if held == {None} else False not in held
    facts["digests"] = sorted({point.digest for point in points if point.digest})
    facts["fewest"] = min(len(point.samples["completion"]) for point in points)
    facts["late"] = sum(point.late for point in points)
    each = [point.of_ranks for point in points if point.of_ranks]
    facts["of_ranks"] = [median(times) for times in zip(*each, strict=True)] if each else None
    return Summary(key, name, len({point.launch for point in points}), times, facts)


def _worst(points: list[Point], name: str, choose: Callable[[list[float]], float]) -> float | None:
    known = [float(value) for value in (getattr(point, name) for point in points) if value is not None]
    return choose(known) if known else None


def _most(values: list[float]) -> float:
    """The largest; NaN, which compares with nothing, is worse than any."""
    return next(filter(math.isnan, values), max(values))


_WORST = dict.fromkeys(("error_out", "error_lse", "clock_error", "held", "step_peak"), _most) | {
    "bound_out": min, "bound_lse": min,
}  # fmt: skip


class Writer:
    """Appends lines to a results file, each on disk before `append` returns. One writer at a time.

    held: what the file held before. What a killed run or a full disk left of a last line is cut off, and
    named there once. Raises `ArgumentError` for a file that cannot be written, to which another run is
    appending, or which holds something else: that one is left as it is.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._new = not self._path.exists()
        try:
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - held until close
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            self._lock()
            if self._path.read_bytes().startswith(_XZ):
                raise ArgumentError(f"{path}: is compressed: decompress it (xz -d), or name another file")
            self.held = read(path)
            self._mend(self._path.read_bytes())
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            raise ArgumentError(f"{self._path}: is not an ordinary file; name a file to write")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArgumentError(
                f"{self._path}: another run is appending to it; wait for its end or name another file"
            ) from None
        except OSError as error:  # such as a place that knows no locks
            raise self._unwritable(error) from None

    def _mend(self, content: bytes) -> None:
        """Let the file end with a whole line."""
        if not self.held.runs and not _BEGINNING.startswith(content[: len(_BEGINNING)]):
            raise ArgumentError(f"{self._path}: is not a file of results; name another, or a new one")
        *lines, last = content.split(b"\n")
        if not last:
            return
        try:
            msgspec.json.decode(last)
        except _NOT_A_LINE:
            self._file.truncate(len(content) - len(last))
            where = f"{self._path}:{len(lines) + 1}: "
            self.held.problems = [
                text.replace("left out", "removed: it was cut short") if text.startswith(where) else text
                for text in self.held.problems
            ]
        else:
            self._write(b"\n")

    def _unwritable(self, error: OSError) -> ArgumentError:
        why = error.strerror or error
        return ArgumentError(f"{self._path}: cannot be written ({why}); name another place")

    def append(self, line: Line) -> None:
        """Write one line."""
        self._write(as_json(msgspec.to_builtins(line), indent=None, separators=(",", ":")))

    def _write(self, line: bytes) -> None:
        try:
            left = memoryview(line)
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            reason = f"{self._path}: cannot be written ({error.strerror}); what it holds is kept"
            raise BackendError(f"{reason}: make room, and the same command goes on from there") from None

    def close(self) -> None:
        """Give the file free for others. One that was made here goes where nothing could be written to it."""
        if self._new and not os.fstat(self._file.fileno()).st_size:
            self._path.unlink(missing_ok=True)
        self._file.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

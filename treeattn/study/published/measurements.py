"""What PICO measured (`data/README.md`): all-reductions of programs whose schedule is one of ours.

A row counts when it ran over the host's MPI library or is PICO's own program, with one rank on each node
and 256 bytes to 1 MiB. PICO's Bine programs are read as well, to fit by: their schedules are our `bine`.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from treeattn.errors import ArgumentError

LEAST, MOST = 256, 1 << 20
ELEMENT = 4  # bytes: PICO sums int32

_NEAR = "reduce_scatter_gather:order=near"

# Name of a program without its suffix -> our scheme. With fewer elements than ranks, Open MPI's ring (which
# PICO copies) and halving fall back on recursive doubling.
_HOST = {"recursive_doubling": "recursive_doubling", "rabenseifner": _NEAR, "ring": "ring"}
_PROGRAMS = {
    **{name + suffix: scheme for suffix in ("_ompi", "_mpich", "_over") for name, scheme in _HOST.items()},
    "default-recursive_doubling": "recursive_doubling",
    "default-ring": "ring",
    "RECDOUB-L-UTOFU-0-1": "recursive_doubling",
    "RECDOUB-B_CONT-UTOFU-0-1": _NEAR,
}
_TO_FIT_BY = {
    "bine_lat_over": "bine",
    "bine_bdw_remap_over": "bine:form=bandwidth",
    "BINE-L-UTOFU-0-1": "bine",
    "BINE-B_CONT-UTOFU-0-1": "bine:form=bandwidth",
}


class Run(NamedTuple):
    """A job: its start time is its name. groups: of each rank, where the allocation is known; shape: of its
    torus."""

    name: str
    ranks: int
    system: str
    library: str
    groups: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()

    @property
    def day(self) -> str:
        """When it ran."""
        return self.name[:10]

    @property
    def family(self) -> str:
        """Whose MPI library it is, whatever the version."""
        return self.library.partition(" ")[0].removeprefix("custom")


class Measurement(NamedTuple):
    """The median time of a program at a size, in microseconds. scheme: whose schedule it runs."""

    run: Run
    algorithm: str
    scheme: str
    bytes: int
    microseconds: float
    predicted: bool  # counts in the score; the others are only fitted

    @property
    def stack(self) -> str:
        """The software below: MPI, or Fugaku's network interface."""
        return "utofu" if "UTOFU" in self.algorithm else "mpi"

    @property
    def preference(self) -> int:
        """The library's own program first, then PICO's over MPI, then others."""
        return 2 if self.stack != "mpi" or not self.predicted else int(self.algorithm.endswith("_over"))


@dataclass(frozen=True)
class Files:
    """Where measurements, allocations and runs are."""

    measurements: Sequence[Any]
    allocations: Sequence[Any] = ()
    runs: Sequence[Any] = ()


_DATA = resources.files(__package__).joinpath("data")
SHIPPED = Files(
    (_DATA.joinpath("pico_collectives.csv.gz"),),
    (_DATA.joinpath("pico_allocations.csv.gz"),),
    (_DATA.joinpath("pico_runs.csv"),),
)


class _Row(msgspec.Struct):
    system: str
    run: str
    nodes: int
    ppn: int
    ranks: int
    library: str
    collective: str
    algorithm: str
    bytes: int
    median_us: float


class _Allocation(msgspec.Struct):
    run: str
    ranks: int
    rank: int
    group: str


class _Job(msgspec.Struct):
    run: str
    ranks: int
    library: str
    device: str
    shape: Annotated[str, msgspec.Meta(pattern=r"^(\d+(x\d+)*)?$")]


_Of = TypeVar("_Of", bound=msgspec.Struct)


def read(files: Files) -> list[Measurement]:
    """All measurements that count, and those to fit by. Raises `ArgumentError` that names file, column and
    remedy."""
    groups, jobs = _groups(files.allocations), [job for _, _, job in _rows(files.runs, _Job)]
    devices = {(job.run, job.ranks, job.library): job.device for job in jobs}
    sides = {(job.run, job.ranks): tuple(map(int, job.shape.split("x"))) for job in jobs if job.shape}
    shapes = {key: shape for key, shape in sides.items() if math.prod(shape) == key[1]}
    found = []
    for path, line, row in _rows(files.measurements, _Row):
        key = row.run, row.ranks
        scheme = _scheme(row.algorithm, row.bytes, row.ranks)
        host = devices.get((*key, row.library), "cpu") == "cpu" and "CUDA" not in row.library
        one_a_node = row.ppn == 1 and row.ranks > 1
        if not (scheme and host and row.collective == "allreduce" and one_a_node):
            continue
        if not LEAST <= row.bytes <= MOST:
            continue
        if not (math.isfinite(row.median_us) and row.median_us > 0):
            raise ArgumentError(
                f"{path}, line {line}: median_us {row.median_us} is no measurement; take it out"
            )
        run = Run(*key, row.system, row.library, groups.get(key, ()), shapes.get(key, ()))
        counts = row.algorithm in _PROGRAMS
        found.append(Measurement(run, row.algorithm, scheme, row.bytes, row.median_us, counts))
    return found


def _scheme(algorithm: str, size: int, ranks: int) -> str | None:
    scheme = _PROGRAMS.get(algorithm) or _TO_FIT_BY.get(algorithm)
    if scheme in ("ring", _NEAR) and size // ELEMENT < ranks:
        return "recursive_doubling"
    return scheme


def _groups(paths: Iterable[Any]) -> dict[tuple[str, int], tuple[str, ...]]:
    """Of each job, the group of every rank."""
    found: defaultdict[tuple[str, int], dict[int, str]] = defaultdict(dict)
    for _, _, row in _rows(paths, _Allocation):
        found[row.run, row.ranks][row.rank] = row.group
    return {
        key: tuple(group for _, group in sorted(ranks.items()))
        for key, ranks in found.items()
        if sorted(ranks) == list(range(key[1]))
    }


def _rows(paths: Iterable[Any], kind: type[_Of]) -> Iterator[tuple[Any, int, _Of]]:
    """Lines of files, plain or gzip, with their numbers."""
    for path in paths:
        reader = csv.DictReader(io.StringIO(_text(path)))
        missing = [name for name in kind.__struct_fields__ if name not in (reader.fieldnames or ())]
        if missing:
            raise ArgumentError(
                f"{path}: no column {missing[0]!r}: it is a file of another kind; the columns are "
                f"{', '.join(kind.__struct_fields__)}"
            )
        for row in reader:
            if None in row or None in row.values():
                raise ArgumentError(
                    f"{path}, line {reader.line_num}: not as many cells as columns; write it again"
                )
            try:
                yield path, reader.line_num, msgspec.convert(row, kind, strict=False)
            except msgspec.ValidationError as error:
                raise ArgumentError(
                    f"{path}, line {reader.line_num}: {error}; whole numbers, a time in µs, a shape as 8x8x8"
                ) from None


def _text(path: Any) -> str:
    try:
        content = (Path(path) if isinstance(path, str) else path).read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        return str(content.decode("utf-8"))
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (EOFError, UnicodeDecodeError, ValueError) as error:
        raise ArgumentError(
            f"{path}: neither CSV nor gzip of CSV ({error}); give a file of measurements"
        ) from None

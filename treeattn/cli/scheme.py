"""Schemes as options name them: names of the catalogue, and schedules of one's own from files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from treeattn import collectives
from treeattn.cli.options import Output
from treeattn.collectives.runtime.communicator import Communicator
from treeattn.collectives.schedule import Schedule
from treeattn.errors import ArgumentError, ScheduleError
from treeattn.mpi.communicators import broadcast_from_root
from treeattn.selection import select

_NAME_LIMIT = 100  # it stands in tables


def is_file(scheme: str) -> bool:
    """Whether an option names a file instead of a scheme."""
    return scheme.endswith((".json", ".xml"))


def build(scheme: str, ranks: int, nodes: Sequence[int] | Sequence[Sequence[int]] | None) -> Schedule:
    """Build the schedule of a scheme of the catalogue. nodes: sizes or ranks, for schemes that need them.

    Raises `ScheduleError` for a scheme that has none.
    """
    selection = select(scheme)
    if selection.row.generator is None:
        known = ", ".join(collectives.names("schedule"))
        raise ScheduleError(
            f"{selection.row.name} is a {selection.row.kind} and has no schedule: take one of {known}"
        )
    return selection.build(ranks, nodes)


def from_file(path: str | Path, ranks: int | None = None, said: str = "this job has") -> Schedule:
    """Read the schedule of a file: JSON of ``treeattn schedule``, or XML of MSCCL.

    ranks: how many it has to be for, and which source `said` so. Its name gets a digest of what it does, by
    which results tell schedules of one name apart. Raises `ArgumentError` for a file that cannot be read or
    is for other ranks, `ScheduleError` for one that holds no schedule.
    """
    try:
        schedule = _read(Path(path))
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ScheduleError(f"{path}: not text") from None
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None
    if not schedule.name.isprintable() or len(schedule.name) > _NAME_LIMIT:
        raise ScheduleError(f"{path}: its name is not one of at most {_NAME_LIMIT} printable characters")
    if ranks not in (None, schedule.size):
        raise ArgumentError(
            f"{path}: size: the schedule is for {schedule.size} ranks, {said} {ranks}: take as many, or make "
            f"one for {ranks} (treeattn tune --ranks {ranks} --out FILE.json)"
        )
    nameless = replace(schedule, name="")
    digest = hashlib.sha256(nameless.to_json().encode()).hexdigest()[:6]
    return replace(schedule, name=f"{schedule.name.partition('@')[0]}@{digest}")


def _read(path: Path) -> Schedule:
    """Read a file of either format. MSCCL's is loaded for who names such a file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".xml":
        from treeattn.collectives.formats import msccl

        return msccl.read(text)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScheduleError(f"not the JSON of a schedule: {error}") from None
    if isinstance(data, dict) and "gpus" in data:
        raise ScheduleError("an execution plan of MSCCL++ is not read: give the algorithm as XML of MSCCL")
    return Schedule.from_json(
        json.dumps(data["schedule"]) if isinstance(data, dict) and "schedule" in data else text
    )


def for_out(output: Output, schemes: Sequence[str | Schedule | None]) -> Sequence[str | Schedule | None]:
    """Return the schemes, of which ``--out`` takes the result of one. Raises `ArgumentError`."""
    if output.out is not None and len(schemes) > 1:
        raise ArgumentError("--out takes the result of one scheme: name one with --scheme")
    return schemes


def given(world: Communicator, names: str, on_all: bool = True) -> list[str | Schedule]:
    """Read a list of schemes, names in their one spelling; rank 0 reads the files. Collective.

    on_all: schedules have to be for all ranks of the job. Raises `ArgumentError` or `ScheduleError`, on
    every rank alike.
    """

    def read() -> list[str | Schedule]:
        items = [name.strip() for name in names.split(",")]
        ranks = world.size if on_all else None
        return [from_file(name, ranks) if is_file(name) else select(name).text for name in items]

    return broadcast_from_root(world, read, "the schemes that rank 0 reads")

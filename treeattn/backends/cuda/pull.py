"""Records of a node's GPUs, reduced out of one another's memory by one kernel; where messages of other nodes
come in between, by several launches of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from treeattn.backends.cuda.runtime import Runtime, planned_launch, structure
from treeattn.collectives.program import (
    LANDING,
    OWN,
    Await,
    Copy,
    Fold,
    Instruction,
    Program,
    Publish,
    Recv,
    Region,
    Send,
)
from treeattn.errors import RestrictionError
from treeattn.partial import Array

# Instruction, Source, InMemory, InParameters, PullArguments, Operation, LANDED and MAX_SOURCES of
# kernels/cuda/pull_partials.cu.
_INSTRUCTION = structure("", "", "operation round first stop place source sources")
_SOURCE = structure("", "", "rank place")
_IN_MEMORY = structure("program sources windows", "", "")
_IN_PARAMETERS = np.dtype(
    [("windows", "u8", 16), ("program", _INSTRUCTION, 32), ("sources", _SOURCE, 128)], align=True
)


def _arguments(tables: np.dtype[Any]) -> np.dtype[Any]:
    common = structure(
        "records landed steps late out lse",
        "header limit",
        "instructions numbers ends count set width rank heads queries",
    )
    fields = [(name, common[name]) for name in common.names or ()]
    return np.dtype([*fields, ("tables", tables)], align=True)


# Where a program lies -> the arguments with it. It is in the parameters where it fits.
_KINDS = {"InParameters": _arguments(_IN_PARAMETERS), "InMemory": _arguments(_IN_MEMORY)}
_COPY, _ANNOUNCE, _AWAIT, _PULL = range(4)
_LANDED, _MAX_SOURCES = -1, 128
# A number for each block stands at the head of a window, on every rank: that many blocks may come.
_MAX_BLOCKS = 256
_HEADER = 8 * _MAX_BLOCKS
_WITHOUT_END = (1 << 63) - 1


def resident_blocks(records: int, runtime: Runtime) -> int:
    """Blocks of a launch over so many records: one on a multiprocessor at most, so that all run at once."""
    return min(records, runtime.multiprocessors, _MAX_BLOCKS)


def window_bytes(program: Program, width: int) -> int:
    """Bytes of the memory that each rank exposes: numbers, and two sets of slots of float32 records."""
    return _HEADER + 2 * program.slots * width * 4


class PlannedPull:
    """One launch for each part of a program, over arrays and windows that never move. The number of a step is
    kept on the device: a CUDA graph may hold the launches."""

    def __init__(
        self,
        records: Array,
        program: Program,
        windows: list[int],
        seconds: float,
        blocks: int,
        *,
        runtime: Runtime,
    ) -> None:
        """records: C-contiguous float32 [records, width]. The rest as `operator.OneSidedOperator` has it."""
        tables = _Tables(program, len(records))
        count, width = records.shape
        #: [program.landing, width]: where messages land.
        self.landed = runtime.empty((program.landing, width), np.float32)
        self._late = runtime.pinned((1,), np.int64)
        self._late[0] = 0
        steps = _on_device(np.zeros(blocks, np.int64), runtime)
        common = {
            "records": runtime.address(records),
            "landed": runtime.address(self.landed),
            "steps": runtime.address(steps),
            "late": self._late.ctypes.data,  # page-locked memory has one address for host and devices
            "header": _HEADER,
            "limit": _WITHOUT_END if seconds == math.inf else int(min(seconds, 1e9) * 1e9),
            "numbers": program.rounds + 1,
            "rank": program.rank,
            "count": count,
            "set": program.slots,
            "width": width,
        }
        self._runtime, self._blocks = runtime, blocks
        self._arrays = (records, self.landed, self._late, steps)
        self._launches: list[Any] = []
        for part in tables.parts:
            here = tables.instructions[part.start : part.stop]
            numbers = {"instructions": len(part), "ends": part is tables.parts[-1]}
            given = {"windows": windows, "program": here, "sources": tables.sources}
            self._launches.append(self._planned(common | numbers, given))
        runtime.synchronize()  # a step may run on another stream than this

    def _planned(self, common: dict[str, Any], tables: dict[str, Any]) -> Callable[[], object]:
        fit = all(len(table) <= _IN_PARAMETERS[name].shape[0] for name, table in tables.items())
        kind = "InParameters" if fit else "InMemory"
        arguments, arrays = np.zeros(1, _KINDS[kind]), list(self._arrays)
        for name, value in common.items():
            arguments[name] = value
        for name, table in tables.items():
            if fit:
                arguments["tables"][name][0, : len(table)] = table
                continue
            arrays.append(_on_device(np.asarray(table, _IN_PARAMETERS[name].base), self._runtime))
            arguments["tables"][name] = self._runtime.address(arrays[-1])
        # The last launch counts the step, and spoils what messages brought last where an earlier one gave up.
        blocks = self._blocks if common["instructions"] or common["ends"] else 0
        kernel = self._runtime.kernel("pull_partials", f"pull_partials<{kind}>")
        return planned_launch(kernel, blocks, arguments, tuple(arrays))

    def __call__(self, part: int = 0) -> None:
        """Queue one part of the program."""
        self._launches[part]()

    def fuse_epilogue(self, work: Any) -> Callable[[], object] | None:
        """A step and the `planned_finish` of its records in one launch; None where a step is not one."""
        first = self._launches[0]
        if len(self._launches) > 1 or not first.arguments["instructions"]:
            return None
        arguments = first.arguments.copy()
        for name in ("out", "lse", "heads", "queries"):
            arguments[name] = work.arguments[name]
        return planned_launch(first.func, self._blocks, arguments, (*first.arrays, *work.arrays))

    def timed_out_peer(self) -> tuple[int, int] | None:
        """(rank, round) that did not come in time; None where there is none."""
        code = int(self._late[0])
        return ((code & 0xFFFFFFFF) - 1, code >> 32) if code else None


class _Tables:
    """A program as the kernel reads it, in the parts that are launches of their own.

    The kernel waits for what it gets: of the program's own waits it sees those for readers, and messages of
    other nodes cut it. Raises `RestrictionError`.
    """

    def __init__(self, program: Program, records: int) -> None:
        self._program, self._records = program, records
        self._rows: list[tuple[int, ...]] = []
        self._sources: list[tuple[int, int]] = []
        self._published = [records, 0]  # records first .. stop - 1 that were copied since the last round
        cuts = [0]
        for _, instructions in program.by_round:
            for instruction in instructions:
                self._add(instruction)
                if isinstance(instruction, Await) and any(isinstance(i, Send | Recv) for i in instructions):
                    cuts.append(len(self._rows))
        self.parts = [range(*ends) for ends in pairwise([*cuts, len(self._rows)])]
        self.instructions = np.array(self._rows, _INSTRUCTION)
        self.sources = np.array(self._sources, _SOURCE)

    def _add(self, i: Instruction) -> None:
        everything = 0, self._records
        if isinstance(i, Publish):
            self._row(_ANNOUNCE, i.round, *(self._published if i.round else everything))
            self._published = [self._records, 0]
        elif isinstance(i, Await) and i.steps_ago:
            round_ = i.round - i.steps_ago * (self._program.rounds + 1)
            self._row(_AWAIT, round_, *everything, sources=[Region(rank, 0, 0) for rank in i.ranks])
        elif isinstance(i, Copy) and i.into.buffer != OWN:
            first, stop = i.source.first, i.source.stop
            self._published = [min(first, self._published[0]), max(stop, self._published[1])]
            self._row(_COPY, i.round, first, stop, i.into.first)
        elif isinstance(i, Copy | Fold):
            sources = [i.source] if isinstance(i, Copy) else i.sources
            self._row(_PULL, i.round, i.into.first, i.into.stop, sources=sources)

    def _row(
        self,
        operation: int,
        round_: int,
        first: int,
        stop: int,
        place: int = 0,
        sources: Sequence[Region] = (),
    ) -> None:
        if len(sources) > _MAX_SOURCES:
            raise RestrictionError(
                f"round {round_} folds {len(sources)} ranks at once, transport='peer' {_MAX_SOURCES}: "
                "take a scheme with fewer messages to one rank, such as recursive_doubling"
            )
        self._rows.append((operation, round_, first, stop, place, len(self._sources), len(sources)))
        ranks = {OWN: self._program.rank, LANDING: _LANDED}
        self._sources += [(ranks.get(source.buffer, source.buffer), source.first) for source in sources]


def _on_device(array: Array, runtime: Runtime) -> Any:
    """A copy of the array on the device."""
    raw = array.view(np.uint8)
    moved = runtime.empty(raw.shape, np.uint8)
    runtime.upload(moved, raw)
    return moved

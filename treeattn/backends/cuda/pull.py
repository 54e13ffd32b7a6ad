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
    Region,
    messages,
)
from treeattn.errors import RestrictionError

__all__ = ["PlannedPull", "resident_blocks", "window_bytes"]

# Instruction, Source, PullArguments, Operation, LANDED and MAX_SOURCES of kernels/cuda/pull_partials.cu.
_INSTRUCTION = structure("", "", "operation round first stop place source sources")
_SOURCE = structure("", "", "rank place")
_ARGUMENTS = structure(
    "records landed program sources windows steps late out lse",
    "header limit",
    "instructions numbers ends count set width rank heads queries",
)
_COPY, _ANNOUNCE, _AWAIT, _PULL = range(4)
_LANDED, _MAX_SOURCES = -1, 128
# A number for each block stands at the head of a window, on every rank: that many blocks may come.
_MAX_BLOCKS = 256
_HEADER = 8 * _MAX_BLOCKS
_WITHOUT_END = (1 << 63) - 1


def resident_blocks(records: int, runtime: Runtime) -> int:
    """Of a launch over so many records: one on a multiprocessor at most, so that all run at once."""
    return min(records, runtime.multiprocessors, _MAX_BLOCKS)


def window_bytes(program: Program, width: int) -> int:
    """Of the memory that each rank exposes: numbers, and two sets of slots of float32 records."""
    return _HEADER + 2 * program.slots * width * 4


class PlannedPull:
    """One launch for each part of a program, over arrays and windows that never move. The number of a step is
    kept on the device: a CUDA graph may hold the launches."""

    def __init__(
        self,
        records: Any,
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
        host = {
            "program": tables.instructions,
            "sources": tables.sources,
            "windows": np.array(windows, np.uint64),
            "steps": np.zeros(blocks, np.int64),
        }
        arrays = {name: _on_device(array, runtime) for name, array in host.items()}
        self._late = runtime.pinned((1,), np.int64)
        self._late[0] = 0
        arguments = np.zeros(1, _ARGUMENTS)
        for name, array in {"records": records, "landed": self.landed, **arrays}.items():
            arguments[name] = runtime.address(array)
        arguments["late"] = self._late.ctypes.data  # page-locked memory has one address for host and devices
        arguments["header"] = _HEADER
        arguments["limit"] = _WITHOUT_END if seconds == math.inf else int(min(seconds, 1e9) * 1e9)
        arguments["numbers"], arguments["rank"] = program.rounds + 1, program.rank
        arguments["count"], arguments["set"], arguments["width"] = count, program.slots, width
        self._kernel, self._blocks = runtime.kernel("pull_partials", "pull_partials"), blocks
        self._arrays = (records, self.landed, self._late, *arrays.values())
        of_parts = [_of_part(arguments, part, part is tables.parts[-1]) for part in tables.parts]
        self._arguments = of_parts[0]
        self._launches = list(map(self._planned, of_parts))
        runtime.synchronize()  # a step may run on another stream than this

    def _planned(self, arguments: Any, *others: Any) -> Callable[[], object]:
        """others: arrays that the arguments point into, beside those that all of them do."""
        # The last launch counts the step, and spoils what messages brought last where an earlier one gave up.
        blocks = self._blocks if arguments["instructions"] or arguments["ends"] else 0
        return planned_launch(self._kernel, blocks, arguments, (*self._arrays, *others))

    def __call__(self, part: int = 0) -> None:
        """Queue one part of the program."""
        self._launches[part]()

    def fuse_epilogue(self, work: Any) -> Callable[[], object] | None:
        """A step and the `PlannedFinish` of its records in one launch; None where a step is not one."""
        if len(self._launches) > 1 or not self._arguments["instructions"]:
            return None
        arguments = self._arguments.copy()
        for name in ("out", "lse", "heads", "queries"):
            arguments[name] = work.arguments[name]
        return self._planned(arguments, *work.arrays)

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
        for _, instructions in program.by_round():
            for instruction in instructions:
                self._add(instruction)
                if isinstance(instruction, Await) and any(messages(instructions)):
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


def _of_part(arguments: Any, part: range, ends: bool) -> Any:
    """Those of one launch."""
    arguments = arguments.copy()
    arguments["program"] += part.start * _INSTRUCTION.itemsize
    arguments["instructions"], arguments["ends"] = len(part), ends
    return arguments


def _on_device(array: Any, runtime: Runtime) -> Any:
    """A copy there."""
    raw = array.view(np.uint8)
    moved = runtime.empty(raw.shape, np.uint8)
    runtime.upload(moved, raw)
    return moved

"""Records of a node's GPUs, reduced out of one another's memory by one kernel; where messages of other nodes
come in between, by several launches of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from treeattn.backends.cuda.runtime import Runtime, planned_launch, structure
from treeattn.collectives.pulls import Program
from treeattn.errors import RestrictionError

__all__ = ["PlannedPull", "resident_blocks", "window_bytes"]

# Instruction, Source and PullArguments of kernels/cuda/pull_partials.cu, and its MAX_SOURCES.
_INSTRUCTION = structure("", "", "operation round first stop place source sources")
_SOURCE = structure("", "", "rank place")
_PULL = structure(
    "records landed program sources windows steps late out lse",
    "header limit",
    "instructions numbers ends count set width rank heads queries",
)
_MAX_SOURCES = 128
# A number for each block stands at the head of a window, on every rank: that many blocks may come.
_MAX_BLOCKS = 256
_HEADER = 8 * _MAX_BLOCKS
_WITHOUT_END = (1 << 63) - 1


def resident_blocks(records: int, runtime: Runtime) -> int:
    """Of a launch over so many records: one on a multiprocessor at most, so that all run at once."""
    return min(records, runtime.multiprocessors, _MAX_BLOCKS)


def window_bytes(program: Program, width: int) -> int:
    """Of the memory that each rank exposes: numbers, and two sets of slots of float32 records."""
    return _HEADER + 2 * program.set * width * 4


class PlannedPull:
    """One launch for each part of a program, over arrays and windows that never move. The number of a step is
    kept on the device: a CUDA graph may hold the launches."""

    def __init__(
        self,
        records: Any,
        program: Program,
        rank: int,
        windows: list[int],
        seconds: float,
        blocks: int,
        *,
        runtime: Runtime,
    ) -> None:
        """records: C-contiguous float32 [records, width]. The rest as `operator.PullingOperator` has it."""
        instructions, sources = _tables(program)
        count, width = records.shape
        #: [program.landing, width]: where messages land.
        self.landed = runtime.empty((program.landing, width), np.float32)
        host = {
            "program": instructions,
            "sources": sources,
            "windows": np.array(windows, np.uint64),
            "steps": np.zeros(blocks, np.int64),
        }
        arrays = {name: _on_device(array, runtime) for name, array in host.items()}
        self._late = runtime.pinned((1,), np.int64)
        self._late[0] = 0
        arguments = np.zeros(1, _PULL)
        for name, array in {"records": records, "landed": self.landed, **arrays}.items():
            arguments[name] = runtime.address(array)
        arguments["late"] = self._late.ctypes.data  # page-locked memory has one address for host and devices
        arguments["header"] = _HEADER
        arguments["limit"] = _WITHOUT_END if seconds == math.inf else int(min(seconds, 1e9) * 1e9)
        arguments["numbers"], arguments["rank"] = program.numbers, rank
        arguments["count"], arguments["set"], arguments["width"] = count, program.set, width
        self._kernel, self._blocks = runtime.kernel("pull_partials", "pull_partials"), blocks
        self._arrays = (records, self.landed, self._late, *arrays.values())
        last = max((part.stop for part in program.parts if part), default=0)
        of_parts = [_of_part(arguments, part, part.stop == last) for part in program.parts]
        self._arguments = of_parts[0]
        self._launches = list(map(self._planned, of_parts))
        runtime.synchronize()  # a step may run on another stream than this

    def _planned(self, arguments: Any, *others: Any) -> Callable[[], object]:
        """others: arrays that the arguments point into, beside those that all of them do."""
        blocks = self._blocks if arguments["instructions"] else 0
        return planned_launch(self._kernel, blocks, arguments, (*self._arrays, *others))

    def __call__(self, part: int = 0) -> None:
        """Queue one part of the program."""
        self._launches[part]()

    def followed_by(self, work: Any) -> Callable[[], object] | None:
        """A step and the `PlannedFinish` of its records in one launch; None where a step is not one."""
        if len(self._launches) > 1 or not self._arguments["instructions"]:
            return None
        arguments = self._arguments.copy()
        for name in ("out", "lse", "heads", "queries"):
            arguments[name] = work.arguments[name]
        return self._planned(arguments, *work.arrays)

    def late(self) -> tuple[int, int] | None:
        """(rank, round) that was waited for in vain; None where there is none."""
        code = int(self._late[0])
        return ((code & 0xFFFFFFFF) - 1, code >> 32) if code else None


def _tables(program: Program) -> tuple[Any, Any]:
    """The program as the kernel reads it. Raises `RestrictionError`."""
    sources = [source for instruction in program.instructions for source in instruction.sources]
    table = np.zeros(len(program.instructions), _INSTRUCTION)
    first = 0
    for row, instruction in enumerate(program.instructions):
        count = len(instruction.sources)
        if count > _MAX_SOURCES:
            raise RestrictionError(
                f"round {instruction.round} folds {count} ranks at once, transport='peer' {_MAX_SOURCES}: "
                "take a scheme with fewer messages to one rank, such as recursive_doubling"
            )
        table[row] = (*instruction[:5], first, count)
        first += count
    return table, np.array(sources, _SOURCE)


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

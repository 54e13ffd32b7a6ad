"""MSCCL's XML: thread blocks of steps that send, receive and reduce chunks of input, output and scratch.

Read as MSCCL's interpreter runs it: the steps of a thread block in order, a step with ``depid`` after step
``deps`` of that thread block, messages of a connection (sender, receiver, channel) in the order of sending.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from treeattn.collectives.formats.buffers import BufferProgram, Cell, Operation
from treeattn.collectives.parameters import RANK_LIMIT
from treeattn.collectives.schedule import Result, Schedule
from treeattn.errors import ScheduleError

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

_RESULTS: dict[str, Result] = {
    "allreduce": "replicated",
    "reduce": "root",
    "reducescatter": "scattered",
    "reduce_scatter": "scattered",
}
# What each type of step does: receive, load its source, add to its target, store there, send.
_TYPES = {
    "s": "load send", "r": "receive store", "rcs": "receive store send", "rrc": "receive load store",
    "rrs": "receive load send", "rrcs": "receive load store send", "cpy": "load store",
    "re": "add load store", "nop": "",
}  # fmt: skip


class _Step(NamedTuple):
    operation: int
    does: list[str]
    source: list[Cell]
    target: list[Cell]


def read(text: str) -> Schedule:
    """The schedule of an algorithm. Raises `ScheduleError` that names what cannot be read or is wrong."""
    from xml.etree import ElementTree  # only here: every command has this file, few read XML

    try:
        algorithm = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ScheduleError(f"not XML: {error}") from None
    if algorithm.tag != "algo":
        raise ScheduleError(f"not the XML of MSCCL: <{algorithm.tag:.20}> stands where <algo> should")
    return _Reader(algorithm).schedule()


class _Reader:
    def __init__(self, algorithm: Element) -> None:
        self.algorithm = algorithm
        collective = algorithm.get("coll", "")
        if collective not in _RESULTS:
            raise ScheduleError(f"coll={collective!r:.30} is no reduction: known are {', '.join(_RESULTS)}")
        self.result = _RESULTS[collective]
        self.size = _number(algorithm, "ngpus", 1)
        self.in_place = bool(_number(algorithm, "inplace", default=1))
        self.operations: list[Operation] = []
        self.steps: dict[tuple[int, int, int], int] = {}  # gpu, thread block, step -> operation
        self.posted: set[int] = set()  # operations that others may wait for
        self.moving: list[_Step] = []
        # by sender, receiver, channel: receptions and sends
        self.messages: defaultdict[tuple[int, int, int], tuple[list[_Step], list[_Step]]]
        self.messages = defaultdict(lambda: ([], []))
        self.blocks: dict[tuple[str, int, int, int], str] = {}  # a direction of a connection -> thread block

    def schedule(self) -> Schedule:
        gpus = self.algorithm.findall("gpu")
        self.room = {
            (_number(gpu, "id"), buffer): _number(gpu, f"{buffer}_chunks", default=0)
            for gpu in gpus
            for buffer in "ios"
        }
        if sorted(_number(gpu, "id") for gpu in gpus) != list(range(self.size)):
            raise ScheduleError(f"ngpus={self.size}, but the gpus are not 0 to {self.size - 1}, once each")
        self.chunks = max(_number(gpu, "i_chunks") for gpu in gpus)
        if self.chunks < 1 or (self.result == "scattered" and self.chunks != self.size):
            raise ScheduleError(f"i_chunks={self.chunks} does not suit coll={self.algorithm.get('coll')}")
        waits = [self._block(gpu, block) for gpu in gpus for block in gpu.findall("tb")]
        for operation, wanted in (pair for found in waits for pair in found):
            if wanted not in self.steps or self.steps[wanted] not in self.posted:
                gpu, block, step = wanted
                raise ScheduleError(
                    f"{self.operations[operation].named} waits for step {step} of tb {block} in gpu {gpu}, "
                    "which is not there or has no hasdep"
                )
            self.operations[operation].after.append(self.steps[wanted])
        self._connect()
        name = self.algorithm.get("name") or "msccl"
        made = Schedule(name, self.size, self.chunks, (), self.result)
        return BufferProgram(self.operations, made, self.in_place).schedule()

    def _block(self, gpu: Element, block: Element) -> list[tuple[int, tuple[int, int, int]]]:
        rank, number, waits = _number(gpu, "id"), _number(block, "id"), []
        for at, step in enumerate(block.findall("step")):
            named = f"gpu {rank}, tb {number}, step {at}"
            kind = step.get("type", "")
            if _number(step, "s") != at:
                raise ScheduleError(f"{named}: it is numbered s={step.get('s')}")
            if kind not in _TYPES:
                raise ScheduleError(
                    f"{named}: type={kind!r:.20} cannot be read: known are {', '.join(_TYPES)}"
                )
            if (rank, number, at) in self.steps:
                raise ScheduleError(f"{named}: its thread block is there twice")
            here = self.steps[rank, number, at] = len(self.operations)
            self.operations.append(Operation(rank, named, [here - 1] if at else []))
            if _number(step, "hasdep", default=0):
                self.posted.add(here)
            if _number(step, "depid", -1, -1) >= 0:
                waits.append((here, (rank, _number(step, "depid"), _number(step, "deps"))))
            if kind != "nop":
                self._add(rank, block, step, here)
        return waits

    def _add(self, rank: int, block: Element, step: Element, here: int) -> None:
        does = _TYPES[step.get("type", "")].split()
        made = _Step(here, does, self._cells(rank, step, "src"), self._cells(rank, step, "dst"))
        self.moving.append(made)
        for direction, attribute in (("send", "send"), ("receive", "recv")):
            if direction in does:
                peer, channel = _number(block, attribute, -1, -1), _number(block, "chan", default=0)
                if not 0 <= peer < self.size or peer == rank:
                    named = self.operations[here].named
                    raise ScheduleError(f"{named}: its thread block has {attribute}={peer}, no other gpu")
                ends = (rank, peer, channel) if direction == "send" else (peer, rank, channel)
                if self.blocks.setdefault((direction, *ends), block.get("id", "")) != block.get("id", ""):
                    raise ScheduleError(
                        f"gpu {rank}: two thread blocks {direction} on channel {channel} with gpu {peer}"
                    )
                self.messages[ends][direction == "send"].append(made)

    def _cells(self, rank: int, step: Element, end: str) -> list[Cell]:
        buffer, first = step.get(f"{end}buf", "i"), _number(step, f"{end}off", default=0)
        if buffer not in ("i", "o", "s"):
            raise ScheduleError(f"{end}buf={buffer!r:.20} is none of i, o, s")
        buffer = "i" if buffer == "o" and self.in_place else buffer
        end_at = first + _number(step, "cnt", 1, default=1)
        if end_at > self.room[rank, buffer]:
            raise ScheduleError(f"gpu {rank}: {buffer}[{end_at - 1}] is beyond its {buffer}_chunks")
        return [Cell(rank, buffer, k) for k in range(first, end_at)]

    def _connect(self) -> None:
        """Match the n-th send of each connection with its n-th receive, and say what is written."""
        arriving: dict[int, list[Cell]] = {}
        leaving: dict[int, list[Cell]] = {}
        for (src, dst, channel), (received, sent) in self.messages.items():
            if len(sent) != len(received):
                raise ScheduleError(
                    f"gpu {src} sends {len(sent)} messages to gpu {dst} on channel {channel}, which receives "
                    f"{len(received)}"
                )
            for number, (sender, receiver) in enumerate(zip(sent, received, strict=True)):
                if len(sender.source) != len(receiver.target):
                    named = self.operations[receiver.operation].named
                    raise ScheduleError(
                        f"{named} receives {len(receiver.target)} chunks of {len(sender.source)}"
                    )
                buffer = f"message {number} from {src} on channel {channel} "
                cells = [Cell(dst, buffer, k) for k in range(len(sender.source))]
                leaving[sender.operation] = arriving[receiver.operation] = cells
                self.operations[receiver.operation].after.append(sender.operation)
        for operation, does, source, target in self.moving:
            came, goes = arriving.get(operation, []), leaving.get(operation, [])
            for k in range(len(source)):
                parts = [target[k]] * ("add" in does) + [source[k]] * ("load" in does) + came[k : k + 1]
                if "store" in does:
                    self.operations[operation].writes.append((target[k], tuple(parts)))
                    parts = [target[k]]
                if goes:
                    self.operations[operation].writes.append((goes[k], tuple(parts)))


def _number(element: Element, name: str, low: int = 0, default: int | None = None) -> int:
    value = element.get(name, default)
    try:
        number = int(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = low - 1
    if not low <= number <= RANK_LIMIT:
        raise ScheduleError(
            f"<{element.tag}> has {name}={value!r:.20}: a whole number of at least {low} is needed"
        )
    return number

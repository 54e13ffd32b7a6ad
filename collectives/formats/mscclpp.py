"""MSCCL++ execution plans: thread blocks that write to, read from and signal other GPUs.

Read as its executor runs them: operations of a thread block are ordered by a ``nop`` between them alone, the
n-th wait of a channel ends after the n-th signal of its other end, a ``barrier`` holds thread blocks until
all are there.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from treeattn.collectives.formats.buffers import BufferProgram, Cell, Operation
from treeattn.collectives.parameters import RANK_LIMIT
from treeattn.collectives.schedule import Result, Schedule
from treeattn.errors import ScheduleError

_RESULTS: dict[str, Result] = {"allreduce": "replicated", "reducescatter": "scattered"}
_MOVES = ("put", "get", "copy")
_REDUCES = ("re", "rre", "res", "rres")  # the source is added to, others' too, and the sum is passed on
_SIGNALS = {"signal": True, "wait": False}
_KNOWN = ("nop", "barrier", *_SIGNALS, *_MOVES, "pws", "pwsf", "flush", *_REDUCES)


def read(plan: dict[str, Any]) -> Schedule:
    """The schedule of a plan, as JSON is read. Raises `ScheduleError` that names what cannot be read or is
    wrong."""
    try:
        return _Reader(plan).schedule()
    except ScheduleError:
        raise
    except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
        raise ScheduleError(
            f"not an execution plan of MSCCL++: {type(error).__name__} {error!s:.80}"
        ) from None


class _Reader:
    def __init__(self, plan: dict[str, Any]) -> None:
        if plan["collective"] not in _RESULTS:
            known = ", ".join(_RESULTS)
            raise ScheduleError(f"collective {plan['collective']!r:.30} is no reduction: known are {known}")
        self.plan, self.result, self.in_place = plan, _RESULTS[plan["collective"]], bool(plan["inplace"])
        self.gpus: list[dict[str, Any]] = sorted(plan["gpus"], key=lambda gpu: int(gpu["id"]))
        self.size = len(self.gpus)
        if [gpu["id"] for gpu in self.gpus] != list(range(self.size)) or not self.size:
            raise ScheduleError("the gpus are not numbered from 0, once each")
        self.chunks = _whole(self.gpus[0]["input_chunks"])
        if not self.chunks or (self.result == "scattered" and self.chunks != self.size):
            raise ScheduleError(f"input_chunks {self.chunks} does not suit a {plan['collective']}")
        self.operations: list[Operation] = []
        # by sender, receiver, type and number of the channel among those: signals and waits
        self.signals: defaultdict[tuple[int, int, str, int], tuple[list[int], list[int]]]
        self.signals = defaultdict(lambda: ([], []))
        self.barriers: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
        self.expected: dict[tuple[int, int], int] = {}

    def schedule(self) -> Schedule:
        for gpu in self.gpus:
            for block in gpu["threadblocks"]:
                self._block(gpu, block)
        self._connect()
        program = BufferProgram(self.operations, self.size, self.chunks, self.result, self.in_place)
        return program.schedule(str(self.plan["name"]))

    def _block(self, gpu: dict[str, Any], block: dict[str, Any]) -> None:
        rank, fence, since = gpu["id"], list[int](), list[int]()
        for at, op in enumerate(block["ops"]):
            kind = op["name"]
            named = f"gpu {rank}, thread block {block['id']}, operation {at} ({kind})"
            if kind not in _KNOWN:
                raise ScheduleError(f"{named} cannot be read: known are {', '.join(_KNOWN)}")
            orders = kind in ("nop", "barrier")
            here = len(self.operations)
            self.operations.append(Operation(rank, named, [*fence, *since] if orders else [*fence]))
            fence, since = ([here], []) if orders else (fence, [*since, here])
            if kind == "barrier":
                barrier = (rank, _whole(op["barrier_id"]))
                self.expected[barrier] = _whole(op["num_threadblocks"])
                done = sum(o.get("barrier_id") == barrier[1] for o in block["ops"][:at])
                self.barriers[(*barrier, done)].append(here)
            elif kind in _SIGNALS or kind in ("pws", "pwsf"):
                self._signal(gpu, block, op, here)
            if kind in _MOVES or kind in ("pws", "pwsf") or kind in _REDUCES:
                self._write(gpu, block, op, here)

    def _signal(self, gpu: dict[str, Any], block: dict[str, Any], op: dict[str, Any], here: int) -> None:
        kind, sends = op["channel_type"], _SIGNALS.get(op["name"], True)
        ours = next(c for c in block["channels"] if c["channel_type"] == kind)["channel_ids"]
        peers = [c["connected_to"] for c in gpu["channels"] if c["channel_type"] == kind]
        connected = [peer for to in peers for peer in to]
        for at in op["channel_ids"]:
            channel = _whole(ours[_whole(at)])
            peer = connected[channel]
            number = connected[:channel].count(peer)  # the n-th channel to a GPU is its n-th to us
            ends = (gpu["id"], peer) if sends else (peer, gpu["id"])
            self.signals[(*ends, kind, number)][sends].append(here)

    def _write(self, gpu: dict[str, Any], block: dict[str, Any], op: dict[str, Any], here: int) -> None:
        sources = [self._cells(gpu, block, op, buffer) for buffer in op["src_buff"]]
        targets = [self._cells(gpu, block, op, buffer) for buffer in op["dst_buff"]]
        lengths = {len(cells) for cells in (*sources, *targets)}
        reduces = op["name"] in _REDUCES
        if len(lengths) != 1 or not (reduces or len(sources) == len(targets)):
            raise ScheduleError(
                f"{self.operations[here].named}: sources and destinations are of unlike sizes"
            )
        writes = self.operations[here].writes
        if not reduces:
            pairs = zip(sources, targets, strict=True)
            writes += [(t, (s,)) for ss, ts in pairs for s, t in zip(ss, ts, strict=True)]
            return
        for k in range(lengths.pop()):
            writes.append((targets[0][k], tuple(cells[k] for cells in sources)))
            writes += [(cells[k], (targets[0][k],)) for cells in targets[1:]]

    def _cells(
        self, gpu: dict[str, Any], block: dict[str, Any], op: dict[str, Any], buffer: dict[str, Any]
    ) -> list[Cell]:
        """The chunks of a buffer of this GPU, or of a remote buffer that the thread block refers to."""
        rank, kind = gpu["id"], buffer.get("type")
        if "buffer_id" in buffer:
            refers = (
                r for r in block["remote_buffer_refs"] if r["access_channel_type"] == op["channel_type"]
            )
            remote = gpu["remote_buffers"][next(refers)["remote_buffer_ids"][_whole(buffer["buffer_id"])]]
            rank, kind = _whole(remote["rank"]), remote["type"]
        if kind not in ("i", "o", "s") or rank >= self.size:
            raise ScheduleError(f"buffer {kind!r:.20} of gpu {rank} is not there")
        kind = "i" if kind == "o" and self.in_place else kind
        first, room = _whole(buffer["index"]), {"i": "input", "o": "output", "s": "scratch"}[kind] + "_chunks"
        if (end := first + _whole(buffer["size"])) > _whole(self.gpus[rank][room]):
            raise ScheduleError(f"gpu {rank}: {kind}[{end - 1}] is beyond its {room}")
        return [Cell(rank, kind, k) for k in range(first, end)]

    def _connect(self) -> None:
        for (src, dst, kind, _), (waits, signals) in self.signals.items():
            if len(waits) != len(signals):
                raise ScheduleError(
                    f"gpu {src} signals gpu {dst} {len(signals)} times by {kind} channel, which waits "
                    f"{len(waits)} times"
                )
            for wait, signal in zip(waits, signals, strict=True):
                self.operations[wait].after.append(signal)
        for (rank, number, _), met in self.barriers.items():
            if len(met) != self.expected[rank, number]:
                raise ScheduleError(
                    f"gpu {rank}: {len(met)} thread blocks reach barrier {number}, not as many as it says"
                )
            before = [earlier for one in met for earlier in self.operations[one].after]
            for one in met:
                self.operations[one].after = before


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= RANK_LIMIT:
        raise ScheduleError(f"{value!r:.20} stands where a whole number should")
    return value

"""A schedule for simulators of networks: what each rank does in each round, as GOAL and as Chakra's traces.

GOAL text is the input of LogGOPSim and others: Hoefler, Siebert, Lumsdaine, "Group Operation Assembly
Language", ICPP 2009; the grammar is the one of LogGOPSim's txt2bin.

Chakra execution traces, one file a rank, are how ASTRA-sim takes a custom collective. The schema is that of
Chakra's et_def.proto: a file is a GlobalMetadata and then Nodes, each behind its length. Protocol Buffers'
wire format is short enough to be written here: numbers are varints, all else is a length and bytes, and each
field begins with 8 times its number plus 0 or 2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from treeattn.collectives.check import check
from treeattn.collectives.schedule import Schedule


class Operation(NamedTuple):
    """A message of `size` bytes to or from `peer`; the tag is its own."""

    sends: bool
    peer: int
    size: int
    tag: int


@dataclass
class RankRound:
    """What one rank does in one round. merged: records that it merges on arrival."""

    operations: list[Operation] = field(default_factory=list)
    merged: int = 0


def steps(schedule: Schedule, records: int, record_bytes: int, group: int) -> list[list[RankRound]]:
    """Per rank, the rounds in which it has something to do. Chunks without records are not sent.

    Raises `ScheduleError` for a schedule that does not check.
    """
    check(schedule)
    found: list[list[RankRound]] = [[] for _ in range(schedule.size)]
    tag = 0
    for _, in_round in groupby(schedule.traffic(records, group), key=attrgetter("round")):
        now: defaultdict[int, RankRound] = defaultdict(RankRound)
        for _, src, dst, carried, merge in in_round:
            size = carried * record_bytes
            now[src].operations.append(Operation(True, dst, size, tag))
            now[dst].operations.append(Operation(False, src, size, tag))
            now[dst].merged += carried * merge
            tag += 1
        for rank, step in now.items():
            found[rank].append(step)
    return found


def goal(
    schedule: Schedule,
    records: int = 16,
    record_bytes: int = 520,
    merge_nanoseconds: int = 0,
    group: int = 1,
) -> str:
    """The schedule over `records` records of `record_bytes` bytes each (16 heads of head_dim 128).

    `merge_nanoseconds`: time to merge one record. `group`: records that are never cut. A rank starts a round
    when all its operations of the round before are done, as the MPI executor does. Chunks without records are
    not sent. Raises `ScheduleError` for a schedule that does not check.
    """
    lines = [f"num_ranks {schedule.size}"]
    for rank, rounds in enumerate(steps(schedule, records, record_bytes, group)):
        lines += ["", f"rank {rank} {{", *_program(rounds, merge_nanoseconds), "}"]
    return "\n".join(lines) + "\n"


def _program(rounds: list[RankRound], merge_nanoseconds: int) -> Iterator[str]:
    """Labelled operations; one `calc` closes each round (the merges) and all of the next wait for it."""
    closed = 0
    for step in rounds:
        labels = range(closed + 1, closed + 1 + len(step.operations))
        for label, operation in zip(labels, step.operations, strict=True):
            sends, peer, size, tag = operation
            to = f"send {size}b to" if sends else f"recv {size}b from"
            yield f"l{label}: {to} {peer} tag {tag}"
            if closed:
                yield f"l{label} requires l{closed}"
        closed = labels.stop
        yield f"l{closed}: calc {step.merged * merge_nanoseconds}"
        yield from (f"l{closed} requires l{label}" for label in labels)


_COMP, _SEND, _RECV = 4, 5, 6  # of NodeType
_INT32, _INT64, _BOOL = 7, 9, 27  # fields of AttributeProto


def chakra(
    schedule: Schedule,
    records: int = 16,
    record_bytes: int = 520,
    merge_nanoseconds: int = 0,
    group: int = 1,
) -> list[bytes]:
    """The file of each rank; parameters as of `goal`.

    A round's nodes have as data dependencies those of the rank's round before. Merges are one computing node
    after the round's receives: its duration in microseconds, rounded up, and a byte as an operation
    (num_ops, tensor_size). Raises `ScheduleError` for a schedule that does not check.
    """
    found = []
    for rank, rounds in enumerate(steps(schedule, records, record_bytes, group)):
        text = _delimited(_text(1, "0.0.4"))
        before, last = list[int](), 0
        for number, step in enumerate(rounds, 1):
            after, received = list[int](), list[int]()
            for operation in step.operations:
                last += 1
                after.append(last)
                received += [] if operation.sends else [last]
                text += _delimited(_message(last, rank, number, operation, before))
            if step.merged:
                last += 1
                after.append(last)
                size = step.merged * record_bytes
                took = -(-step.merged * merge_nanoseconds // 1000)
                attributes = [("num_ops", _INT64, size), ("tensor_size", _INT64, size)]
                text += _delimited(_node(last, f"merge, round {number}", _COMP, received, attributes, took))
            before = after
        found.append(text)
    return found


def _message(identity: int, rank: int, number: int, operation: Operation, after: list[int]) -> bytes:
    sends, peer, size, tag = operation
    src, dst = (rank, peer) if sends else (peer, rank)
    attributes = [
        ("comm_src", _INT32, src),
        ("comm_dst", _INT32, dst),
        ("comm_size", _INT64, size),
        ("comm_tag", _INT32, tag),
    ]
    name = f"{'send' if sends else 'receive'} {src}->{dst}, round {number}"
    return _node(identity, name, _SEND if sends else _RECV, after, attributes)


def _node(
    identity: int,
    name: str,
    kind: int,
    after: list[int],
    attributes: list[tuple[str, int, int]],
    took: int = 0,
) -> bytes:
    dependencies = b"".join(map(_varint, after))
    parts = [_whole(1, identity), _text(2, name), _whole(3, kind)]
    parts += [_bytes(5, dependencies)] if after else []
    parts += [_whole(7, took)] if took else []
    every = [("is_cpu_op", _BOOL, 0), *attributes]
    parts += [_bytes(10, _text(1, key) + _whole(field, value)) for key, field, value in every]
    return b"".join(parts)


def _varint(value: int) -> bytes:
    def septets() -> Iterator[int]:
        left = value
        while left > 127:
            yield left & 127 | 128
            left >>= 7
        yield left

    return bytes(septets())


def _whole(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _bytes(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _delimited(content)


def _text(number: int, content: str) -> bytes:
    return _bytes(number, content.encode())


def _delimited(content: bytes) -> bytes:
    return _varint(len(content)) + content

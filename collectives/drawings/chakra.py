"""A schedule as Chakra execution traces, one file a rank: how ASTRA-sim takes a custom collective.

The schema is that of Chakra's et_def.proto: a file is a GlobalMetadata and then Nodes, each behind its
length. Protocol Buffers' wire format is short enough to be written here: numbers are varints, all else is a
length and bytes, and each field begins with 8 times its number plus 0 or 2.
"""

from __future__ import annotations

from collections.abc import Iterator

from treeattn.collectives.drawings.steps import Operation, steps
from treeattn.collectives.schedule import Schedule

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

"""Chakra execution traces, decoded by Protocol Buffers' own library by the published schema."""

from __future__ import annotations

import pytest

from tests.command.launch import in_process
from treeattn.collectives import build, names
from treeattn.collectives.drawings.exports import chakra

pytest.importorskip("google.protobuf", reason="protobuf is not installed (the extra `test`)")

# Field -> (number, type, repeated), of et_def.proto as far as it is used.
_STRING, _INT64, _UINT64, _INT32, _BOOL, _MESSAGE = 9, 3, 4, 5, 8, 11
SCHEMA = {
    "GlobalMetadata": {"version": (1, _STRING, False)},
    "AttributeProto": {
        "name": (1, _STRING, False),
        "int32_val": (7, _INT32, False),
        "int64_val": (9, _INT64, False),
        "bool_val": (27, _BOOL, False),
    },
    "Node": {
        "id": (1, _UINT64, False),
        "name": (2, _STRING, False),
        "type": (3, _INT32, False),  # an enumeration, which travels as one
        "data_deps": (5, _UINT64, True),
        "duration_micros": (7, _UINT64, False),
        "attr": (10, _MESSAGE, True),
    },
}


@pytest.fixture(scope="module")
def types():
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="et.proto", package="et", syntax="proto3")
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name)
        if name == "AttributeProto":
            message.oneof_decl.add(name="value")
        for field, (number, kind, repeated) in fields.items():
            made = message.field.add(name=field, number=number, type=kind, label=3 if repeated else 1)
            if kind == _MESSAGE:
                made.type_name = ".et.AttributeProto"
            if field.endswith("_val"):
                made.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"et.{name}")) for name in SCHEMA
    }


def decoded(types, content):
    """The nodes of a file, whose lengths are varints."""
    parts, at = [], 0
    while at < len(content):
        length = shift = 0
        while True:
            length |= (content[at] & 127) << shift
            shift, at = shift + 7, at + 1
            if content[at - 1] < 128:
                break
        parts.append(content[at : at + length])
        at += length
    assert types["GlobalMetadata"].FromString(parts[0]).version
    nodes = [types["Node"].FromString(part) for part in parts[1:]]
    assert [node.SerializeToString() for node in nodes] == parts[1:]  # no field that the schema lacks
    return nodes


def attributes(node):
    return {a.name: getattr(a, a.WhichOneof("value")) for a in node.attr}


@pytest.mark.parametrize("name", names("schedule"))
def test_every_message_is_named_at_both_ends(types, name):
    schedule = build(name, 6)
    sent, received = [], []
    for rank, content in enumerate(chakra(schedule, records=12, record_bytes=300, merge_nanoseconds=400)):
        seen = set()
        for node in decoded(types, content):
            assert set(node.data_deps) <= seen  # what it waits for stands before it
            seen.add(node.id)
            known = attributes(node)
            if node.type == 4:
                assert node.duration_micros * 1000 >= known["num_ops"] // 300 * 400
                continue
            message = known["comm_src"], known["comm_dst"], known["comm_size"], known["comm_tag"]
            assert rank == message[node.type - 5]  # a send is its source's, a receive its destination's
            (sent if node.type == 5 else received).append(message)
    assert sorted(sent) == sorted(received)
    assert len({tag for *_, tag in sent}) == len(sent)
    ours = [(m.src, m.dst, m.records * 300) for m in schedule.traffic(12)]
    assert sorted(m[:3] for m in sent) == sorted(ours)


def test_the_command_writes_a_file_for_each_rank(types, tmp_path):
    in_process("schedule", "chain", "--ranks", 3, "--format", "chakra", "--out", tmp_path / "c")
    assert {path.name for path in tmp_path.iterdir()} == {"c.0.et", "c.1.et", "c.2.et"}
    assert [n.type for n in decoded(types, (tmp_path / "c.1.et").read_bytes())] == [6, 4, 5, 6, 5]
    assert (
        "add --out NAME" in in_process("schedule", "chain", "--ranks", 3, "--format", "chakra", code=2).stderr
    )

"""A printed plan says every stage, buffer and message of a step, and why each was chosen."""

import dataclasses

import pytest

import treeattn

SHAPE = {"heads": 6, "kv_heads": 6, "head_dim": 16, "dtype": "float32"}


def sections(decoder):
    """Title -> {name: what is said of it}."""
    found, rows = {}, {}
    for line in str(decoder.plan).splitlines()[1:]:
        if line.startswith("  "):
            name, _, text = line.strip().partition("  ")
            rows[name] = text.strip()
        else:
            rows = found[line] = {}
    return found


def test_a_plan_says_what_a_step_does(comm):
    with treeattn.Decoder(comm, **SHAPE, scheme="recursive_doubling") as decoder:
        said = sections(decoder)
        assert list(said["stages"]) == ["attend", "reduce", "finish"]
        assert f"run by {decoder.executor} over mpi" in said["stages"]["reduce"]
        assert said["buffers"]["records"] == "[1, 6, 1, 18] float32, 432 bytes"
        sent = said["messages that this rank sends in a step"]
        assert set(sent) == ({f"{size:,} bytes" for _, size in decoder.sent} or {"none"})
        assert set(said["why"]) == {"scheme", "transport", "executor", "calls"}
        with pytest.raises(dataclasses.FrozenInstanceError):
            decoder.plan.transport = "nccl"
    assert str(decoder.plan) == "recursive_doubling: closed"

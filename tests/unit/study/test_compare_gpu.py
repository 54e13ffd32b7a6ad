"""What is different where schemes are compared on GPUs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import made_results
import pytest
from msgspec import structs

from treeattn.study.compare import measure, results
from treeattn.study.compare.schema import NULL, SUM, Run

MEASURED = Path(__file__).resolve().parents[2] / "data" / "compare.jsonl"


def key_of(what: str, **fields: str):
    (key,) = made_results.keys(["ring"], [100], **{"device": "cuda", "transport": "nccl", **fields})
    return structs.replace(key, what=what)


class Step:
    """Writes down what is done to it."""

    records = "records"

    def __init__(self) -> None:
        self.log: list[str] = []

    def __call__(self, *given: str) -> None:
        self.log.append("step " + " ".join(given))

    def fold(self) -> None:
        self.log.append("fold")

    def synchronize(self) -> None:
        self.log.append("waited")


@pytest.mark.parametrize(("what", "done"), [("decode", "step q k v"), ("reduce", "fold")])
def test_the_clock_stops_when_the_gpu_is_done(what: str, done: str) -> None:
    """And starts when it has nothing to do."""
    step = Step()
    memory = SimpleNamespace(
        copy=lambda into, source: step.log.append(f"{into} of {source}"),
        synchronize=lambda: step.log.append("idle"),
    )
    problem = SimpleNamespace(q="q", k="k", v="v", records="fresh", device=SimpleNamespace(memory=memory))
    (part,), prepare = measure._calls(key_of(what), problem, step)
    prepare()
    part()
    before = ["records of fresh", "idle"] if what == "reduce" else []
    assert step.log == [*before, done, "waited"]


def test_files_from_before_gpus_are_of_processors() -> None:
    found = results.read(MEASURED)
    assert found.problems == []
    assert {(point.key.device, point.key.transport) for point in found.points} == {("cpu", "mpi")}


@pytest.mark.parametrize(
    ("scheme", "device", "transport"),
    [("ring", "cpu", "nccl"), ("ring", "cuda", "mpi"), ("ring", "cuda", "none"), (NULL, "cuda", "host")],
)
def test_a_transport_that_cannot_be_is_named(tmp_path, scheme: str, device: str, transport: str) -> None:
    keys = made_results.keys([scheme], [100], device=device, transport=transport)
    found = results.read(made_results.write(tmp_path / "r.jsonl", keys, repetitions=1))
    assert found.points == []
    assert f"{scheme} on {device} over {transport}" in found.problems[0]


def test_a_case_holds_every_transport() -> None:
    keys = [key_of("decode", transport=over) for over in ("host", "nccl")]
    assert len({key.case for key in keys}) == 1
    assert [key.label for key in keys] == ["ring [host]", "ring [nccl]"]
    assert structs.replace(keys[0], device="cpu", transport="mpi").label == "ring"
    assert structs.replace(keys[1], scheme=SUM).label == "ncclAllReduce(sum)"


def test_other_gpus_are_another_version() -> None:
    line = made_results.run_line()
    line.pop("kind")
    run = Run(**{**line, "software": SimpleNamespace(**line["software"]), "ranks": []})

    def on(gpu: str | None) -> str:
        rank = SimpleNamespace(node=0, cpu="No CPU", gpu=gpu)
        return results.version(structs.replace(run, ranks=[rank, rank]), (2, None))

    assert on(None).endswith("No CPU, ranks 2")
    assert on("NVIDIA H100").endswith("NVIDIA H100, ranks 2")

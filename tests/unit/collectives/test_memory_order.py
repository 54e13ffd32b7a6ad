"""ThreadSanitizer over the programs of every scheme, ranks as threads: no race. Weakened ones have some.

It knows the memory model of C11, not only what the processor at hand forgives.
"""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest

from tests.support.drawn import sample
from tests.support.partials import own_part, partials
from tests.support.reducer_contract import OPERATOR
from treeattn.backends.cpu import compiled_kernels_problem
from treeattn.collectives import build, names, to_root
from treeattn.collectives.executors import loopback, lowering
from treeattn.collectives.executors.lowering import Lowered, Regions, landing_records, plan_program
from treeattn.collectives.executors.slots import SharedPart, Slots, set_bytes
from treeattn.collectives.runtime.reducer import ReductionSpec

HERE, ROOT = Path(__file__).parent, Path(__file__).resolve().parents[3]
KERNELS = ROOT / "kernels" / "cpu"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(compiled_kernels_problem() is not None, reason="no C compiler"),
]


LINE = 128


class Block:
    """Arrays of one block, each on lines of its own."""

    def __init__(self, size: int = 1 << 22) -> None:
        whole = np.zeros(size + LINE, np.uint8)
        self.bytes, self.used = whole[-whole.ctypes.data % LINE :], 0

    def empty(self, shape, dtype=np.float32):
        begin, size = self.used, int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.used += -(-size // LINE) * LINE
        assert self.used <= len(self.bytes)
        return self.bytes[begin : begin + size].view(dtype).reshape(shape)


class VirtualRank(NamedTuple):
    records: np.ndarray
    lowered: Lowered


def virtual_node(schedule, records, slots=Slots):
    """The block, and every rank of `schedule`: all of them share their memory."""
    block, node = Block(), tuple(range(schedule.size))
    buffers = [block.empty((records, OPERATOR.width)) for _ in node]
    comms = [SimpleNamespace(rank=rank, size=schedule.size) for rank in node]
    row = OPERATOR.width * 4
    with mock.patch.object(lowering, "_PIECE", 4 * row):
        plans = [
            plan_program(ReductionSpec(comm, OPERATOR, buffer), schedule, node, piecewise=True)
            for comm, buffer in zip(comms, buffers, strict=True)
        ]
    parts = {
        rank: SharedPart(block.empty(2 * set_bytes(plans[0].program, row), np.uint8), None) for rank in node
    }
    ranks = []
    for planned, buffer in zip(plans, buffers, strict=True):
        landing = block.empty((landing_records(planned.program), OPERATOR.width))
        of_node = slots(parts, planned.program, row)
        ranks.append(VirtualRank(buffer, Lowered(planned.program, Regions(buffer, landing), of_node, {})))
    return block, ranks


def compiled(folder, replace="", by=""):
    """The twin, with one word of the step replaced by another."""
    source = (KERNELS / "step.c").read_text()
    assert replace in source
    (folder / "step.c").write_text(source.replace(replace, by) if replace else source)
    # The copy in `folder` comes first: #include "step.c" of a file elsewhere looks there.
    twin = folder / "step_twin"
    command = ["cc", "-std=gnu11", "-O1", "-g", "-fsanitize=thread", "-ffp-contract=off", "-pthread"]
    files = [HERE / "step_twin.c", KERNELS / "merge_partials.c"]
    subprocess.run([*command, f"-I{folder}", f"-I{KERNELS}", *files, "-lm", "-o", twin], check=True)
    return twin


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("twin"))


def run(twin, path, schedule, slots=Slots, steps=40):
    """What the twin says: (exit code, all that it printed)."""
    size, records = schedule.size, 9
    block, ranks = virtual_node(schedule, records, slots)
    values = partials(size, records, 8, seed=size)
    wanted = [np.ascontiguousarray(part) for part in loopback.run(schedule, values, OPERATOR)]
    words = [block.bytes.ctypes.data, block.used, size, steps, 20, OPERATOR.width]
    for rank, (buffer, lowered) in enumerate(ranks):
        promised = own_part(schedule, rank, buffer)
        first = promised.ctypes.data - buffer.ctypes.data
        words += [buffer.ctypes.data, buffer.nbytes, first, promised.nbytes, len(lowered.rounds)]
    blocks = [np.array(words, np.int64), *(array for rank in ranks for array in rank.lowered.arrays)]
    blocks += [block for pair in zip(values, wanted, strict=True) for block in pair]
    path.write_bytes(b"".join(block.tobytes() for block in blocks))
    # Without fixed addresses some kernels leave the sanitizer no room.
    done = subprocess.run(
        ["setarch", "-R", twin, path], capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("scheme", sample(4, names("schedule")))
def test_no_race(twin, tmp_path, scheme):
    for size in (2, 3, 5, 8):
        whole = build(scheme, size)
        for schedule in (whole, *([to_root(whole)] if whole.result == "replicated" else [])):
            assert run(twin, tmp_path / "programs", schedule) == (0, "done\n"), (size, schedule.result)


def test_who_is_promised_nothing_awaits_its_readers(tmp_path):
    """Else it would be steps ahead of them."""
    done = "if (number == wanted) return DONE;"
    bold = compiled(tmp_path, done, done.replace("number ==", "wait->amount || number =="))
    code, said = run(bold, tmp_path / "programs", to_root(build("chain", 3)))
    assert code != 0
    assert "data race" in said or "result 3" in said


@pytest.mark.parametrize("order", ["release", "acquire"])
def test_a_relaxed_order_is_reported(tmp_path, order):
    weak = compiled(tmp_path, f"memory_order_{order}", "memory_order_relaxed")
    code, said = run(weak, tmp_path / "programs", build("recursive_doubling", 4))
    assert code != 0
    assert "data race" in said

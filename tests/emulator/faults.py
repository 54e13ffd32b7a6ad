"""Faults to plant into the real kernels: a text that is there, what takes its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

__all__ = ["FAULTS", "Fault", "faults_source", "planted"]


class Fault(NamedTuple):
    """`old` occurs once in the kernel's text; `new` is wrong."""

    kernel: str
    old: str
    new: str


_SOURCES = {"fma": "partial_attention.cu", "mma": "partial_attention_mma.cu", "pull": "pull_partials.cu"}

FAULTS = {
    "no_barrier": Fault("fma", "__syncthreads(); // the groups' states are there", ""),
    "no_fence": Fault("fma", "__threadfence(); // this thread's part", "// "),
    "no_pipeline_barrier": Fault("mma", "__syncthreads(); // everyone's copies of this tile", "// "),
    "short_wait": Fault("mma", "copy_async_wait<STAGES - 2>();", "copy_async_wait<STAGES - 1>();"),
    "relaxed_number": Fault(
        "pull",
        "store_release(number_of(a, a.rank), step",
        "emulator::store_relaxed(number_of(a, a.rank), step",
    ),
    "relaxed_look": Fault(
        "pull", "load_acquire(number_of(a, rank))", "emulator::load_relaxed(number_of(a, rank))"
    ),
    "announced_early": Fault("pull", "__syncthreads(); // the block's copies are made", ""),
    "one_set": Fault("pull", "step % 2 * a.set", "0 * a.set"),
    "not_awaited": Fault("pull", "i.operation == AWAIT || i", "i"),
    "stale_number": Fault(
        "pull", "wanted = step * a.numbers + round", "wanted = (step - 1) * a.numbers + round"
    ),
    "push": Fault(
        "pull",
        "if (threadIdx.x == RECORD_MAX) own",
        "const_cast<float *>(from[0])[offset] = own_maximum; if (threadIdx.x == RECORD_MAX) own",
    ),
    "stages_reused_early": Fault("mma", "__syncthreads(); // the stages are free", ""),
}


def planted(fault: Fault) -> Callable[[str], str]:
    """The edit that plants a fault; texts of other kernels stay as they are."""

    def edit(text: str) -> str:
        if f"kernels/cuda/{_SOURCES[fault.kernel]}" not in text:
            return text
        assert text.count(fault.old) == 1, f"{fault.old!r} must occur once"
        return text.replace(fault.old, fault.new)

    return edit


def faults_source() -> str:
    """The kernels of faults.cu, to follow a text that includes ptx.cuh."""
    text = (Path(__file__).parent / "faults.cu").read_text(encoding="utf-8")
    return f'#line 1 "faults.cu"\n{text}'

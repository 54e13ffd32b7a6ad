"""One run under a sanitizer, in a process of its own: see `test_sanitizers.py`, which starts it.

Usage: python sanitized.py SANITIZER WHAT, where WHAT is a kernel of faults.cu or, with a planted
fault or "clean", work for the real kernels: fma_plain:clean, mma_plain:short_wait, pull:one_set, ...
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))


from tests.emulator.faults import FAULTS, faults_source, planted
from tests.emulator.node import Node
from tests.emulator.raw_module import RawModule
from tests.emulator.runtime import EmulatorRuntime
from tests.emulator.work import WORK
from tests.support import verbs
from treeattn import collectives
from treeattn.backends import cuda
from treeattn.backends.cuda import attention
from treeattn.backends.cuda.compile import source
from treeattn.backends.cuda.splits import Splits


def run_records(runtime: EmulatorRuntime) -> np.ndarray:
    """All that is done with records."""
    records, other = np.random.default_rng(0).random((2, 1, 4, 1, 66), np.float32)
    verbs.merge(cuda, records, other, runtime=runtime)
    operator, maxima = cuda.MergeOperator(64, runtime=runtime), records[..., 0].reshape(4) + np.float32(1)
    flat = records.reshape(4, 66)
    operator.planned_rescale(flat, maxima, *operator.columns(flat)[1:])()
    out, lse = np.empty((1, 1, 4, 64), np.float32), np.empty((1, 4, 1), np.float32)
    verbs.finish(cuda, records, out, lse, runtime=runtime)
    cuda.planned_pack(records.copy(), 1.0, runtime=runtime)(out.reshape(1, 4, 1, 64), lse)
    cuda.planned_scale(lse, 0.5, runtime=runtime)()
    return out


def run_pull(sanitizer: str, name: str, edit: Callable[[str], str]) -> list[np.ndarray]:
    """Three ranks, five steps: the slots of a step are used again two steps later; results are finished.
    "scatter": a rank whose result counts nobody, for want of records. "nodes": messages from another node."""
    scheme, records = ("head_scatter", 2) if name == "scatter" else ("all_gather_merge", 4)
    partials = np.random.default_rng(0).standard_normal((5, 3, records, 10)).astype(np.float32)
    partials[..., 1] = np.abs(partials[..., 1])
    nodes = ((0, 1), (2,)) if name == "nodes" else None
    planned = {"nodes": nodes, "finish": name == "pull", "sanitizer": sanitizer, "edit": edit}
    with Node(collectives.build(scheme, 3), records, 8, **planned) as node:
        return [*node.run(list(partials))[-1], *(out for out, _ in node.results)]


def run_fault(sanitizer: str, name: str) -> None:
    """A kernel of faults.cu with 64 threads and room for as many floats.

    Of two arrays the lower: what guards an array's end is the one above it, and the last has none.
    """
    code = source("partial_attention") + faults_source()
    x = min((np.zeros(64, np.float32), np.zeros(64, np.float32)), key=lambda array: array.ctypes.data)
    module = RawModule(code, name_expressions=(name,), sanitizer=sanitizer)
    module.get_function(name)((1,), (64,), (x,), shared_mem=256, workers=1)


def main() -> None:
    sanitizer, what = sys.argv[1:]
    kind, _, fault = what.partition(":")
    if not fault:
        run_fault(sanitizer, what)
        return
    kernel, _, kind = kind.rpartition("_") if kind.startswith(("fma", "mma")) else ("mma", "", kind)
    edit = str if fault == "clean" else planted(FAULTS[fault])
    runtime = EmulatorRuntime(seed=3, sanitizer=sanitizer, edit=edit)
    # Two groups, so that every barrier and the fence have their work to do.
    vars(attention)["choose_splits"] = lambda load, number: Splits(number, 2)
    if kind in WORK:
        held = [WORK[kind](runtime, kernel)]
    else:
        held = [run_records(runtime)] if kind == "records" else run_pull(sanitizer, kind, edit)
    print("NaN" if any(np.isnan(array).any() for array in held) else "finite")


if __name__ == "__main__":
    main()

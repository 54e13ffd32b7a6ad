"""The emulator against the hardware, on one table of cases: python -m gpu_day.same_bits --json FILE

Both run here, side by side, over the multiply-add cases of the tests' table. As the kernels are shipped their
bits differ: 2^x and 1 / x of the hardware are approximations (`exp2_fast`, `reciprocal_fast`), and the
compiler contracts products and sums. So each case runs a second time with 2^x written out in exact
operations, 1 / x a division and nothing contracted, on both sides: then a bit that differs is a fault, of the
emulator or of what we believe of the hardware, and the exit code is 1. (CuPy's compiler also flushes
subnormal numbers; the table's stay clear of them.)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import harness
import numpy as np

from gpu_day.attend import Results, attend
from tests.emulator.cases import CASES, Case, is_tensor_core_case
from tests.emulator.raw_module import compiler_problem
from tests.emulator.runtime import EmulatorRuntime
from treeattn.backends.cuda import cupy_runtime
from treeattn.backends.cuda.compile import OPTIONS, source

#: Cases of the multiply-add kernel in memory that is contiguous.
TABLE = tuple(case for case in CASES if not is_tensor_core_case(case) and case.layout == "tokens")

# 2^x in defined bits, for x up to 0: the integer part by rounding, the fraction by seven terms of the Taylor
# series of 2^f. How close it is does not matter here, only that every step has one result.
_EXP2_DEFINED = """
__device__ __forceinline__ float exp2_defined(float x) {
  if (x != x) return x;
  if (!(x > -126.0f)) return 0.0f;
  const float shifted = add_exact(x, 12582912.0f), fraction = add_exact(x, -add_exact(shifted, -12582912.0f));
  float value = 1.5403530e-4f;
  value = fma_exact(value, fraction, 1.3333558e-3f);
  value = fma_exact(value, fraction, 9.6181291e-3f);
  value = fma_exact(value, fraction, 5.5504109e-2f);
  value = fma_exact(value, fraction, 2.4022651e-1f);
  value = fma_exact(value, fraction, 6.9314718e-1f);
  value = fma_exact(value, fraction, 1.0f);
  return multiply_exact(value, __uint_as_float((__float_as_uint(shifted) + 127u) << 23));
}
"""
# Name of an approximation -> (functions before it, what it returns instead).
_DEFINED = {
    "exp2_fast": (_EXP2_DEFINED, "exp2_defined(x)"),
    "reciprocal_fast": ("", "divide_exact(1.0f, x)"),
}


def defined(code: str) -> str:
    """A module's text with its approximations in defined bits. Raises `ValueError` where one is not as
    expected."""
    for name, (before, result) in _DEFINED.items():
        head = f"__device__ __forceinline__ float {name}(float x) {{\n"
        if code.count(head) != 1:
            raise ValueError(f"kernels/cuda/ptx.cuh has no {name} to replace: same_bits.py has to follow")
        code = code.replace(head, f"{before}{head}  return {result};\n")
    return code


class Defined:
    """CuPy's runtime with kernels that are edited by `defined` and compiled without contraction."""

    def __init__(self, cupy: Any, runtime: Any) -> None:
        self._cupy, self._runtime = cupy, runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def kernel(self, module: str, expression: str, shared_bytes: int = 0) -> Any:
        """As `Runtime.kernel`."""
        assert shared_bytes == 0, "the multiply-add kernel takes no dynamic shared memory"
        code, options = defined(source(module)), (*OPTIONS, "--fmad=false")
        loaded = self._cupy.RawModule(code=code, options=options, name_expressions=(expression,))
        return loaded.get_function(expression)


def compare(cases: Sequence[Case], ours: Any, theirs: Any) -> list[dict[str, Any]]:
    """For each case: how many words of records, out and lse differ between two runtimes, and by how much."""
    rows = []
    for case in cases:
        pairs = list(zip(attend(ours, case), attend(theirs, case), strict=True))
        different = sum(int((a.view(np.uint32) != b.view(np.uint32)).sum()) for a, b in pairs)
        facts = {"case": str(case), "words": sum(a.size for a, _ in pairs), "different": different}
        rows.append(facts | {"largest_difference_of_out": _largest(pairs[Results._fields.index("out")])})
    return rows


def _largest(pair: tuple[Any, Any]) -> float:
    mine, other = pair
    return float(np.abs(mine.astype(float) - other).max(initial=0))


def main() -> None:
    options = harness.options(__doc__, required=True)
    problem = cupy_runtime.problem() or compiler_problem()
    if problem:
        harness.stop(problem)
    import cupy

    gpu = cupy_runtime.current()
    facts = {
        "as_shipped": compare(TABLE, gpu, EmulatorRuntime()),
        "defined_bits": compare(TABLE, Defined(cupy, gpu), EmulatorRuntime(edit=defined)),
    }
    options.write(facts)
    wrong = [row for row in facts["defined_bits"] if row["different"]]
    for row in wrong:
        print("{case}: {different} of {words} words differ".format(**row))
    print(f"{len(TABLE) - len(wrong)} of {len(TABLE)} cases have equal bits")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

"""The comparison of emulator and hardware, with the emulator on both sides."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu_day import attend, same_bits

from treeattn.backends.cuda.compile import source

from .raw_module import RawModule, compiler_problem
from .runtime import EmulatorRuntime

pytestmark = pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem()))

FEW = tuple(case for case in same_bits.TABLE if case.head_dim == 64 and case.dtype == "float32")[:6]


def test_the_table_has_every_type_and_head_dim() -> None:
    kinds = {(case.dtype, case.head_dim) for case in same_bits.TABLE}
    assert len(kinds) == 3 * 6  # latent caches are for tensor cores
    assert any(case.drafts for case in same_bits.TABLE)
    assert any(case.lengths for case in same_bits.TABLE)


def test_equal_bits_whatever_the_order_of_threads() -> None:
    rows = same_bits.compare(FEW, EmulatorRuntime(seed=1), EmulatorRuntime(seed=2, edit=str))
    assert [row["different"] for row in rows] == [0] * len(FEW)
    for row, case in zip(rows, FEW, strict=True):
        assert row["words"] == case.batch * case.heads * case.queries * (2 * case.head_dim + 3)


def test_another_exponential_is_seen_and_the_defined_one_is_one() -> None:
    """2^x in defined bits is another function than the processor's, so bits differ, though hardly."""
    shipped, defined = EmulatorRuntime(), EmulatorRuntime(edit=same_bits.defined)
    (row,) = same_bits.compare(FEW[:1], shipped, defined)
    assert row["different"] > 0
    assert 0 < row["largest_difference_of_out"] < 1e-5
    (row,) = same_bits.compare(FEW[:1], EmulatorRuntime(seed=3, edit=same_bits.defined), defined)
    assert row["different"] == 0


def test_the_kernels_of_the_gpus_side_are_edited_and_not_contracted() -> None:
    """CuPy's RawModule is the emulator's here, which takes the same arguments."""
    options = []

    def module(**given: Any) -> RawModule:
        options.append(given["options"])
        return RawModule(**given)

    gpu = same_bits.Defined(SimpleNamespace(RawModule=module), EmulatorRuntime(seed=1))
    rows = same_bits.compare(FEW[:2], gpu, EmulatorRuntime(edit=same_bits.defined))
    assert [row["different"] for row in rows] == [0, 0]
    assert set(options) == {("-std=c++17", "--fmad=false")}
    (row,) = same_bits.compare(FEW[:1], gpu, EmulatorRuntime())
    assert row["different"] > 0


@pytest.mark.parametrize("case", attend.SMALL, ids=str)
def test_cases_for_the_sanitizers_are_right(case: same_bits.Case) -> None:
    results = attend.attend(EmulatorRuntime(), case)
    case.check(results.out, results.lse, same_bits.is_tensor_core_case(case))
    assert np.isfinite(results.records).all()


@pytest.mark.parametrize(("which", "allocators"), [("small", [None]), ("large", [])])
def test_the_sanitizers_do_without_the_pool(
    monkeypatch: pytest.MonkeyPatch, which: str, allocators: list[Any]
) -> None:
    """It would hide an overrun within it; timed launches keep it."""
    found: list[Any] = []
    cupy = SimpleNamespace(cuda=SimpleNamespace(set_allocator=found.append))
    runtime = SimpleNamespace(problem=lambda: None, current=EmulatorRuntime)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(attend, "cupy_runtime", runtime)
    monkeypatch.setattr(attend, "SMALL", ())
    monkeypatch.setattr(attend, "LARGE", ())
    monkeypatch.setattr(attend, "pull", lambda runtime: None)
    attend.main(which)
    assert found == allocators


def test_the_reduction_for_the_sanitizers_is_right() -> None:
    """Bits, with launches one after the other: none waits for one that comes later."""
    attend.pull(EmulatorRuntime())


@pytest.mark.parametrize("name", ["exp2_fast", "reciprocal_fast"])
def test_a_source_without_an_approximation_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"no {name} .* same_bits.py has to follow"):
        same_bits.defined(source("partial_attention").replace(f"{name}(float x)", "quick(float x)"))


def test_no_approximation_of_the_hardware_is_left() -> None:
    """Inline assembly that says so is behind a return, or in what the multiply-add kernels do not use."""
    code = same_bits.defined(source("partial_attention"))
    for line in (line for line in code.splitlines() if ".approx" in line):
        name = re.findall(r"float (\w+)\(float x\) \{", code[: code.index(line)])[-1]
        assert f"float {name}(float x) {{\n  return " in code, line

"""What every architecture's compiler makes of the kernels, without a GPU."""

from __future__ import annotations

import os
import shutil

import pytest

from treeattn.backends.cuda.compile import source

from . import compilers, cubin
from .matrix import ARCHITECTURES, MODULES, Row, bound_of, compiled, expressions, spill_exceptions

pytestmark = [
    pytest.mark.skipif(compilers.compiler_problem() is not None, reason=str(compilers.compiler_problem())),
    pytest.mark.skipif(shutil.which("c++filt") is None, reason="no c++filt (binutils) to read kernel names"),
]
# Every kernel takes minutes to compile; a choice of them does not.
WHOLE = bool(os.environ.get("TREEATTN_WHOLE_MATRIX"))
needs_nvdisasm = pytest.mark.skipif(
    compilers.find_tool("nvdisasm") is None, reason="no nvdisasm: pip install 'treeattn[nvrtc]'"
)


@pytest.fixture(params=[(m, a) for m in MODULES for a in ARCHITECTURES if expressions(m, a)], ids="-sm_".join)
def rows(request: pytest.FixtureRequest) -> list[Row]:
    return compiled(*request.param, whole=WHOLE)


def test_every_kernel_is_there_and_fits(rows: list[Row]) -> None:
    for row in rows:
        module = row.expression.partition("<")[0]
        assert row.shared + row.dynamic <= ARCHITECTURES[row.arch], row
        assert 0 < row.registers <= 255, row
        if (module, row.expression, row.arch) not in spill_exceptions:
            assert row.stack == 0, row
        assert row.resident_blocks() >= 1
    module = rows[0].expression.partition("<")[0]
    assert [row.expression for row in rows] == list(expressions(module, rows[0].arch, WHOLE))


@needs_nvdisasm
def test_instructions_are_those_that_were_meant(rows: list[Row]) -> None:
    for row in rows:
        count = row.instructions
        if row.expression.startswith("partial_attention<"):
            assert count["load_16_bytes"] >= 8, row  # four tokens of keys and of values
        if row.expression.startswith("partial_attention_mma<"):
            assert count["copy_16_bytes"] >= 2, row
            assert count["matrix_multiply"] >= 8, row
            assert count["matrix_load"] >= 8, row
        if not row.stack:
            assert count["local_memory"] == 0, row


@needs_nvdisasm
def test_cost_that_shows_in_the_code_is_bounded(rows: list[Row]) -> None:
    """The bounds stand in matrix.py; docs/compile-matrix.md says what was measured."""
    for row in rows:
        bound, count = bound_of(row.expression), row.instructions
        assert count["integer_division"] <= bound.integer_divisions, row
        assert 0 < count["instructions"] <= bound.instructions, row
        assert count["load_rounds"] <= bound.load_rounds, row


SASS = """
        /*0000*/                   LDG.E.64 R2, desc[UR4][R6.64] ;
        /*0010*/                   LDG.E.U16 R4, desc[UR4][R8.64] ;
        /*0020*/                   IADD3 R10, R3, 0x1, RZ ;
        /*0030*/                   LDG.E R11, desc[UR4][R10.64] ;
        /*0040*/                   I2F.U32.RP R0, R11 ;
.L_x_1:
        /*0050*/                   LDG.E.NA.128.CONSTANT R12, desc[UR4][R20.64] ;
        /*0060*/                   LDG.E R16, desc[UR4][R12.64] ;
        /*0070*/               @P0 BRA `(.L_x_1) ;
        /*0080*/                   EXIT ;
        /*0090*/                   NOP ;
"""


def test_rounds_and_divisions_are_read_from_the_code() -> None:
    assert cubin.load_rounds(SASS) == 2  # two loads at once, and one for which the first is waited
    assert cubin.load_rounds(SASS.replace("R10.64", "R9.64")) == 2
    assert cubin.load_rounds(SASS.replace("IADD3 R10, R3", "IADD3 R10, R5")) == 1
    assert cubin.load_rounds(SASS.replace("IADD3 R10, R3", "IADD3 R10, R4")) == 2
    assert cubin.load_rounds(SASS.replace(".NA", "")) == 4  # no main loop: to the end
    assert len(cubin.code(SASS)) == 9


@needs_nvdisasm
@pytest.mark.parametrize("arch", ["75", "80", "90"])
@pytest.mark.parametrize("kind", ["int", "long long", "unsigned"])
def test_a_division_is_found(kind: str, arch: str) -> None:
    code = 'extern "C" __global__ void divide(KIND *x, KIND n) { x[0] = x[1] / n; x[2] = x[1] % 7; }'
    binary = compilers.compile_cubin(code.replace("KIND", kind), ["divide"], arch)
    nvdisasm = compilers.find_tool("nvdisasm")
    assert cubin.instruction_counts(binary, nvdisasm)["divide"]["integer_division"] >= 1
    constant = compilers.compile_cubin(code.replace("KIND", "int").replace("/ n", "/ 10"), ["divide"], arch)
    assert cubin.instruction_counts(constant, nvdisasm)["divide"]["integer_division"] == 0


def test_errors_name_the_file_and_line() -> None:
    broken = source("finish").replace("const double square", "const dubble square")
    with pytest.raises(compilers.CompileError, match=r"kernels/cuda/finish.cuh\(\d+\): error"):
        compilers.compile_cubin(broken, ["finish"], "80")

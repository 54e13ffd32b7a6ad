"""What every architecture's compiler makes of the kernels, without a GPU."""

from __future__ import annotations

import os
import shutil

import pytest

from treeattn.backends.cuda.compile import source

from . import compilers
from .matrix import ARCHITECTURES, MODULES, Row, compiled, expressions, spill_exceptions

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


def test_errors_name_the_file_and_line() -> None:
    broken = source("finish").replace("const double square", "const dubble square")
    with pytest.raises(compilers.CompileError, match=r"kernels/cuda/finish.cu\(\d+\): error"):
        compilers.compile_cubin(broken, ["finish"], "80")

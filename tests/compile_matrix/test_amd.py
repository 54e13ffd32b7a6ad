"""The kernels compile for AMD's GPUs. That is all that is known of them there: nothing was run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from treeattn.backends.cuda.compile import source

from . import amd
from .matrix import MODULES, expressions
from .test_matrix import WHOLE

KERNELS = Path(__file__).resolve().parents[2] / "kernels" / "cuda"
pytestmark = pytest.mark.skipif(amd.compiler_problem() is not None, reason=str(amd.compiler_problem()))

# Of ptx.cuh, what has no twin for AMD: tensor cores, copies beside the work, numbers that other GPUs look at.
NVIDIA_ALONE = re.compile(
    r"\b(multiply_matrices|load_matrices|copy_async\w*|store_release|load_acquire|nanoseconds)\b"
)
SERVED = [name for name in MODULES if not NVIDIA_ALONE.search((KERNELS / f"{name}.cu").read_text())]


@pytest.mark.parametrize("arch", amd.ARCHITECTURES)
@pytest.mark.parametrize("module", SERVED)
def test_every_kernel_compiles_and_fits(module: str, arch: str) -> None:
    wanted = expressions(module, "80", WHOLE)
    kernels = amd.kernels(amd.assembly(source(module), list(wanted), arch))
    assert len(kernels) == len(wanted)
    for name, kernel in kernels.items():
        assert kernel.lanes == 64, name  # two of our warps
        if "float8" not in name:  # those spill there, and nobody has looked into it
            assert kernel.stack == 0, name
        if not re.search("float8|VisibleTokens|Paged", name):
            assert 0 < kernel.registers <= 256, name  # of 512: at least two waves of an execution unit
        assert kernel.shared <= 64 << 10, name
        assert kernel.keeps_subnormal, name


@pytest.mark.parametrize("arch", amd.ARCHITECTURES)
def test_exact_operations_are_not_contracted(arch: str) -> None:
    kernel = """
extern "C" __global__ void products(float *x, double *y) {
  x[0] = add_exact(multiply_exact(x[1], x[2]), x[3]);
  y[0] = __dadd_rn(__dmul_rn(y[1], y[2]), y[3]);
}
"""
    text = amd.assembly(source("merge_partials") + kernel, [], arch)
    body = re.search(r"^products:.*?s_endpgm", text, re.M | re.S)
    assert body is not None
    assert re.search(r"v_(pk_)?mul_f32", body[0])
    assert "v_mul_f64" in body[0]
    assert not re.search(r"v_\w*(fma|fmac|mad|mac)_f\d\d", body[0])


@pytest.mark.parametrize("module", SERVED)
def test_warps_only_exchange_by_what_stays_within_32_lanes(module: str) -> None:
    """Votes, masks and barriers of a warp would speak of the 64 lanes of a wavefront, two of our warps."""
    words = set(
        re.findall(r"\b__(?:shfl|ballot|any|all|activemask|syncwarp|match|reduce)\w*", source(module))
    )
    assert words <= {"__shfl_xor_sync", "__shfl_xor"}
    assert "warpSize" not in source(module)


def test_all_but_what_is_named_is_served() -> None:
    others = {"partial_attention", "merge_partials", "take_maxima", "rescale", "finish"}
    assert others | {"pack_partials", "scale_lse"} <= set(SERVED)


def test_the_tensor_core_path_is_refused_by_the_compiler() -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        amd.assembly(source("partial_attention_mma"), ["partial_attention_mma<float16, 64, 2>"], "gfx90a")
    assert "copy_async" in refused.value.stderr

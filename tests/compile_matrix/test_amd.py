"""The kernels compile for AMD's GPUs, by clang with HIP's headers as Debian has them. Nothing was run there.

hipcc is such a clang, and so is HIPRTC; this one knows newer GPUs than hipcc there.
"""

import functools
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.compile_matrix.matrix import MODULES, expressions
from tests.support.builds import FOLDER, built
from treeattn.backends.cuda.compile import source

CLANG, HEADER = "clang-19", Path("/usr/include/hip/hip_runtime.h")
LIBRARIES = Path("/usr/lib/x86_64-linux-gnu/amdgcn/bitcode")
LACKING = [str(path) for path in (HEADER, LIBRARIES) if not path.exists()]
LACKING += [] if shutil.which(CLANG) else [CLANG]
# MI200 and MI300; both have wavefronts of 64 lanes.
ARCHITECTURES = ("gfx90a", "gfx942") if not LACKING else ()

KERNELS = Path(__file__).resolve().parents[2] / "kernels" / "cuda"
# What has no twin for AMD: tensor cores (attend_tile), copies beside work, numbers that other GPUs look at.
NVIDIA_ALONE = re.compile(
    r"\b((multiply|load)_matrices|attend_tile|copy_async\w*|store_release|load_acquire|nanoseconds)\b"
)
SERVED = [name for name in MODULES if not NVIDIA_ALONE.search((KERNELS / f"{name}.cu").read_text())]


@functools.cache
def libraries() -> Path:
    """Links to the device libraries. Debian's were made before gfx942; gfx940 is its first stepping."""
    folder = FOLDER / "amd-device-libraries"
    folder.mkdir(parents=True, exist_ok=True)
    links = {"oclc_isa_version_942.bc": LIBRARIES / "oclc_isa_version_940.bc"}
    for name, path in (links | {path.name: path for path in LIBRARIES.glob("*.bc")}).items():
        if not (folder / name).exists():
            (folder / name).symlink_to(path)
    return folder


def assembly(code: str, kernels: Sequence[str], arch: str) -> str:
    wanted = [
        f"template __global__ void {name}(const AttentionArguments);" for name in kernels if "<" in name
    ]
    command = [CLANG, "-x", "hip", "-std=c++17", "-O3", "--rocm-path=/usr", "--cuda-device-only", "-S", "-"]
    command += [f"--rocm-device-lib-path={libraries()}", f"--offload-arch={arch}"]
    text = "\n".join(["#include <hip/hip_runtime.h>", code, *wanted, ""])
    return built(".s", command, stdin=text).read_text(encoding="utf-8")


@pytest.mark.deep
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_compiles_and_fits(arch: str) -> None:
    for module in SERVED:
        wanted = expressions(module, "80")
        text = assembly(source(module), list(wanted), arch)
        kernels = re.findall(r"^\s*\.amdhsa_kernel (\S+)$(.*?)^\s*\.end_amdhsa_kernel$", text, re.M | re.S)
        assert len(kernels) == len(wanted)
        for name, body in kernels:
            facts = {key: int(value) for key, value in re.findall(r"^\s*\.amdhsa_(\w+) (\d+)$", body, re.M)}
            assert not facts.get("wavefront_size32"), name  # a wavefront is two of our warps
            if "float8" not in name:  # those spill there, for a reason not known
                assert facts["private_segment_fixed_size"] == 0, name
            if not re.search("float8|VisibleTokens|Paged", name):
                assert 0 < facts["next_free_vgpr"] <= 256, name  # of 512: at least two waves
            assert facts["group_segment_fixed_size"] <= 64 << 10, name
            assert facts["float_denorm_mode_32"] == 3, name  # float32 keeps subnormal numbers


@pytest.mark.deep
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_exact_operations_are_not_contracted(arch: str) -> None:
    kernel = """
extern "C" __global__ void products(float *x, double *y) {
  x[0] = add_exact(multiply_exact(x[1], x[2]), x[3]);
  y[0] = __dadd_rn(__dmul_rn(y[1], y[2]), y[3]);
}
"""
    text = assembly(source("merge_partials") + kernel, [], arch)
    body = re.search(r"^products:.*?s_endpgm", text, re.M | re.S)
    assert body is not None
    assert re.search(r"v_(pk_)?mul_f32", body[0])
    assert "v_mul_f64" in body[0]
    assert not re.search(r"v_\w*(fma|fmac|mad|mac)_f\d\d", body[0])


@pytest.mark.deep
@pytest.mark.skipif(bool(LACKING), reason=f"no {', no '.join(LACKING)}: on Debian 12, make amd-compiler")
def test_the_tensor_core_path_is_refused_by_the_compiler() -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        assembly(
            source("attention_mma"),
            ["attention_mma<float16, float16, 64, 64, Warps<1, 4, 1>, 64, 2>"],
            "gfx90a",
        )
    assert "copy_async" in refused.value.stderr


@pytest.mark.parametrize("module", SERVED)
def test_warps_only_exchange_by_what_stays_within_32_lanes(module: str) -> None:
    """Votes, masks and barriers of a warp would speak of the 64 lanes of a wavefront, two of our warps."""
    pattern = r"\b__(?:shfl|ballot|any|all|activemask|syncwarp|match|reduce)\w*"
    assert set(re.findall(pattern, source(module))) <= {"__shfl_xor_sync", "__shfl_xor"}
    assert "warpSize" not in source(module)


def test_all_but_what_is_named_is_served() -> None:
    others = {"partial_attention", "merge_partials", "take_maxima", "rescale", "finish"}
    assert others | {"pack_partials", "scale_lse"} <= set(SERVED)

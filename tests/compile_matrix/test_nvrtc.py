"""What each NVRTC that users may have makes of the kernels: nothing is read that no instruction writes.

One ptxas made such code of a copy with a cache policy, and a GPU stopped at an illegal instruction.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from tests.compile_matrix import nvidia
from tests.compile_matrix.matrix import ARCHITECTURES, expressions
from tests.support.builds import FOLDER
from treeattn.backends.cuda.compile import source

#: The oldest, the newest and the commonest of both major versions.
WHEELS = (
    "nvidia-cuda-nvrtc-cu12==12.0.*",
    "nvidia-cuda-nvrtc-cu12==12.8.*",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-nvrtc==13.0.*",
    "nvidia-cuda-nvrtc",
)
MODULES = (
    *("pull_partials", "merge_splits", "partial_attention"),
    *("attention_mma", "attention_cluster", "attention_rows"),
)
#: All of the matrix's choice on one architecture, on the others those that ask most of a compiler.
EVERYTHING = "90"
DEMANDING = (
    "attention_rows<",
    "attention_cluster<bfloat16, bfloat16, 128",
    "pull_partials<InParameters>",
    "float8_e4m3fn, 128, 1>",
    "bfloat16, float8_e4m3fn, 128",
    "576, 512",
)


@pytest.fixture(scope="module", params=WHEELS)
def compiler(request: pytest.FixtureRequest) -> Path:
    """The library of a wheel, unpacked beside no other, or a skip with what pip says."""
    folder = FOLDER / "nvrtc" / request.param
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as room:
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", room, request.param]
            done = subprocess.run(pip, capture_output=True, text=True, timeout=600, check=False)
            if done.returncode:
                pytest.skip(f"no {request.param}: {done.stderr.strip().splitlines()[-1]}")
            (wheel,) = Path(room).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(Path(room) / "wheel", [n for n in archive.namelist() if ".so." in n])
            (Path(room) / "wheel").rename(folder)
    (library,) = (path for path in folder.rglob("libnvrtc.so.*"))
    return library


def unwritten(module: str, names: list[str], arch: str, compiler: Path) -> dict[str, set[str]]:
    """Of each kernel, by mangled name, the registers that are read and never written, where there are any."""
    _, bodies = nvidia.disassembled(nvidia.compile_cubin(source(module), names, arch, compiler))
    assert len(bodies) == len(names)
    found = {name: nvidia.unwritten_registers(body) for name, body in bodies.items()}
    return {name: registers for name, registers in found.items() if registers}


@pytest.mark.deep
@pytest.mark.skipif(nvidia.problem() is not None, reason=str(nvidia.problem()))
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_kernel_reads_what_nothing_writes(compiler: Path, arch: str) -> None:
    if arch not in nvidia.architectures(compiler):
        pytest.skip(f"{nvidia.compiler_version(compiler)} does not know sm_{arch}")
    for module in MODULES:
        names = [
            name
            for name in expressions(module, arch)
            if arch == EVERYTHING or any(part in name for part in DEMANDING)
        ]
        assert not names or unwritten(module, names, arch, compiler) == {}, nvidia.compiler_version(compiler)


SASS = """
        /*0000*/                   ULDC.64 UR4, c[0x0][0x118] ;
        /*0010*/                   R2UR UR6, R3 ;
        /*0020*/              @!UP0 UIADD3 UR7, UP1, UR6, 0x1, URZ ;
        /*0030*/                   UISETP.GE.AND UP0, UPT, UR7, UR8, UPT ;
        /*0040*/                   LDGSTS.E.BYPASS.128 [R15+UR5], desc[UR1][R20.64] ;
        /*0050*/                   UIADD3 UP2, UR9, UPT, UR4, UR7, URZ ;
        /*0060*/                   LDG.E R2, desc[UR4][R6.64+UR9] ;
"""


def test_what_nothing_writes_is_read_from_the_code() -> None:
    assert nvidia.unwritten_registers(SASS) == {"UR1", "UR8"}
    assert nvidia.unwritten_registers(SASS.replace("UR1]", "UR4]").replace("UR8", "UR7")) == set()
    assert nvidia.unwritten_registers(SASS.replace("ULDC.64", "ULDC")) == {"UR1", "UR5", "UR8"}
    assert "UR6" in nvidia.unwritten_registers(SASS.replace("R2UR UR6, R3", "MOV R6, R3"))

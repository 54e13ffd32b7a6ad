"""What the NVIDIA driver is asked, against libraries that pretend to be one."""

import shutil

import pytest

from tests.support.builds import built
from treeattn.backends.cuda import driver as cuda_driver
from treeattn.errors import BackendError

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to pretend a driver with")

# Signatures as in cuda.h; what differs from case to case comes from -D.
SOURCE = """
#include <stddef.h>
#include <string.h>
int cuInit(unsigned flags) { return flags ? 1 : INIT; }
int cuDriverGetVersion(int *version) { *version = 12040; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return INIT; }
int cuDeviceGet(int *device, int ordinal) { *device = 70 + ordinal; return BROKEN; }
int cuDeviceGetName(char *name, int length, int device) {
    strncpy(name, device == 70 ? "First" : "Second", length);
    return 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)device << 30; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 9 : attribute == 76 ? device - 70 : -1;
    return 0;
}
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    memset(uuid, 0x5a, 16);
    uuid[1] = 0; /* where CuPy's own reading ends */
    uuid[15] = device;
    return 0;
}
int cuGetErrorName(int code, const char **name) {
    *name = code == 803 ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" : 0;
    return 0;
}
"""


@pytest.fixture
def pretend(monkeypatch, tmp_path):
    """Puts such a library, and a version of the kernel's module, in the driver's place."""
    version = tmp_path / "version"

    def pretend(init=0, broken=0):
        command = ["cc", "-shared", "-fPIC", f"-DINIT={init}", f"-DBROKEN={broken}", "-x", "c", "-"]
        library = built(".so", command, stdin=SOURCE)
        version.write_text(
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
        )
        monkeypatch.setattr(cuda_driver, "_LIBRARY", str(library))
        monkeypatch.setattr(cuda_driver, "_MODULE_VERSION", version)

    return pretend


def test_two_gpus(pretend):
    pretend()
    gpus = ["First, compute capability 9.0, 70 GiB", "Second, compute capability 9.1, 71 GiB"]
    assert cuda_driver.inventory() == ("550.54.15, CUDA up to 12.4", gpus)


def test_a_driver_without_gpus(pretend, monkeypatch, tmp_path):
    pretend(init=100)
    monkeypatch.setattr(cuda_driver, "_MODULE_VERSION", tmp_path / "none")
    assert cuda_driver.inventory() == ("release unknown, CUDA up to 12.4", [])


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ({"init": 803}, "does not start: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        ({"init": 999}, "does not start: error 999"),
        ({"broken": 101}, "cuDeviceGet says error 101"),
    ],
)
def test_its_errors_are_named(pretend, codes, message):
    pretend(**codes)
    with pytest.raises(BackendError, match=message):
        cuda_driver.inventory()
    if "broken" in codes:
        with pytest.raises(BackendError, match=message):
            cuda_driver.identity(7)


def test_gpus_are_told_apart_by_all_of_their_uuid(pretend):
    pretend()
    assert [cuda_driver.identity(index) for index in (0, 1)] == [
        f"5a005a5a-5a5a-5a5a-5a5a-5a5a5a5a5a{device:02x}" for device in (70, 71)
    ]


def test_no_driver(monkeypatch):
    monkeypatch.setattr(cuda_driver, "_LIBRARY", "/nowhere/libcuda.so.1")
    for ask in (cuda_driver.inventory, lambda: cuda_driver.identity(0)):
        with pytest.raises(BackendError, match="no NVIDIA driver: /nowhere"):
            ask()

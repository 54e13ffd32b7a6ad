"""The kernels under ThreadSanitizer, to which each CUDA thread is a thread, and AddressSanitizer.

Tiny shapes, each in a process of its own that starts with the sanitizer's library.
"""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .faults import FAULTS

pytestmark = pytest.mark.deep

SUPPRESSIONS = Path(__file__).parent / "thread_sanitizer.supp"


@functools.cache
def library(sanitizer: str) -> str:
    name = {"thread": "libtsan.so", "address": "libasan.so"}[sanitizer]
    return subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()


@functools.cache
def problem(sanitizer: str) -> str | None:
    """Why a sanitizer cannot run here, or None."""
    path = library(sanitizer)
    if not os.path.isabs(path) or not os.path.exists(path):
        return f"g++ has no {sanitizer} sanitizer's library: install libtsan and libasan"
    if shutil.which("setarch") is None:
        return "no setarch (util-linux) to switch address randomisation off"
    probe = _start(sanitizer, ["-c", "print(1)"])
    return None if probe.stdout.strip() == "1" else f"the sanitizer does not start: {probe.stderr[-200:]}"


def _start(sanitizer: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "LD_PRELOAD": library(sanitizer),
        # Looking up thread-local memory is intercepted wrongly for libraries that are loaded late.
        "TSAN_OPTIONS": f"intercept_tls_get_addr=0:exitcode=66:suppressions={SUPPRESSIONS}",
        "ASAN_OPTIONS": "detect_leaks=0:exitcode=67",
        "UBSAN_OPTIONS": "print_stacktrace=0",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONMALLOC": "malloc",
    }
    command = ["setarch", "-R", sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1100, check=False)


def run(sanitizer: str, what: str) -> subprocess.CompletedProcess[str]:
    reason = problem(sanitizer)
    if reason:
        pytest.skip(reason)
    return _start(sanitizer, [str(Path(__file__).parent / "sanitized.py"), sanitizer, what])


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
@pytest.mark.parametrize(
    "kernel",
    [f"{kernel}_{kind}" for kernel in ("fma", "mma") for kind in ("plain", "tables", "cache", "finished")]
    + ["latent", "clusters", "many", "many_latent", "apart", "tall", "records", "pull", "scatter", "nodes"],
)
def test_kernels_are_clean(sanitizer: str, kernel: str) -> None:
    result = run(sanitizer, f"{kernel}:clean")
    assert (result.returncode, result.stdout.strip()) == (0, "finite"), result.stderr[-3000:]


def work(name: str) -> str:
    """What `sanitized.py` is asked to do with a planted fault."""
    fault = FAULTS[name]
    by_kernel = fault.kind in ("plain", "tables", "cache")
    return f"{fault.kernel}_{fault.kind}:{name}" if by_kernel else f"{fault.kind}:{name}"


@pytest.mark.parametrize(
    ("what", "file"),
    [(work(name), fault.named) for name, fault in FAULTS.items() if fault.sanitizer == "thread"]
    + [("shared_race", "faults.cu")],
)
def test_thread_sanitizer_sees_missing_synchronisation(what: str, file: str) -> None:
    result = run("thread", what)
    assert result.returncode == 66
    assert "data race" in result.stderr
    assert file in result.stderr


@pytest.mark.parametrize(
    ("what", "message", "file"),
    [
        (work(name), "runtime error", fault.named)
        for name, fault in FAULTS.items()
        if fault.sanitizer == "address"
    ]
    + [
        ("beyond_shared", "use-after-poison", "faults.cu"),
        ("beyond_global", "heap-buffer-overflow", "faults.cu"),
        ("misaligned_load", "misaligned address", "faults.cu"),
    ],
)
def test_address_sanitizer_sees_wrong_addresses(what: str, message: str, file: str) -> None:
    result = run("address", what)
    assert result.returncode != 0
    assert message in result.stderr
    assert file in result.stderr

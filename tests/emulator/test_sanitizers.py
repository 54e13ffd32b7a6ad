"""The kernels under ThreadSanitizer, to which each CUDA thread is a thread, and AddressSanitizer.

Tiny shapes, each in a process of its own that starts with the sanitizer's library.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)


def run(sanitizer: str, what: str) -> subprocess.CompletedProcess[str]:
    reason = problem(sanitizer)
    if reason:
        pytest.skip(reason)
    return _start(sanitizer, [str(Path(__file__).parent / "sanitized.py"), sanitizer, what])


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
@pytest.mark.parametrize(
    "kernel",
    [f"{kernel}_{kind}" for kernel in ("fma", "mma") for kind in ("plain", "tables", "cache", "finished")]
    + ["latent", "many", "many_latent", "apart", "tall", "records", "pull", "scatter", "nodes"],
)
def test_kernels_are_clean(sanitizer: str, kernel: str) -> None:
    result = run(sanitizer, f"{kernel}:clean")
    assert (result.returncode, result.stdout.strip()) == (0, "finite"), result.stderr[-3000:]


@pytest.mark.parametrize(
    ("what", "file"),
    [
        ("fma_plain:no_barrier", "partial_attention.cu"),
        ("fma_plain:no_query_barrier", "partial_attention.cu"),
        ("fma_plain:no_fence", "combine.cuh"),
        ("fma_plain:no_arrival_barrier", "combine.cuh"),
        ("fma_plain:no_states_barrier", "combine.cuh"),
        ("fma_plain:no_weights_barrier", "combine.cuh"),
        ("fma_plain:no_sums_barrier", "combine.cuh"),
        ("mma_plain:no_pipeline_barrier", "attention_mma.cu"),
        ("mma_plain:stages_reused_early", "attention_mma.cu"),
        ("mma_cache:no_widened_barrier", "attention_mma.cu"),
        ("latent:no_parts_barrier", "attention_mma.cu"),
        ("many:no_tile_barrier_rows", "attention_rows.cu"),
        ("many:stages_reused_early_rows", "attention_rows.cu"),
        ("many:rows_stored_early", "attention_rows.cu"),
        ("tall:rows_merged_early", "combine.cuh"),
        ("latent:stages_reused_early_latent", "attention_mma.cu"),
        ("mma_plain:short_wait", "attention_mma.cu"),
        ("mma_plain:no_query_barrier_mma", "attention_mma.cu"),
        ("fma_plain:no_verdict_barrier", "combine.cuh"),
        ("latent:no_tile_barrier", "attention_mma.cu"),
        ("latent:short_wait_latent", "attention_mma.cu"),
        ("latent:no_query_barrier_latent", "attention_mma.cu"),
        ("latent:stage_filled_too_early", "attention_mma.cu"),
        ("latent:columns_stored_early", "attention_mma.cu"),
        ("many_latent:no_query_barrier_many", "attention_mma.cu"),
        ("apart:no_states_barrier_apart", "combine.cuh"),
        ("apart:no_weights_barrier_apart", "combine.cuh"),
        ("apart:no_sums_barrier_apart", "combine.cuh"),
        ("shared_race", "faults.cu"),
        ("pull:relaxed_number", "pull_partials.cu"),
        ("pull:relaxed_look", "pull_partials.cu"),
        ("pull:announced_early", "pull_partials.cu"),
        ("pull:finished_early", "finish.cuh"),
        ("pull:stale_number", "pull_partials.cu"),
        ("pull:one_set", "pull_partials.cu"),
        ("pull:push", "pull_partials.cu"),
    ],
)
def test_thread_sanitizer_sees_missing_synchronisation(what: str, file: str) -> None:
    result = run("thread", what)
    assert result.returncode == 66
    assert "data race" in result.stderr
    assert file in result.stderr


@pytest.mark.parametrize(
    ("what", "message", "file"),
    [
        ("beyond_shared", "use-after-poison", "faults.cu"),
        ("beyond_global", "heap-buffer-overflow", "faults.cu"),
        ("misaligned_load", "misaligned address", "faults.cu"),
        ("mma_tables:no_views_barrier", "runtime error", "tokens.cuh"),
        ("many:no_views_barrier_rows", "runtime error", "tokens.cuh"),
        ("fma_plain:misaligned_scratch", "misaligned address", "ptx.cuh"),
        ("fma_plain:query_always_by_vectors", "misaligned address", "attention.cuh"),
    ],
)
def test_address_sanitizer_sees_wrong_addresses(what: str, message: str, file: str) -> None:
    result = run("address", what)
    assert result.returncode != 0
    assert message in result.stderr
    assert file in result.stderr

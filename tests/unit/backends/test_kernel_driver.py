"""The C kernels where Python does not reach: on 64-bit ARM under qemu, and under sanitizers.

The same definitions hold: float64 attention, and NumPy's merge and finish to the bit.
"""

import os
import shutil
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.support.builds import built
from tests.support.problems import draw
from treeattn import partial, reference
from treeattn.attention.arguments import Rules
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.positions import as_runs
from treeattn.backends.cpu import blocked, compile
from treeattn.backends.cpu.records import rescale_records

pytestmark = pytest.mark.deep
KERNELS = Path(__file__).parents[3] / "kernels" / "cpu"
TYPES = {"float32": (np.float32, 0), "float16": (np.float16, 1), "bfloat16": (ml_dtypes.bfloat16, 2)}
NARROW = {"float8_e4m3fn": (ml_dtypes.float8_e4m3fn, 3), "float8_e5m2": (ml_dtypes.float8_e5m2, 4)}

# Optimised, the sanitized kernels take twice as long to compile.
SANITIZE = ["-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

# Name: instruction set, compiler, flags, what runs the result.
BUILDS = {
    "neon": ("neon", "aarch64-linux-gnu-gcc", ["-O2", "-static"], ["qemu-aarch64"]),
    **{f"{isa}-sanitized": (isa, "cc", SANITIZE, []) for isa in compile.available_isas()},
    # Without random addresses, which the thread sanitizer of older compilers cannot bear.
    "threads-sanitized": ("portable", "cc", ["-O0", "-g1", "-fsanitize=thread"], ["setarch", "-R"]),
}


@pytest.fixture(scope="module", params=BUILDS)
def driver(request):
    isa, compiler, flags, runner = BUILDS[request.param]
    for tool in (compiler, *runner[:1]):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    sources = [Path(__file__).with_name("kernel_driver.c"), *sorted(KERNELS.iterdir())]
    shared = [flag for flag in compile._FLAGS if flag not in ("-O3", "-fPIC", "-shared")]
    command = [compiler, *shared, *compile.ISA_FLAGS[isa], *flags, "-Wall", "-Wextra", "-Werror"]
    command += [f"-I{KERNELS}", *(str(path) for path in sources if path.suffix == ".c"), "-lm"]
    program = built("", command, *(path.read_bytes() for path in sources))
    return [*runner, str(program)]


def run(driver, head, *arrays):
    result = subprocess.run(
        driver,
        input=head.encode() + b"\n" + b"".join(array.tobytes() for array in arrays),
        capture_output=True,
        timeout=300,
        check=False,
        # The driver ends without freeing; races are reported where they happen, not in a pause at the end.
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "atexit_sleep_ms=0"},
    )
    assert result.returncode == 0, result.stderr.decode()
    return np.frombuffer(result.stdout, np.float32)


def check(records, exact, out_error, lse_error):
    """Empty records are the identity; of the others out and lse are as exact."""
    empty = exact[..., 1] == 0
    assert (records[empty] == exact[empty]).all()
    records, exact = records[~empty], exact[~empty]
    np.testing.assert_allclose(records[:, 2:] / records[:, 1:2], exact[:, 2:] / exact[:, 1:2], atol=out_error)
    ours, theirs = (array[:, 0] + np.log(array[:, 1]) for array in (records, exact))
    np.testing.assert_allclose(ours, theirs, atol=lse_error)


@pytest.mark.parametrize("dtype", [*TYPES, *NARROW])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 4, 4, 128, 70), (2, 3, 6, 2, 80, 33), (1, 1, 7, 1, 72, 1100), (1, 1, 2, 2, 8, 1),
        (1, 1, 2, 2, 8, 0), (1, 1, 3, 1, 64, 300), (1, 2, 1, 1, 256, 17), (1, 1, 1, 1, 24, 2050),
        (1, 9, 8, 2, 72, 100), (2, 53, 1, 1, 24, 1030),
    ],
)  # fmt: skip
def test_attention(driver, dtype, shape):
    batch, queries, heads, kv_heads, head_dim, tokens = shape
    stored, number = (TYPES | NARROW)[dtype]
    of_q, q_number = TYPES["float32"] if dtype in NARROW else (stored, number)
    rng = np.random.default_rng(sum(shape))
    q = rng.standard_normal((batch, queries, heads, head_dim)).astype(of_q)
    k, v = (rng.standard_normal((batch, tokens, kv_heads, head_dim)).astype(stored) for _ in "kv")
    if dtype == "float16" and tokens:
        v.reshape(-1)[: min(v.size, 1024)] = np.arange(1, 1025, dtype=np.uint16).view(np.float16)[: v.size]
    scale = head_dim**-0.5
    right = reference.partial(q, k, v, scale=scale)
    exact = np.concatenate([right.max[..., None], right.denominator[..., None], right.numerator], -1)
    for threads, way in ((1, 0), (1, 1), (3, 1), (3, 2)):
        head = " ".join(map(str, ("attend", *shape, q_number, number, threads, way, scale)))
        check(run(driver, head, q, k, v).reshape(exact.shape), exact, 4e-6, 1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_what_a_query_may_see(driver, seed):
    """Drawn cases: nothing beyond the arrays is read, and the records are those of NumPy."""
    drawn = (draw(100 * seed + again, 1) for again in range(100))
    # What a sanitized build does in a second, and the kernels serve.
    case = next(
        case
        for case in drawn
        if case.q.dtype != np.float64 and case.k.shape[1] > 40 and case.q.size * case.k.shape[1] < 1e6
        if bool(case.page_size) == seed % 2
    )
    numbers = {np.dtype(numpy_type): number for numpy_type, number in TYPES.values()}
    case.rules.pop("sink_logits", None)
    given, (batch, queries, heads, head_dim) = case.shard(0), case.q.shape
    visible = MaskTables(Rules(**case.rules), batch, queries)
    pages = given.get("block_table", np.zeros((batch, 0), np.int32))
    kind, page_size = numbers[case.q.dtype], given["k"].shape[1]
    tokens = page_size * (pages.shape[1] or 1)
    k, v = (given[name][: pages.max() + 1] if pages.size else given[name] for name in "kv")
    seen = (given.get(name) for name in ("mask", "draft_positions", "begins"))
    visible.update(as_runs(given["positions"]), tokens, given["lengths"], case.q_positions, *seen)
    rules, table = visible.rules, visible.runs.table
    slopes = np.zeros(0) if rules.alibi is None else np.array(rules.alibi)
    tables = (visible.intervals, visible.q_positions, table, slopes, visible.mask, visible.draft_begins)
    counts = (len(table), visible.drafts, visible.mask.shape[2], int(slopes.size > 0), rules.softcap or 0.0)
    counts += pages.shape[1], page_size
    exact = np.empty((batch, heads, queries, head_dim + 2), np.float32)
    how = {"tables": visible, "block_table": pages if pages.size else None}
    blocked.partial_attention(case.q, k, v, exact, scale=case.scale, **how)
    for threads, way in ((1, 0), (3, 2)):
        shape = (batch, queries, heads, k.shape[2], head_dim, tokens)
        head = " ".join(map(str, ("see", *shape, kind, kind, threads, way, case.scale, *counts)))
        arrays = (*tables, visible.draft_positions, pages, case.q, k, v)
        records = run(driver, head, *arrays).reshape(exact.shape)
        check(records, exact, 1e-4, 1e-4)


@pytest.mark.parametrize("width", [3, 10, 23, 130])
def test_merge_and_finish_have_the_defined_bits(driver, width):
    rng = np.random.default_rng(width)
    a, b = rng.integers(0, 2**32, (2, 500, width), np.uint32).view(np.float32)
    near = np.exp2(rng.uniform(-60, 60, a.shape)).astype(np.float32)
    for first, second in ((a, b), (near, near[::-1].copy())):
        first[:, 0], second[:, 0] = rng.standard_normal((2, 500)) * 40
        second[::9, 0] = first[::9, 0]
        first[::31, 0] = second[::17, 0] = -np.inf
        expected = first.copy()
        partial.merge(expected, second)
        for pair in ((first, second), (second, first)):
            merged = run(driver, f"merge 500 {width}", *pair)
            assert (merged.view(np.uint32) == expected.reshape(-1).view(np.uint32)).all()
        records = expected.reshape(1, 500, 1, width)
        out, lse = np.empty((1, 1, 500, width - 2), np.float32), np.empty((1, 500, 1), np.float32)
        partial.finish(records, out, lse)
        finished = run(driver, f"finish 500 {width}", records)
        assert (finished.view(np.uint32) == np.concatenate((out.ravel(), lse.ravel())).view(np.uint32)).all()


@pytest.mark.parametrize("width", [10, 130])
def test_rescale_has_the_bits_of_numpy(driver, width):
    rng = np.random.default_rng(width)
    records = rng.standard_normal((300, width)).astype(np.float32)
    records[:, 0] *= 40
    shared = records[:, 0] + np.maximum(0, rng.standard_normal(300) * 40).astype(np.float32)
    records[::7, 0] = shared[::13] = -np.inf
    shared = np.maximum(shared, records[:, 0])
    records[5, 0] = np.nan
    expected = np.empty((300, width - 1), np.float32)
    rescale_records(records, shared, expected[:, 0], expected[:, 1:])
    rescaled = run(driver, f"rescale 300 {width}", records, shared)
    np.testing.assert_array_equal(rescaled.reshape(expected.shape), expected)

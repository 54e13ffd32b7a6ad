"""A day on a GPU in one call that needs no installation: python benchmarks/gpu.py [FAMILY ..] [--tar FILE]
That python has NumPy, CuPy and ml_dtypes; for tests pytest and hypothesis, for doctor and ranks all the rest.

Each family is a session of its own with a limit of time, so that a kernel which fails takes no other along;
those that measure come first. It leaves docs/results/gpu_FAMILY.json: machine, commit, command, exit code,
seconds, and what it found or the end of what it printed. --tar keeps them in one file, written anew after
each family, for a machine that is taken back.

Times are of a whole step (attention, merge of the splits, finish), one query of bfloat16 over a cold L2
unless a shape says more, against torch's SDPA where torch is, and against a copy: percent of copy rate as in
gpu_laps.py. The first lap behind the copy is thrown away: the copy's write-back is in it.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import gpu_laps  # noqa: E402

from treeattn.attention.arguments import Rules  # noqa: E402
from treeattn.attention.mask_tables import MaskTables  # noqa: E402
from treeattn.attention.positions import Runs  # noqa: E402
from treeattn.backends import cuda  # noqa: E402
from treeattn.backends.cuda import cupy_runtime  # noqa: E402
from treeattn.backends.cuda import driver as cuda_driver  # noqa: E402
from treeattn.study import environment  # noqa: E402

CACHE = "tests/data/smollm2_layer17_4096"
# Without the settings of setup.cfg, which ask for plugins and take a warning of CuPy for an error.
PYTEST = "{python} -m pytest -q -c /dev/null --rootdir=. -p no:cacheprovider tests/gpu"
DECODE = f"mpiexec -n 2 {{python}} -m treeattn decode {CACHE}.safetensors --device cuda --transport host"
SANITIZER = f"compute-sanitizer --error-exitcode 9 --tool {{}} {PYTEST}/test_decoder.py -k d128"
#: Family -> limit in seconds, and its command; a family without one is timed by this file.
COMMANDS = {
    "doctor": (60, "{python} -m treeattn doctor --json {out}"),
    "clocks": (20, "nvidia-smi --format=csv --query-gpu=clocks.sm,clocks.max.sm,clocks.mem,power.limit"),
    "tests": (420, f"{PYTEST} --ignore-glob=*test_ranks.py --ignore-glob=*test_peer.py"),
    "ranks": (290, f"{PYTEST}/test_ranks.py {PYTEST.split()[-1]}/test_peer.py"),
    "host": (90, f"{DECODE} --check --expect {CACHE}.expected.safetensors --json {{out}}"),
    "memcheck": (120, SANITIZER.replace("{}", "memcheck")),
    "racecheck": (120, SANITIZER.replace("{}", "racecheck")),
}
PAGE, NODES = 16, 64
TOLERANCE = 2e-2  # between two answers in bfloat16


class Shape(NamedTuple):
    """One launch over [batch, tokens, kv_heads, head_dim]. nodes: of a tree of draft tokens, the last of the
    cache, 0 for one query; page: tokens of a page, 0 for none; latent: values are 512 channels of keys."""

    heads: int
    kv_heads: int
    tokens: int = 65536
    dtype: str = "bfloat16"
    head_dim: int = 128
    batch: int = 1
    nodes: int = 0
    page: int = 0
    latent: bool = False


#: Family -> shapes that are timed.
TIMED = {
    "heads_16_16": [Shape(16, 16, 1024 * n) for n in (1, 8, 64, 256)],
    "heads_32_8": [Shape(32, 8, 1024 * n) for n in (1, 8, 16, 32, 64, 256)],
    "heads_128_8": [Shape(128, 8, 1024 * n) for n in (1, 8, 64)],
    "latent": [Shape(heads, 1, head_dim=576, latent=True) for heads in (16, 128)],
    "eight_bits": [Shape(8 * group, 8, dtype="float8_e4m3fn") for group in (1, 4, 16)],
    "trees": [Shape(32, 8, nodes=nodes) for nodes in (NODES, 32)],
    "others": [Shape(32, 8, page=PAGE), Shape(32, 8, 8192, batch=8), Shape(32, 8, head_dim=256)],
}
REDUCTIONS = ("all_gather_merge", "recursive_doubling", "binary_tree", "reduce_scatter_gather")
FAMILIES = ["doctor", "clocks", *TIMED, "reduction", *list(COMMANDS)[2:]]


class Step:
    """A planned step of a shape over caches that it goes around among."""

    def __init__(self, stopwatch: Any, shape: Shape) -> None:
        self.shape, self.runtime = shape, stopwatch.runtime
        self.queries, width = shape.nodes or 1, 512 if shape.latent else shape.head_dim
        batch, heads, zeros = shape.batch, shape.heads, self.runtime.zeros
        rows = batch * heads * self.queries
        records = zeros(rows * (width + 2), np.float32).reshape(batch, heads, self.queries, width + 2)
        self.out = zeros(rows * width, np.float32).reshape(batch, self.queries, heads, width)
        lse = zeros(rows, np.float32).reshape(batch, heads, self.queries)
        eight = {"kv_dtype": shape.dtype, "k_scale": 1.0, "v_scale": 1.0} if "float8" in shape.dtype else {}
        plan = functools.partial(cuda.PlannedAttention, records, scale=shape.head_dim**-0.5, **eight)
        plan = functools.partial(plan, tables=self.tables(), runtime=self.runtime)
        # The second way where the first one is by clusters: as many splits as there are then.
        most = self.runtime.multiprocessors // (batch * shape.kv_heads)
        self.ways = [plan(), plan(num_splits=max(1, min(most, shape.tokens // 128)))]
        self.finish = cuda.planned_finish(records, self.out, lse, runtime=self.runtime)
        q_shape = (batch, self.queries, heads, shape.head_dim)
        self.q = gpu_laps.upload_random(self.runtime, q_shape, "bfloat16")
        size = shape.batch * shape.tokens * shape.kv_heads * shape.head_dim * (1 if eight else 2)
        self.bytes = size if shape.latent else 2 * size
        count = 1 + max(1, -(-2 * stopwatch.l2_bytes // self.bytes))
        self.caches = [self.cache(seed) for seed in range(count)]
        self.pages = self.page_table()

    def __call__(self, k: Any, v: Any, way: int = 0) -> None:
        self.ways[way](self.q, k, v, None, self.pages, finish=self.finish)

    def captured(self, way: int = 0) -> Any:
        """A lap around the caches."""
        steps = [functools.partial(self, k, v, way) for k, v in self.caches]
        return gpu_laps.captured(self.runtime, steps)

    def cache(self, seed: int) -> tuple[Any, Any]:
        s = self.shape
        shape = (s.batch, s.tokens, s.kv_heads, s.head_dim)
        if s.page:
            shape = (s.batch * s.tokens // s.page, s.page, s.kv_heads, s.head_dim)
        k = self.filled(shape, 2 * seed)
        return (k, k[..., :512]) if s.latent else (k, self.filled(shape, 2 * seed + 1))

    def filled(self, shape: tuple[int, ...], seed: int) -> Any:
        """Random numbers, repeated along the tokens."""
        block = (min(1024, shape[0] * shape[1]), *shape[2:])
        part = gpu_laps.upload_random(self.runtime, block, self.shape.dtype, seed)
        array = self.runtime.empty(shape, part.dtype)
        gpu_laps.repeat(self.runtime, array.reshape(-1, *shape[2:]), part)
        return array

    def tables(self) -> MaskTables | None:
        """Of a binary tree whose nodes are the last tokens."""
        if not (nodes := self.shape.nodes):
            return None
        mask = np.zeros((1, nodes, nodes), bool)
        for node in range(nodes):
            mask[0, node, [0, node]] = True
            if node:
                mask[0, node] |= mask[0, (node - 1) // 2]
        tables = MaskTables(Rules(), 1, nodes)
        stand = np.full((1, nodes), self.shape.tokens, np.int64)
        runs = Runs(((0, 1, self.shape.tokens),))
        tables.update(runs, self.shape.tokens, None, stand, mask=mask, draft_positions=stand)
        return tables

    def page_table(self) -> Any:
        if not self.shape.page:
            return None
        pages = self.shape.tokens // self.shape.page
        numbers = np.random.default_rng(5).permutation(self.shape.batch * pages).astype(np.int32)
        table = self.runtime.empty((self.shape.batch, pages), np.int32)
        self.runtime.upload(table, numbers.reshape(self.shape.batch, pages))
        return table


def torch_lap(stopwatch: Any, step: Step) -> Any:
    """A lap of torch's attention over the same memory as a graph, or why there is none."""
    s = step.shape
    if s.dtype != "bfloat16" or s.latent or s.page or s.nodes:
        return "not served by torch"
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # or a library that it needs is for another CUDA
        return str(error)
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    attend = functools.partial(
        torch.nn.functional.scaled_dot_product_attention, enable_gqa=s.heads != s.kv_heads
    )

    def tensor(array: Any) -> Any:
        return torch.as_tensor(array.view(np.int16), device="cuda").view(torch.bfloat16).transpose(1, 2)

    query, pairs = tensor(step.q), [(tensor(k), tensor(v)) for k, v in step.caches]
    with torch.cuda.stream(torch.cuda.Stream()):
        answer = [attend(query, *pairs[-1]) for _ in range(3)][-1]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [attend(query, *pair) for pair in pairs]
    step(*step.caches[-1])
    difference = float(np.abs(answer.transpose(1, 2).float().cpu().numpy() - step.out.get()).max())
    if not difference <= TOLERANCE:
        return f"another result: it differs by {difference:.1e}"

    def launch(_: object = kept) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(stopwatch.runtime.stream)):
            graph.replay()

    return launch


def time_shapes(stopwatch: Any, shapes: list[Shape], repeats: int = 11) -> Iterator[dict[str, Any]]:
    """A row for each shape, in turn with copies and torch."""
    copy, moved = gpu_laps.copy_lap(stopwatch)
    for shape in shapes:
        step = Step(stopwatch, shape)
        own, torch = step.captured(), torch_lap(stopwatch, step)
        clustered = step.ways[0].variant.clustered
        laps = [own, *([torch] if callable(torch) else []), *([step.captured(1)] if clustered else [])]
        copying, _, *around = gpu_laps.median_laps(stopwatch, [copy, own, *laps], copy, repeats)
        seconds = [lap / len(step.caches) for lap in around]
        yield shape._asdict() | {
            "microseconds": seconds[0] * 1e6,
            "torch_microseconds": seconds[1] * 1e6 if callable(torch) else None,
            "torch": None if callable(torch) else torch,
            "without_clusters_microseconds": seconds[-1] * 1e6 if clustered else None,
            "host_microseconds": stopwatch.host_seconds(functools.partial(step, *step.caches[-1]), 20) * 1e6,
            "copy_rate_gb_s": moved / copying / 1e9,
            "percent_of_copy_rate": 100 * step.bytes / seconds[0] * copying / moved,
        }


def time_reductions() -> Iterator[dict[str, Any]]:
    """Ranks as streams of one GPU: the protocol over peer memory, with the L2 cache for NVLink."""
    from tests.gpu.rank_streams import microseconds

    for ranks, records, scheme in ((n, r, s) for n in (2, 8) for r in (16, 128) for s in REDUCTIONS):
        found = microseconds(scheme, ranks, records)
        yield {"scheme": scheme, "ranks": ranks, "records": records, "microseconds": found}


def measure(family: str) -> None:
    """Prints a row of JSON for each shape of a family, in this process."""
    shapes = TIMED.get(family)
    for row in time_shapes(gpu_laps.CupyStopwatch(), shapes) if shapes else time_reductions():
        print(json.dumps(row), flush=True)


def run(family: str, folder: Path) -> dict[str, Any]:
    """A family in its own process: how it ended, and what it found or printed last."""
    out = folder / f"gpu_{family}.part"
    limit, words = COMMANDS.get(family, (150, f"{{python}} benchmarks/gpu.py --measure {family}"))
    command = [word.format(python=sys.executable, out=out) for word in words.split(" ")]
    began, settings = time.monotonic(), {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    for name, first in (
        ("PYTHONPATH", ROOT),
        ("PATH", Path(sys.executable).parent),
    ):  # mpiexec lies beside python
        settings[name] = os.pathsep.join(filter(None, (str(first), os.environ.get(name))))
    code, printed = None, ""
    try:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(command, cwd=ROOT, env=settings, start_new_session=True, **pipes) as process:
            try:
                printed, code = process.communicate(timeout=limit)[0], process.returncode
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # ranks, too: they would be felt by the next family
                printed = process.communicate()[0] + f"\nended after {limit} s"
    except OSError as error:
        printed = str(error)
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith('{"')]
    found = json.loads(out.read_text()) if out.exists() else rows or printed[-4000:].splitlines()
    out.unlink(missing_ok=True)
    facts = {"command": words, "exit_code": code, "seconds": round(time.monotonic() - began, 1)}
    return facts | {"result": found, "printed": [] if code == 0 else printed[-2000:].splitlines()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--results", type=Path, default=ROOT / "docs/results")
    parser.add_argument("--tar", type=Path)
    parser.add_argument("--measure", choices=[*TIMED, "reduction"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        return measure(options.measure)
    if unknown := set(options.families) - set(FAMILIES):
        parser.error(f"{', '.join(sorted(unknown))}: the families are {', '.join(FAMILIES)}")
    if problem := cupy_runtime.problem():
        sys.exit(f"gpu.py: no GPU: {problem}")
    facts = {"driver": cuda_driver.inventory(), "software": environment.software()}
    failed, written = [], []
    for family in options.families or FAMILIES:
        found = run(family, options.results)
        failed += [family] if found["exit_code"] != 0 else []
        written.append(options.results / f"gpu_{family}.json")
        written[-1].write_text(json.dumps(facts | found, indent=1) + "\n")
        print(f"{family}: exit code {found['exit_code']} after {found['seconds']} s", flush=True)
        if options.tar:
            with tarfile.open(options.tar, "w:gz") as archive:
                for path in written:
                    archive.add(path, path.name)
    sys.exit(f"gpu.py: failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()

"""The CUDA kernels against the copy rate and against what else is installed:

    python benchmarks/gpu_kernel.py [--json FILE]

One query, bfloat16, head_dim 128, batch 1, cold L2 cache. Goals: the percent of the device-to-device copy
rate in `PERCENT` (as in treeattn.study.roofline.cuda); at most 6 microseconds over bytes / copy rate at 1024
to 4096 tokens, and a whole step under 9 at 1024; ahead of every other; combining the splits takes at most 1.5
microseconds; new views of a growing cache cost the host less than 15; a captured step is one launch of a
graph.

The others are torch's scaled_dot_product_attention and, where they can be imported, FlashInfer and
flash-attn. All read the same caches, each from a CUDA graph, in turn within one run.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import harness
import numpy as np

from treeattn.backends import cuda
from treeattn.backends.cuda import cupy_runtime
from treeattn.errors import BackendError
from treeattn.study.roofline import cuda as roofline_cuda
from treeattn.study.roofline.cuda import HEAD_DIM

SHAPES = ((16, 16), (32, 8))  # query heads, KV heads
TOKENS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 262144, 1048576)
# Query heads, KV heads, tokens -> percent of the copy rate that attention is to reach.
PERCENT = {
    (16, 16, 65536): 90,
    (16, 16, 262144): 95,
    (32, 8, 8192): 65,
    (32, 8, 65536): 88,
    (32, 8, 262144): 94,
}
_WRONG = "computes something else"
TOLERANCE = 2e-2  # between two answers in bfloat16
HOST_CALLS = 20  # timed on the host in a row
CALLS = 100  # of a small step in one graph
COMBINES = ((16, 16, 32), (32, 8, 32), (16, 1, 8), (16, 1, 132), (1, 1, 256))  # heads, KV heads, splits
TOKENS_OF_A_SPLIT = 64

Lap = Callable[[], object]


class Step:
    """Attention of one query and the finish, into arrays that stay where they are."""

    def __init__(self, stopwatch: Any, heads: int, num_splits: int | None = None, *, batch: int = 1) -> None:
        runtime, rows = stopwatch.runtime, batch * heads
        zeros = [runtime.zeros(rows * width, np.float32) for width in (HEAD_DIM + 2, HEAD_DIM, 1)]
        self.records = zeros[0].reshape(batch, heads, 1, HEAD_DIM + 2)
        self.out = zeros[1].reshape(batch, 1, heads, HEAD_DIM)
        self.finish = cuda.planned_finish(
            self.records, self.out, zeros[2].reshape(batch, heads, 1), runtime=runtime
        )
        self.q = roofline_cuda.upload_random(runtime, (batch, 1, heads, HEAD_DIM), np.dtype(np.uint16))
        self._planned = cuda.PlannedAttention(
            self.records, scale=HEAD_DIM**-0.5, num_splits=num_splits, runtime=runtime
        )
        self._cut = 0

    def attention(self, k: Any, v: Any) -> None:
        self._planned(self.q, k, v)

    def attention_over_views(self, k: Any, v: Any) -> None:
        """Over other tokens than the last time, as a cache grows or is cut."""
        self._cut = (self._cut + 1) % HOST_CALLS
        end = k.shape[1] - self._cut
        self._planned(self.q, k[:, :end], v[:, :end])

    def whole(self, k: Any, v: Any) -> None:
        self._planned(self.q, k, v)
        self.finish()


def over(call: Callable[[Any, Any], object], caches: Sequence[tuple[Any, Any]]) -> list[Lap]:
    return [functools.partial(call, k, v) for k, v in caches]


def torch_attention(q: Any, k: Any, v: Any) -> Any:
    attend = importlib.import_module("torch").nn.functional.scaled_dot_product_attention
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return attend(q, k, v, enable_gqa=q.shape[1] != k.shape[1])


def flashinfer_attention(q: Any, k: Any, v: Any) -> Any:
    attend = importlib.import_module("flashinfer").single_decode_with_kv_cache
    return attend(q[0, 0], k[0], v[0], kv_layout="NHD", use_tensor_cores=q.shape[2] // k.shape[2] >= 4)


def flash_attention(module: str, q: Any, k: Any, v: Any) -> Any:
    out = importlib.import_module(module).flash_attn_with_kvcache(q, k, v)
    return out[0] if isinstance(out, tuple) else out


# module -> attention of tensors q [1, 1, heads, head_dim], k, v [1, tokens, kv_heads, head_dim]
OTHERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "torch": torch_attention,
    "flashinfer": flashinfer_attention,
    "flash_attn": functools.partial(flash_attention, "flash_attn"),
    "flash_attn_interface": functools.partial(flash_attention, "flash_attn_interface"),
}


def captured_by_torch(attend: Any, stopwatch: Any, q: Any, caches: Any) -> tuple[Lap, Any]:
    """A lap of another's attention over the same memory, in a graph that torch made; and its answer."""
    torch = importlib.import_module("torch")

    def tensor(array: Any) -> Any:
        return torch.as_tensor(array.view(np.int16), device="cuda").view(torch.bfloat16)

    query, pairs = tensor(q), [(tensor(k), tensor(v)) for k, v in caches]
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            answer = attend(query, *pairs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [attend(query, *pair) for pair in pairs]

    def launch(_: object = kept) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(stopwatch.runtime.stream)):
            graph.replay()

    return launch, answer.float().cpu().numpy()


def on_host(array: Any) -> Any:
    return array.get() if hasattr(array, "get") else array


def one_case(
    stopwatch: Any, copy: Lap, moved: int, heads: int, kv_heads: int, tokens: int, others: Any, repeats: int
) -> dict[str, Any]:
    """All contenders over the same caches, in turn. `others`: name -> a function like `captured_by_torch`,
    its first argument bound."""
    caches = roofline_cuda.cold_caches(stopwatch, tokens, kv_heads, "bfloat16")
    step = Step(stopwatch, heads)
    laps = {
        "attention": roofline_cuda.captured(stopwatch.runtime, over(step.attention, caches)),
        "attention and finish": roofline_cuda.captured(stopwatch.runtime, over(step.whole, caches)),
    }
    problems = {}
    for name, capture in others.items():
        try:
            lap, answer = capture(stopwatch, step.q, caches)
        except Exception as error:  # another package's own, of any type: said in the results
            problems[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        difference = np.abs(answer.reshape(step.out.shape) - on_host(step.out)).max()
        if not difference <= TOLERANCE:
            problems[name] = f"{_WRONG}: it differs by {difference:.1e}"
            continue
        laps[name] = lap
    copying, *rounds = roofline_cuda.median_laps(stopwatch, [copy, *laps.values()], copy, repeats)
    seconds = {name: lap / len(caches) for name, lap in zip(laps, rounds, strict=True)}
    host, views = (
        stopwatch.host_seconds(functools.partial(call, *caches[-1]), HOST_CALLS)
        for call in (step.attention, step.attention_over_views)
    )
    floor = (caches[0][0].nbytes + caches[0][1].nbytes) * copying / moved
    row = {
        "heads": heads,
        "kv_heads": kv_heads,
        "tokens": tokens,
        "caches": len(caches),
        "copy_rate_gb_s": moved / copying / 1e9,
        "floor_microseconds": floor * 1e6,
        "microseconds": {name: value * 1e6 for name, value in seconds.items()},
        "percent_of_copy_rate": {name: 100 * floor / value for name, value in seconds.items()},
        "host_microseconds": host * 1e6,
        "host_microseconds_over_views": views * 1e6,
        "problems": problems,
    }
    return row | {"goals": goals(row)}


def goals(row: dict[str, Any]) -> dict[str, bool]:
    """Goal -> whether it was met, of a row of `one_case`."""
    times, tokens = row["microseconds"], row["tokens"]
    percent = PERCENT.get((row["heads"], row["kv_heads"], tokens))
    step, met = times["attention and finish"], {}
    if tokens <= 4096:
        met["6 us over the floor"] = times["attention"] <= row["floor_microseconds"] + 6
    if tokens <= 1024:
        met["a step under 9 us"] = step < 9
    if percent:
        reached = row["percent_of_copy_rate"]["attention"]
        met[f"{percent} percent of the copy rate"] = reached >= percent
    met |= {f"ahead of {name}": step < times[name] for name in times.keys() & OTHERS.keys()}
    return met | {"new views under 15 us of the host": row["host_microseconds_over_views"] < 15}


def small_steps(stopwatch: Any, copy: Lap, repeats: int) -> dict[str, float]:
    """Microseconds on the device of what is added to reading: 16 x 128, each many times in one graph."""
    empty = stopwatch.runtime.zeros(0, np.uint16).reshape(1, 0, 16, HEAD_DIM)
    one, other = Step(stopwatch, 16, 1), Step(stopwatch, 16, 1)
    merge = cuda.MergeOperator(HEAD_DIM, runtime=stopwatch.runtime).planned_merge(
        *(step.records.reshape(16, HEAD_DIM + 2) for step in (one, other))
    )
    calls: dict[str, Lap] = {
        "attention over 0 tokens, 1 split": functools.partial(one.attention, empty, empty),
        "finish": one.finish,
        "merge of two records": merge,
    }
    laps = [roofline_cuda.captured(stopwatch.runtime, [call] * CALLS) for call in calls.values()]
    times = roofline_cuda.median_laps(stopwatch, laps, copy, repeats)
    return {name: time / CALLS * 1e6 for name, time in zip(calls, times, strict=True)}


def combines(stopwatch: Any, copy: Lap, repeats: int) -> list[dict[str, Any]]:
    """What combining splits costs: one sequence in splits, against as many sequences of a split's length in
    one split each. Both have the same blocks over the same bytes; only the first merges what they leave."""
    found = []
    for heads, kv_heads, splits in COMBINES:
        shape = (splits, TOKENS_OF_A_SPLIT, kv_heads, HEAD_DIM)
        k, v = (roofline_cuda.upload_random(stopwatch.runtime, shape, np.dtype(np.uint16), i) for i in (1, 2))
        together, apart = Step(stopwatch, heads, splits), Step(stopwatch, heads, 1, batch=splits)
        whole = (array.reshape(1, -1, kv_heads, HEAD_DIM) for array in (k, v))
        calls = (functools.partial(together.attention, *whole), functools.partial(apart.attention, k, v))
        laps = [roofline_cuda.captured(stopwatch.runtime, [call] * CALLS) for call in calls]
        times = roofline_cuda.median_laps(stopwatch, laps, copy, repeats)
        merged, bare = (time / CALLS * 1e6 for time in times)
        case = {"heads": heads, "kv_heads": kv_heads, "splits": splits}
        numbers = {"one_sequence": merged, "as_many_sequences": bare, "combine": merged - bare}
        found.append(case | {"microseconds": numbers, "goals": {"1.5 us": merged - bare <= 1.5}})
        print(f"{heads}/{kv_heads} heads, {splits} splits: combining adds {merged - bare:.2f} us", flush=True)
    return found


def captured_step(stopwatch: Any, copy: Lap, repeats: int, tokens: int = 65536) -> dict[str, Any]:
    """A step as one graph: that one launch of it does all, its microseconds, and those of the host."""
    (k, v), *_ = roofline_cuda.cold_caches(stopwatch, tokens, 8, "bfloat16")
    step = Step(stopwatch, 32)
    launch = roofline_cuda.captured(stopwatch.runtime, [functools.partial(step.whole, k, v)])
    want = on_host(step.out).copy()
    stopwatch.runtime.upload(step.out, np.full(step.out.shape, np.nan, np.float32))
    roofline_cuda.median_laps(stopwatch, [launch], copy, 1)
    same = bool((on_host(step.out) == want).all())
    (seconds,) = roofline_cuda.median_laps(stopwatch, [launch], copy, repeats)
    host = stopwatch.host_seconds(launch, HOST_CALLS)
    facts = {"tokens": tokens, "one launch gives the result": same}
    return facts | {"microseconds": seconds * 1e6, "host_microseconds": host * 1e6}


def run(
    stopwatch: Any,
    others: Any,
    repeats: int,
    tokens: Sequence[int] = TOKENS,
    keep: Callable[[dict[str, Any]], object] = lambda _: None,
) -> dict[str, Any]:
    """keep: is given what there is after each row, for a machine that may be taken back."""
    copy, moved = roofline_cuda.copy_lap(stopwatch)
    rows: list[dict[str, Any]] = []
    for heads, kv_heads in SHAPES:
        for count in tokens:
            try:
                rows.append(one_case(stopwatch, copy, moved, heads, kv_heads, count, others, repeats))
                show(rows[-1])
            except BackendError as error:
                rows.append({"heads": heads, "kv_heads": kv_heads, "tokens": count, "problem": str(error)})
                print(f"{heads}/{kv_heads} heads, {count} tokens: {error}", flush=True)
            keep({"rows": rows})
    small = small_steps(stopwatch, copy, repeats)
    merged = combines(stopwatch, copy, repeats)
    step = captured_step(stopwatch, copy, repeats, min(65536, max(tokens)))
    print(f"{step}; {small}")
    return {
        "rows": rows,
        "small_steps_microseconds": small,
        "combines": merged,
        "captured_step": step,
    }


def show(row: dict[str, Any]) -> None:
    print(
        "{heads}/{kv_heads} heads, {tokens} tokens: copy {copy_rate_gb_s:.0f} GB/s, "
        "floor {floor_microseconds:.1f} us, host {host_microseconds:.1f} us, "
        "over new views {host_microseconds_over_views:.1f} us".format(**row)
    )
    for name, value in row["microseconds"].items():
        print(f"  {name}: {value:.1f} us, {row['percent_of_copy_rate'][name]:.0f} % of the copy rate")
    for what, met in (row["goals"] | row["problems"]).items():
        print(f"  {what}: {met}", flush=True)


def problem_with(module: str) -> str | None:
    """Why a module cannot be imported."""
    try:
        importlib.import_module(module)
    except Exception as error:  # half-installed packages raise all sorts
        return (f"{error}".strip() or repr(error)).splitlines()[0]
    return None


def main() -> None:
    alone = {"action": "store_true", "help": "compare with nothing, not even torch"}
    options = harness.options(__doc__, repeats=31, alone=alone)
    absent = {name: problem_with(name) for name in OTHERS} if not options.alone else dict.fromkeys(OTHERS, "")
    missing = [cupy_runtime.problem()]
    if absent["torch"]:
        missing.append(f"no torch to compare with ({absent['torch']}): pip install torch, or give --alone")
    if any(missing):
        sys.exit("\n".join(f"gpu_kernel.py: {line}" for line in missing if line))
    software, stopwatch = harness.gpu()
    present = [name for name in OTHERS if absent[name] is None]
    others = {name: functools.partial(captured_by_torch, OTHERS[name]) for name in present}
    versions = {name: getattr(sys.modules[name], "__version__", None) for name in present}
    facts = {"software": software, "others": versions, "not compared with": absent}

    def keep(results: dict[str, Any]) -> None:
        options.write(facts | {"device": stopwatch.facts(), **results})

    results = run(stopwatch, others, options.repeats, keep=keep)
    keep(results)
    said = [why for row in results["rows"] for why in row.get("problems", {}).values()]
    if any(why.startswith(_WRONG) for why in said):
        harness.stop("two answers differ: see the problems of the rows")


if __name__ == "__main__":
    main()

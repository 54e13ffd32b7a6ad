"""How long attention takes in how many splits, and the constants of the cost model that follow from it:

    python benchmarks/gpu_splits.py [--json FILE] [--constants FILE]
    python benchmarks/gpu_splits.py --fit FILE [--constants FILE]

One query, bfloat16, head_dim 128, batch 1, cold L2 cache; splits x query rows of a KV head x tokens x
KV heads.
The constants of treeattn/backends/cuda/splits.py are fitted by least squares of relative errors, and written
with the device and the date: --constants treeattn/backends/cuda/splits.json makes them the package's.
--fit takes what an earlier --json wrote, or docs/results/gpu_splits.json of gpu_day.sh, and needs no GPU.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import harness
import numpy as np

from treeattn.backends import cuda
from treeattn.backends.cuda import splits
from treeattn.backends.cuda.splits import Constants, Load
from treeattn.errors import TreeattnError
from treeattn.study.roofline import cuda as roofline_cuda
from treeattn.study.roofline.cuda import HEAD_DIM

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 41, 48, 64, 96, 128, 132, 192, 256)
ROWS = (1, 4, 8, 16, 128)  # the last are two tiles, which read the same tokens
TOKENS = (1024, 8192, 65536)
KV_HEADS = (1, 8)


def measure(
    stopwatch: Any,
    repeats: int,
    tokens: Sequence[int] = TOKENS,
    numbers: Sequence[int] = SPLITS,
    keep: Callable[[list[dict[str, Any]]], object] = lambda _: None,
) -> list[dict[str, Any]]:
    """A row for each case: what it was, its `Load`, and the median microseconds of a launch. keep: is given
    all rows so far, after each sweep."""
    copy, _ = roofline_cuda.copy_lap(stopwatch)
    found: list[dict[str, Any]] = []
    for kv_heads, count in itertools.product(KV_HEADS, tokens):
        caches = roofline_cuda.cold_caches(stopwatch, count, kv_heads, "bfloat16")
        for rows in ROWS:
            found += _sweep(stopwatch, copy, caches, rows, numbers, repeats)
            print(summary(found[-1], found), flush=True)
            keep(found)
        del caches  # before the next ones are made
    return found


def _sweep(
    stopwatch: Any, copy: Any, caches: Any, rows: int, numbers: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """All numbers of splits over the same caches, in turn."""
    runtime, (k, _) = stopwatch.runtime, caches[0]
    heads = rows * k.shape[2]
    q = roofline_cuda.upload_random(runtime, (1, 1, heads, HEAD_DIM), np.dtype(np.uint16))
    records = runtime.zeros(heads * (HEAD_DIM + 2), np.float32).reshape(1, heads, 1, HEAD_DIM + 2)
    scale = HEAD_DIM**-0.5
    plans = [cuda.PlannedAttention(records, scale=scale, num_splits=n, runtime=runtime) for n in numbers]
    laps = [
        roofline_cuda.captured(runtime, [functools.partial(plan, q, *pair) for pair in caches])
        for plan in plans
    ]
    times = roofline_cuda.median_laps(stopwatch, laps, copy, repeats)
    case = {"kv_heads": k.shape[2], "rows": rows, "tokens": k.shape[1]}
    return [
        case
        | {"splits": plan.splits.number, "fan": plan.splits.fan}
        | {"microseconds": time / len(caches) * 1e6, "load": plan.load._asdict()}
        for plan, time in zip(plans, times, strict=True)
    ]


def _case(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["kv_heads"], row["rows"], row["tokens"]


def summary(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """The fastest of a row's case."""
    best = min((r for r in rows if _case(r) == _case(row)), key=lambda r: r["microseconds"])
    return (
        "{rows} rows, {kv_heads} KV heads, {tokens} tokens: "
        "fastest in {splits} splits, {microseconds:.1f} us".format(**best)
    )


def fit(rows: Sequence[dict[str, Any]], start: Constants, steps: int = 200) -> Constants:
    """The constants for which relative errors of `splits.predict` are least in square.

    By damped Gauss-Newton steps from `start` (Levenberg 1944) on the constants' logarithms, so that each
    stays above 0. One that no row tells anything of stays as it was.
    """
    loads = [Load(**row["load"]) for row in rows]
    measured = np.log([row["microseconds"] for row in rows])

    def errors(logarithms: Any) -> Any:
        constants = Constants(*np.exp(logarithms))
        predicted = [
            splits.predict(load, r["splits"], r["fan"], constants)
            for load, r in zip(loads, rows, strict=True)
        ]
        return np.log(predicted) - measured

    at, damping = np.log(start), 1e-3
    error = errors(at)
    for _ in range(steps):
        slopes = np.stack([(errors(at + unit) - error) / 1e-6 for unit in 1e-6 * np.eye(len(at))], axis=1)
        square = slopes.T @ slopes
        step = np.linalg.solve(square + damping * np.eye(len(at)), -slopes.T @ error)
        tried = errors(at + np.clip(step, -1, 1))
        if tried @ tried < error @ error:
            at, error, damping = at + np.clip(step, -1, 1), tried, damping / 10
        else:
            damping *= 10
        if np.abs(step).max() < 1e-9 or damping > 1e12:
            break
    return Constants(*map(float, np.exp(at)))


def judge(rows: Sequence[dict[str, Any]], constants: Constants) -> dict[str, float]:
    """How far predictions are off, and how much slower than the fastest measured number of splits is the one
    with the least predicted time. Percent; over the cases."""
    predicted = [float(splits.predict(Load(**r["load"]), r["splits"], r["fan"], constants)) for r in rows]
    off = [abs(p / r["microseconds"] - 1) for p, r in zip(predicted, rows, strict=True)]
    slower = []
    for case in {_case(row) for row in rows}:
        own = [(p, r["microseconds"]) for p, r in zip(predicted, rows, strict=True) if _case(r) == case]
        slower.append(min(own)[1] / min(time for _, time in own) - 1)
    return {
        "median_error_percent": 100 * float(np.median(off)),
        "largest_error_percent": 100 * max(off),
        "median_choice_slower_percent": 100 * float(np.median(slower)),
        "largest_choice_slower_percent": 100 * max(slower),
    }


def constants_file(constants: Constants, device: str, date: str) -> dict[str, Any]:
    """What `splits.shipped` reads."""
    return {
        "source": "measured by benchmarks/gpu_splits.py",
        "device": device,
        "date": date,
        "microseconds": {name: float(f"{value:.4g}") for name, value in constants._asdict().items()},
    }


def measured_before(path: Path) -> dict[str, Any]:
    """What an earlier --json wrote, also where gpu_day.sh put machine and command around it.

    Raises `ValueError` where nothing of that kind lies there.
    """
    facts = json.loads(path.read_text())
    if isinstance(facts, dict) and "step" in facts:
        facts = facts.get("result")
    if not isinstance(facts, dict) or not facts.get("rows"):
        raise ValueError(f"{path} holds no rows: --fit takes what --json wrote")
    return facts


def measured_now(repeats: int, write: Callable[[Any], object]) -> dict[str, Any]:
    """write: is given what there is after each sweep: --fit takes that too."""
    software, stopwatch = harness.gpu()
    date = datetime.now(timezone.utc).date().isoformat()
    facts = {"software": software, "device": stopwatch.facts(), "date": date}
    rows = measure(stopwatch, repeats, keep=lambda found: write(facts | {"rows": found}))
    return facts | {"rows": rows}


def main() -> None:
    options = harness.options(
        __doc__,
        constants={"type": Path, "help": "write the fitted constants here"},
        fit={"type": Path, "help": "fit what an earlier --json wrote; nothing is measured"},
        repeats=11,
    )
    write_constants = harness.writer(options.constants)  # before measuring
    try:
        results = (
            measured_before(options.fit) if options.fit else measured_now(options.repeats, options.write)
        )
        rows, device, date = results["rows"], results["device"]["name"], results["date"]
        constants = fit(rows, splits.shipped())
    except (TreeattnError, OSError, ValueError, KeyError, TypeError) as error:
        harness.stop(repr(error) if isinstance(error, KeyError) else error)
    results |= {"constants": constants._asdict(), "fit": judge(rows, constants)}
    print(json.dumps({"constants": results["constants"], "fit": results["fit"]}, indent=1))
    options.write(results)
    write_constants(constants_file(constants, device, date))


if __name__ == "__main__":
    main()

"""Results of compare as other tools read them: CSV, Parquet, and what OSU's and NCCL's benchmarks print."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from itertools import groupby
from statistics import fmean, median
from typing import Any

from msgspec.structs import asdict

from treeattn.errors import ArgumentError, BackendError
from treeattn.report import as_json
from treeattn.study.compare.results import Results, Summary, compared_series, lacking, summarise
from treeattn.study.compare.schema import NULL, SUM, Key
from treeattn.study.figures.cases import PAYLOAD

_OF_SERIES: dict[str, Callable[[list[float]], float]] = {
    "median": median,
    "mean": fmean,
    "min": min,
    "max": max,
}
_TYPES = {"float32": "float", "bfloat16": "bfloat16", "float64": "double"}  # as NCCL's tests call them


def _bytes(key: Key) -> int:
    return int(PAYLOAD.value(key))


def _rows(found: Results) -> list[dict[str, Any]]:
    """A row for each block and series of times, all of them in microseconds; how many iterations it had."""
    rows = []
    for point in found.points:
        run, own = found.runs[point.run], point.of_ranks
        facts = {"label": point.key.label, **asdict(point.key), "record_bytes": _bytes(point.key)}
        facts |= {"run": point.run, "started": run.started}
        facts |= {"commit": run.software.git, "mpi": run.software.mpi}
        facts |= {"launch": point.launch, "repetition": point.repetition, "late": point.late}
        facts |= {f"rank_{name}_us": choose(own) if own else None for name, choose in _OF_SERIES.items()}
        facts["slowest_rank"] = own.index(max(own)) if own else None
        for series, times in point.samples.items():
            row = facts | {"series": series, "iterations": len(times)}
            row |= {f"{name}_us": choose(times) for name, choose in _OF_SERIES.items()}
            rows.append({name: " ".join(v.split()) if isinstance(v, str) else v for name, v in row.items()})
    return rows


def _csv(found: Results) -> bytes:
    made, rows = io.StringIO(), _rows(found)
    writer = csv.DictWriter(made, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return made.getvalue().encode()


def _parquet(found: Results) -> bytes:
    """The same as the columns of a Parquet file. Raises `BackendError` without pyarrow."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise BackendError(f"Parquet needs pyarrow ({error}): pip install 'treeattn[parquet]'") from None
    stream = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(_rows(found)), stream)
    return stream.getvalue()


def _by_size(found: Results) -> Iterator[tuple[str, list[tuple[Summary, str]]]]:
    """What is alike but for the size of the records: a title, and summaries from small to large with the
    series that their case is compared by."""
    every = summarise(found)
    summaries = [s for s in every if s.key.what == "reduce" and s.key.scheme != NULL]
    if not summaries:
        raise ArgumentError("these results have no reductions (compare --what reduce), as this form has")
    cases = {s.key.case: compared_series(t for t in every if t.key.case == s.key.case) for s in summaries}

    def title(summary: Summary) -> str:
        key = summary.key
        late = f", arrivals {key.arrivals}" if key.arrivals != "together" else ""
        return f"{key.label}, {key.ranks} ranks, records as {key.wire}{late}; {summary.version}"

    for name, group in groupby(sorted(summaries, key=lambda s: (title(s), _bytes(s.key))), title):
        rows = list(group)
        yield "; ".join(filter(None, (name, lacking(rows)))), [(row, cases[row.key.case]) for row in rows]


def _osu(found: Results) -> bytes:
    """The text of OSU's latency tests; times are medians over iterations of the slowest rank's."""
    lines = []
    for title, rows in _by_size(found):
        lines += [f"# {title}", f"# median {rows[0][1]}", f"{'# Size':<12}{'Avg Latency(us)':>20}"]
        lines += [f"{_bytes(row.key):<12}{row.times[series].median:>20.2f}" for row, series in rows]
        lines.append("")
    return "\n".join(lines).encode()


def _measured(row: Summary, series: str) -> tuple[float, float, float, int | None]:
    """Microseconds, algorithm and bus bandwidth in 10^9 bytes a second, and whether the result was wrong."""
    time, ranks = row.times[series].median, row.key.ranks
    algorithm = _bytes(row.key) / time / 1e3
    facts = row.facts
    judged = row.key.scheme != SUM
    wrong = judged and any(not facts[f"error_{part}"] <= facts[f"bound_{part}"] for part in ("out", "lse"))
    return time, algorithm, algorithm * 2 * (ranks - 1) / ranks, int(wrong) if judged else None


def _identity(key: Key) -> tuple[int, int, str, str, int]:
    size, wide = _bytes(key), {"bfloat16": 2, "float64": 8}.get(key.wire, 4)
    return size, size // wide, _TYPES[key.wire], "sum" if key.scheme == SUM else "merge", -1


def _nccl(found: Results) -> bytes:
    """The table of nccl-tests. A reduction here is in place: its figures stand in both halves."""
    lines = []
    for title, rows in _by_size(found):
        lines += [f"# {title}", f"# median {rows[0][1]}, in place, in both halves", "#"]
        half = f"{'time':>8}{'algbw':>8}{'busbw':>8}{'#wrong':>7}"
        units = f"{'(us)':>8}{'(GB/s)':>8}{'(GB/s)':>8}{'':>7}"
        lines.append(f"#{'size':>11}{'count':>14}{'type':>10}{'redop':>8}{'root':>8}{half}{half}")
        lines.append(f"#{'(B)':>11}{'(elements)':>14}{'':>10}{'':>8}{'':>8}{units}{units}")
        for row, series in rows:
            time, algorithm, bus, wrong = _measured(row, series)
            shown = f"{time:>8.2f}{algorithm:>8.3f}{bus:>8.3f}{'N/A' if wrong is None else wrong:>7}"
            size, count, kind, operator, root = _identity(row.key)
            lines.append(f"{size:>12}{count:>14}{kind:>10}{operator:>8}{root:>8}{shown}{shown}")
        lines.append("")
    return "\n".join(lines).encode()


def _nccl_json(found: Results) -> bytes:
    """The JSON of nccl-tests: of one scheme over all sizes."""
    tables = list(_by_size(found))
    if len(tables) > 1:
        titles = "; ".join(title for title, _ in tables)[:300]
        raise ArgumentError(f"this form is of one scheme on as many ranks: choose by --scheme ({titles})")
    results = []
    for row, series in tables[0][1]:
        size, count, kind, operator, root = _identity(row.key)
        measured = dict(zip(("time", "alg_bw", "bus_bw", "nwrong"), _measured(row, series), strict=True))
        table = {"size": size, "count": count, "type": kind, "redop": operator, "root": root}
        results.append(table | {"out_of_place": measured, "in_place": measured})
    ranks = found.runs[found.points[0].run].used(found.points[0].key.place)
    devices = [{"rank": n, "hostname": r.host, "device": r.gpu or r.cpu} for n, r in enumerate(ranks)]
    return as_json({"title": tables[0][0], "config": {"devices": devices}, "results": results})


#: Name on the command line -> what writes it.
FORMATS: dict[str, Callable[[Results], bytes]] = {
    "csv": _csv,
    "parquet": _parquet,
    "osu": _osu,
    "nccl-tests": _nccl,
    "nccl-tests-json": _nccl_json,
}

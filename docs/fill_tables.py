"""Writes the tables of results into the pages that show them: python docs/fill_tables.py

What stands between one of these and `<!-- end -->` is replaced; a test fails while a page shows others.

    <!-- table FILE:PATH; .. | KEY as HEADING; .. -->    of JSON files in docs/results
    <!-- compare FILE .. | SCHEME; .. -->                of reductions that `treeattn compare --out` wrote
    <!-- schemes RANKS -->                               the catalogue, and what its schedules cost

A path leads through keys, indices and names, as `experiments/latency/model/0`, to a table, a list of rows or
one row; the key `source` says which. `KEY=VALUE,VALUE` keeps the rows which have one of these values, `KEY%`
shows percent. Without other keys a table shows all of its columns, and `compare` all schemes without names.
Files of a GPU that are not there yet are said to be missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from treeattn.collectives import build, check, needs_nodes
from treeattn.selection import CATALOG
from treeattn.study.compare.rows import read
from treeattn.study.compare.summary import Summary, summarise
from treeattn.study.paper import shown

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS / "results"
BLOCK = re.compile(r"(<!-- (table|compare|schemes) (.+?) -->\n).*?<!-- end -->", re.DOTALL)


def filled(page: str) -> str:
    """The text of a page with every table as the results have it."""
    return BLOCK.sub(lambda block: f"{block[1]}\n{globals()[block[2]](block[3])}\n\n<!-- end -->", page)


def table(words: str) -> str:
    """Rows of JSON files, with the columns that are named."""
    sources, _, columns = words.partition(" | ")
    rows: list[Any] = []
    for source in sources.split("; "):
        file, _, path = source.partition(":")
        if file.startswith("gpu_") and not (RESULTS / file).exists():
            return "Not measured yet."
        found = _at(json.loads((RESULTS / file).read_text()), path)
        if "headings" in found:
            found = [dict(zip(found["headings"], row, strict=True)) for row in found["rows"]]
        found = found if isinstance(found, list) else [found]
        rows += [{"source": source.rstrip(":")} | row for row in found]
    shows = {}
    for column in filter(None, columns.split("; ")):
        key, _, heading = column.partition(" as ")
        key, is_filter, values = key.partition("=")
        wanted = re.split(",(?! )", values)  # "bfloat16, 4 heads" is one value
        rows = [row for row in rows if not is_filter or str(_at(row, key)) in wanted]
        shows |= {} if is_filter and not heading else {key: heading or key}
    shows = shows or {key: key for key in rows[0] if key != "source"}
    return _markdown(list(shows.values()), [[_cell(row, key) for key in shows] for row in rows])


def _at(found: Any, path: str) -> Any:
    if isinstance(found, dict) and path in found:
        return found[path]
    for part in filter(None, path.split("/")):
        if isinstance(found, list) and not part.isdigit():
            found = next(entry for entry in found if entry["name"] == part)
        else:
            found = found[int(part) if isinstance(found, list) else part]
    return found


def _cell(row: Any, key: str) -> str:
    if key.endswith("%"):
        return f"{100 * _at(row, key[:-1]):.3g} %"
    return shown(_at(row, key))


def compare(words: str) -> str:
    """Schemes as rows, in the order of the first file's; ratios to the sum, and messages in a row."""
    chosen, _, only = words.partition(" | ")
    headings, cells = ["scheme"], {}
    for file in chosen.split():
        rows = summaries(file)
        crossing = len(set(next(iter(rows.values()))["nodes"])) > 1
        where = file.partition(".")[0].partition("_")[2]
        headings += [f"{where}: ratio", "95 % interval"]
        headings += ["in a row"] if crossing else []
        for scheme, row in rows.items():
            known = CATALOG.get(scheme)
            cells.setdefault(scheme, []).extend([
                f"{row['ratio']:.2f}",
                f"{row['ratio_low']:.2f}\u00a0to\u00a0{row['ratio_high']:.2f}" if row["ratio_low"] else "-",
            ])  # fmt: skip
            if crossing:
                cells[scheme].append(str(in_a_row(row)) if known and known.generator else "-")
    return _markdown(headings, [[name, *cells[name]] for name in (only.split("; ") if only else cells)])


def summaries(file: str) -> dict[str, Summary]:
    """Scheme -> summary, of the reductions. Raises `ValueError` for results of several versions or cases."""
    rows = [row for row in summarise(read(RESULTS / file)) if row["what"] == "reduce"]
    if len({row["label"] for row in rows}) != len(rows):
        raise ValueError(f"{file} has not one case of reductions: a row is one scheme's")
    return {row["scheme"]: row for row in rows}


def in_a_row(row: Summary) -> int:
    """The most messages between nodes of which each waits for the one before: what a rank sends in a round
    waits for all that it was sent in the rounds before."""
    nodes: list[int] = row["nodes"]
    waited = [0] * len(nodes)
    groups = [[rank for rank, on in enumerate(nodes) if on == node] for node in sorted(set(nodes))]
    schedule = build(row["scheme"], len(nodes), nodes=groups if needs_nodes(row["scheme"]) else None)
    sent = schedule.traffic(row["batch"] * row["heads"] * row["queries"], row["queries"])
    for _, of_round in groupby(sent, lambda message: message.round):
        before = list(waited)
        for _, src, dst, *_ in of_round:
            waited[dst] = max(waited[dst], before[src] + (nodes[src] != nodes[dst]))
    return max(waited)


def schemes(ranks: str) -> str:
    """The catalogue, and what its proofs say of schedules on nodes of 4 ranks."""
    rows = []
    for scheme in CATALOG.values():
        costs = ["-"] * 3
        if scheme.generator:
            nodes = (4,) * (int(ranks) // 4) if needs_nodes(scheme.name) else None
            known = check(build(scheme.name, int(ranks), nodes=nodes))
            costs = [str(cost) for cost in (known.determinism, known.rounds, known.messages)]
        rows.append([f"`{scheme.name}`", scheme.summary, *costs])
    return _markdown(["scheme", "what it is", "class", "rounds", "messages"], rows)


def _markdown(headings: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headings, ["---"] * len(headings), *rows))


if __name__ == "__main__":
    for page in [*DOCS.glob("*.md"), RESULTS / "README.md", DOCS.parent / "README.md"]:
        text = page.read_text()
        if filled(text) != text:
            page.write_text(filled(text))
            print(f"filled {page.name}")

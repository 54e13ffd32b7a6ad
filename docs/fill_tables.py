"""Writes the tables of results into the pages that show them: python docs/fill_tables.py

A page has one of

    <!-- table FILE EXPERIMENT KIND INDEX -->     what `treeattn paper --json` wrote
    <!-- compare WHAT TOKENS FILE ... -->         what `treeattn compare --out` wrote, files side by side
    <!-- beside FILE -->                          what `benchmarks/side_by_side.py --json` wrote
    <!-- rivals -->                               what is beaten and what is not, from several of them
    <!-- gpu NAME -->                             what `benchmarks/gpu_day.sh` wrote (gpu_tables.py)
    <!-- published NAME -->                       what `treeattn published --json` wrote (published_tables.py)
    <!-- simulator NAME -->                       the simulator beside others (simulator_tables.py)
    <!-- executors RANKS ... -->                  what `benchmarks/reduction.py --json` wrote, for each number
    <!-- nodes FILE -->                           the same over emulated nodes: executors side by side
    <!-- llama FILE -->                           what `benchmarks/llama.py --json` wrote
    <!-- costs RANKS ... -->                      what the schedules of the catalogue cost, by their proofs

and `<!-- end -->`; what stands between is replaced by that table of docs/results/FILE. Numbers are never
typed by hand, and a test fails while a page shows others than the results.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from treeattn.collectives import Schedule, build, check, needs_nodes
from treeattn.collectives.catalog import CATALOG
from treeattn.collectives.traffic import messages
from treeattn.study.compare.results import Summary, compared_series, read, summarise
from treeattn.study.compare.schema import NULL, SUM
from treeattn.study.paper import shown

DOCS = Path(__file__).resolve().parent
sys.path.append(str(DOCS))
import gpu_tables  # noqa: E402
import published_tables  # noqa: E402
import simulator_tables  # noqa: E402

PAPER = re.compile(
    r"<!-- table (\S+) (\S+) (model|measured|predictions) (\d+) -->\n.*?<!-- end -->", re.DOTALL
)
COMPARED = re.compile(r"<!-- compare (reduce|decode) (\d+)((?: \S+\.jsonl)+) -->\n.*?<!-- end -->", re.DOTALL)

BESIDE = re.compile(r"<!-- beside (\S+) -->\n.*?<!-- end -->", re.DOTALL)
RIVALS = re.compile(r"<!-- (rivals) -->\n.*?<!-- end -->", re.DOTALL)
GPU = re.compile(rf"<!-- gpu ({'|'.join(gpu_tables.TABLES)}) -->\n.*?<!-- end -->", re.DOTALL)
PUBLISHED = re.compile(
    rf"<!-- published ({'|'.join(published_tables.TABLES)}) -->\n.*?<!-- end -->", re.DOTALL
)
SIMULATOR = re.compile(
    rf"<!-- simulator ({'|'.join(simulator_tables.TABLES)}) -->\n.*?<!-- end -->", re.DOTALL
)
EXECUTORS = re.compile(r"<!-- executors((?: \d+)+) -->\n.*?<!-- end -->", re.DOTALL)
COSTS = re.compile(r"<!-- costs((?: \d+)+) -->\n.*?<!-- end -->", re.DOTALL)
LLAMA = re.compile(r"<!-- llama (\S+) -->\n.*?<!-- end -->", re.DOTALL)
NODES = re.compile(r"<!-- nodes (\S+) -->\n.*?<!-- end -->", re.DOTALL)
KINDS = (PAPER, COMPARED, BESIDE, RIVALS, GPU, PUBLISHED, SIMULATOR, EXECUTORS, COSTS, NODES, LLAMA)

# What stands against `hierarchical` in the README: words, file, what was timed, tokens, scheme.
_RIVALS = (
    ("Ring Attention (`kv_ring`), 4 ranks", "compare_4.jsonl", "decode", 65536, "kv_ring"),
    ("three all-reduces as in the paper, 4 emulated nodes x 2 ranks, 1 ms apart: the reduction",
     "cluster_block.jsonl", "reduce", 0, "three_allreduce"),
    ("the MPI library's sum of as many bytes, there", "cluster_block.jsonl", "reduce", 0, SUM),
    ("the same sum, 4 ranks on one machine", "compare_4.jsonl", "reduce", 0, SUM),
)  # fmt: skip


def filled(page: str) -> str:
    """The text of a page with every table as the results have it."""
    page = PAPER.sub(lambda block: _block(block[0], _of_the_paper(*block.groups())), page)
    page = COMPARED.sub(lambda block: _block(block[0], _compared(*block.groups())), page)
    page = BESIDE.sub(lambda block: _block(block[0], _beside(*block.groups())), page)
    page = GPU.sub(lambda block: _block(block[0], _of_the_gpu(block[1])), page)
    page = PUBLISHED.sub(
        lambda block: _block(block[0], _markdown(*published_tables.TABLES[block[1]]())), page
    )
    page = SIMULATOR.sub(
        lambda block: _block(block[0], _markdown(*simulator_tables.TABLES[block[1]]())), page
    )
    page = EXECUTORS.sub(lambda block: _block(block[0], _executors(block[1])), page)
    page = LLAMA.sub(lambda block: _block(block[0], _llama(block[1])), page)
    page = NODES.sub(lambda block: _block(block[0], _over_nodes(block[1])), page)
    page = COSTS.sub(lambda block: _block(block[0], _costs(block[1])), page)
    return RIVALS.sub(lambda block: _block(block[0], _rivals()), page)


def _block(old: str, table: str) -> str:
    return f"{old.splitlines()[0]}\n\n{table}\n\n<!-- end -->"


def _of_the_paper(file: str, name: str, kind: str, index: str) -> str:
    facts = json.loads((DOCS / "results" / file).read_text())
    experiment = next(entry for entry in facts["experiments"] if entry["name"] == name)
    table = experiment[kind][int(index)]
    return _markdown(table["headings"], [[shown(cell) for cell in row] for row in table["rows"]])


def _of_the_gpu(name: str) -> str:
    found = gpu_tables.TABLES[name]()
    return found if isinstance(found, str) else _markdown(*found)


def _compared(what: str, tokens: str, files: str) -> str:
    """Schemes as rows, in the order of the first file's medians; for each file its times and its traffic."""
    columns = [_summaries(file, what, int(tokens)) for file in files.split()]
    placements = [_nodes(file) for file in files.split()]
    crossing = any(len(set(nodes)) > 1 for nodes in placements)
    headings = ["scheme"]
    series = [compared_series(column.values()) for column in columns]
    for file, compared in zip(files.split(), series, strict=True):
        name = Path(file).stem.partition("_")[2]
        since = ", from the last entry" if compared == "after_last_entry" else ""
        headings += [f"{name}: median, µs{since}", "95 % interval", "x SUM"]
        headings += ["messages between nodes", "in a row", "bytes"] if crossing else []
    order = sorted(columns[0], key=lambda scheme: columns[0][scheme].times[series[0]].median)
    rows = [[scheme] for scheme in order]
    for row in rows:
        for column, nodes, compared in zip(columns, placements, series, strict=True):
            row += _times(column, row[0], compared) + (_traffic(column[row[0]], nodes) if crossing else [])
    return _markdown(headings, rows)


def _summaries(file: str, what: str, tokens: int) -> dict[str, Summary]:
    """Scheme -> summary. Raises `ValueError` for results of several versions or cases, or not readable."""
    results = read(DOCS / "results" / file)
    if results.problems:
        raise ValueError("; ".join(results.problems))
    rows = [row for row in summarise(results) if (row.key.what, row.key.tokens) == (what, tokens)]
    if len({row.key.case for row in rows}) != 1:
        raise ValueError(f"{file} has not one case of {what} with {tokens} tokens: a row is one scheme's")
    return {row.key.scheme: row for row in rows}


def _nodes(file: str) -> list[int]:
    """The node of each rank. Runs of one version, which `_summaries` asks for, have one placement."""
    run = next(iter(read(DOCS / "results" / file).runs.values()))
    return [rank.node for rank in run.ranks]


def _times(column: dict[str, Summary], scheme: str, series: str) -> list[str]:
    time, of_sum = (column[name].times[series] for name in (scheme, SUM))
    interval = "-" if time.low is None or time.high is None else f"{_us(time.low)} to {_us(time.high)}"
    return [_us(time.median), interval, "-" if scheme == NULL else f"{time.median / of_sum.median:.2f}"]


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _traffic(row: Summary, nodes: list[int]) -> list[str]:
    """Messages between nodes, how many of them in a row, and bytes, of all ranks."""
    sent, known = row.facts["sent"], CATALOG.get(row.key.scheme)
    if row.key.scheme == NULL:
        return ["-"] * 3
    if sent is None or "unknown" in sent:
        return ["library", "-", "library"]
    count, size = sent["inter"]
    return [f"{count:,}", str(_in_a_row(row, nodes)) if known and known.generator else "-", f"{size:,}"]


def _in_a_row(row: Summary, nodes: list[int]) -> int:
    """The most messages between nodes of which each waits for the one before: what a rank sends in a round
    waits for all that it was sent in the rounds before."""
    key, waited = row.key, [0] * len(nodes)
    groups = [[rank for rank, on in enumerate(nodes) if on == node] for node in sorted(set(nodes))]
    schedule = build(key.scheme, len(nodes), nodes=groups if needs_nodes(key.scheme) else None)
    sent = messages(schedule, key.batch * key.heads * key.queries, key.queries)
    for _, of_round in groupby(sent, lambda message: message.round):
        before = list(waited)
        for _, src, dst, *_ in of_round:
            waited[dst] = max(waited[dst], before[src] + (nodes[src] != nodes[dst]))
    return max(waited)


def _beside(file: str) -> str:
    """Our step, the other package's and bare reading; one column for each type."""
    results = json.loads((DOCS / "results" / file).read_text())["results"]
    columns = [_beside_cells(facts) for facts in results]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return _markdown(["", *(facts["dtype"] for facts in results)], rows)


def _beside_cells(facts: dict[str, Any]) -> dict[str, str]:
    times, errors, dtype = facts["milliseconds"], facts["errors"], facts["dtype"]
    faster, slower = facts["times_faster"]["tree_attn_decode"]["median"], facts["times_reading"]["median"]
    goal, most = facts["times_faster_goal"], facts["times_reading_goal"]
    return {
        "treeattn, ms": f"{times['treeattn']['median']:.1f}",
        "`tree_attn_decode`, ms": f"{times['tree_attn_decode']['median']:.1f}",
        "reading the shard once, both ranks at a time, ms": f"{times['reading the shard']['median']:.1f}",
        "`tree_attn_decode` / treeattn": f"{faster:.2f}, goal {goal} {_verdict(faster >= goal)}",
        "the most that any step could reach, by reading": f"{facts['times_faster_limit']['median']:.2f}",
        "treeattn / reading": f"{slower:.2f}, goal {most} {_verdict(slower <= most)}",
        "largest error, treeattn": f"{errors['treeattn']['max']:.1e}",
        "rounded to the cache's type": f"{errors[f'treeattn, rounded to {dtype}']['max']:.1e}",
        "largest error, `tree_attn_decode`": f"{errors['tree_attn_decode']['max']:.1e}",
    }


def _llama(file: str) -> str:
    """A decoded token of each case, in milliseconds."""
    facts = json.loads((DOCS / "results" / file).read_text())
    rows = [
        [
            row["case"],
            f"{row['step_ms']:.1f}",
            f"{row['step_ms_fastest']:.1f}",
            f"{row['first_token_s']:.1f}",
            f"{row['peak_bytes'] / 1e6:.0f}" if "peak_bytes" in row else "-",
        ]
        for row in facts["rows"]
    ]
    for scheme in ("hierarchical", "kv_ring"):
        alone = facts["attention"][scheme]
        name = f"attention and its communication alone, 4 ranks, `{scheme}`"
        rows.append([name, f"{alone['ms']:.1f}", f"{alone['ms_fastest']:.1f}", "-", "-"])
    headings = ["", "a token, ms", "the fastest, ms", "first token, s", "memory of a rank at most, MB"]
    return _markdown(headings, rows)


def _rivals() -> str:
    """Another's time, ours, and how many times as fast ours is."""
    rows = [*_beside_rivals("side_by_side.json")]
    for what, file, timed, tokens, rival in _RIVALS:
        summaries = _summaries(file, timed, tokens)
        series = compared_series(summaries.values())
        theirs, ours = (summaries[name].times[series].median / 1000 for name in (rival, "hierarchical"))
        rows.append(_rival(what, theirs, ours, theirs / ours, file))
    return _markdown(["against", "theirs, ms", "ours, ms", "times as fast", "file"], rows)


def _beside_rivals(file: str) -> Iterator[list[str]]:
    """The other package, and bare reading; the ratio is the median of those of interleaved rounds."""
    for facts in json.loads((DOCS / "results" / file).read_text())["results"]:
        times = {name: time["median"] for name, time in facts["milliseconds"].items()}
        package = f"`tree_attn_decode` of ring-attention-pytorch, 2 ranks, {facts['dtype']}"
        faster = facts["times_faster"]["tree_attn_decode"]["median"]
        yield _rival(package, times["tree_attn_decode"], times["treeattn"], faster, file)
        slower = facts["times_reading"]["median"]
        yield _rival(
            "only reading the cache, there", times["reading the shard"], times["treeattn"], 1 / slower, file
        )


def _rival(what: str, theirs: float, ours: float, ratio: float, file: str) -> list[str]:
    numbers = (f"{value:#.3g}".rstrip(".") for value in (theirs, ours, ratio))
    return [what, *numbers, f"[{file}](docs/results/{file})"]


# Goals of benchmarks/reduction.py by ranks; of two, where cores share a cache and where they do not.
_GOALS = {
    ("recursive_doubling", "slots"): {"2": "0.35; 0.65", "4": "0.4", "8": "0.4"},
    ("recursive_doubling", "program"): {"2": "1.2; 1.3"},
    ("binary_tree", "slots"): {"2": "0.5; 1.05"},
}

# Of slots, as part of what Python takes, over emulated nodes.
_NODES_GOALS = {"hierarchical": 0.7}


def _executors(sizes: str) -> str:
    """Ratios to the library's sum, of the medians and of the fastest repeats, with the goals in brackets."""
    found = {}
    for size in sizes.split():
        facts = json.loads((DOCS / "results" / f"reduction_{size}.json").read_text())
        found[size] = {(row["scheme"], row["executor"]): row for row in facts["rows"]}
    headings = ["scheme", "executor", *(f"{size} ranks" for size in found)]
    rows = []
    for scheme in ("recursive_doubling", "binary_tree", "hierarchical"):
        for executor in ("slots", "program", "mpi"):
            goals = _GOALS.get((scheme, executor), {})
            cells = [_ratios(rows_of[scheme, executor], goals.get(size)) for size, rows_of in found.items()]
            rows.append([f"`{scheme}`", executor, *cells])
    return _markdown(headings, rows)


def _over_nodes(file: str) -> str:
    """Medians of each executor, and what slots take of the time of Python, with the goal."""
    facts = json.loads((DOCS / "results" / file).read_text())
    times = {(row["scheme"], row["executor"]): row["median_us"] for row in facts["rows"]}
    rows = []
    for scheme in ("hierarchical", "binary_tree", "recursive_doubling"):
        of_each = [times[scheme, executor] for executor in ("slots", "program", "mpi")]
        ratio, goal = of_each[0] / of_each[2], _NODES_GOALS.get(scheme)
        judged = f", goal {goal} {_verdict(ratio <= goal)}" if goal else ""
        rows.append([f"`{scheme}`", *map(_us, of_each), f"{ratio:.2f}{judged}"])
    return _markdown(["scheme", "slots, µs", "program, µs", "mpi, µs", "slots / mpi"], rows)


def _ratios(row: dict[str, Any], goal: str | None) -> str:
    return f"{row['ratio']:.2f}, {row['ratio_of_best']:.2f}" + (f" ({goal})" if goal else "")


def _costs(sizes: str) -> str:
    """What the proof says of each schedule, on nodes of 4 ranks where a scheme has nodes."""
    headings = ["scheme", "class", *(f"{size} ranks" for size in sizes.split())]
    rows = []
    for name in [row.name for row in CATALOG.values() if row.generator]:
        schedules = [_on_nodes_of_4(name, int(size)) for size in sizes.split()]
        classes = dict.fromkeys(check(schedule).determinism for schedule in schedules)
        rows.append([f"`{name}`", ", ".join(classes), *map(_cost, schedules)])
    return _markdown(headings, rows)


def _on_nodes_of_4(name: str, size: int) -> Schedule:
    return build(name, size, nodes=(4,) * (size // 4) if needs_nodes(name) else None)


def _cost(schedule: Schedule) -> str:
    known, sent = check(schedule), Counter[int]()
    for transfer in (t for round_ in schedule.rounds for t in round_):
        sent[transfer.src] += len(transfer.chunks)
    most = max(sent.values()) / schedule.chunks
    return f"{known.rounds} · {known.depth} · {known.messages} · {most:.2f}"


def _verdict(met: bool) -> str:
    return "met" if met else "missed"


def _markdown(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headings, ["---"] * len(headings), *rows))


if __name__ == "__main__":
    for page in [*DOCS.glob("*.md"), DOCS / "results/README.md", DOCS.parent / "README.md"]:
        text = page.read_text()
        if filled(text) != text:
            page.write_text(filled(text))
            print(f"filled {page.name}")

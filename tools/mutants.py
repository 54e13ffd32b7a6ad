"""Plants small faults, one at a time, and asks the tests that reach them: what no test notices is a gap.

Usage: python tools/mutants.py --count 100 --out build/mutants SOURCE.py .. [KERNEL.c ..]

The mutants are drawn by a seed from all places in the sources. A first run with coverage says which test
functions reach which line, in processes that tests start and on 3 ranks too, and which fail without a fault:
those kill nothing. It is kept beside the results, as is every verdict: a run that was cut off goes on.
`report.md` lists the survivors with their change. Kernels have no coverage: `KERNEL_TESTS` says which tests
run them.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

import coverage

ROOT = Path.cwd()
MPIEXEC = str(Path(sys.executable).with_name("mpiexec"))
KERNEL_TESTS = {"kernels/cpu": ["tests/unit/backends"], "kernels/cuda": ["tests/emulator"]}
SWAPS = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "+": "-",
    "-": "+",
    "*": "+",
    "/": "*",
    "//": "*",
    "%": "//",
    "&": "|",
    "|": "&",
    "<<": ">>",
    ">>": "<<",
    "&&": "||",
    "||": "&&",
    "and": "or",
    "or": "and",
    "in": "not in",
    "not in": "in",
    "is": "is not",
    "is not": "is",
}


class Mutant(NamedTuple):
    """Bytes `start` to `end` of a source, and what takes their place."""

    file: str
    start: int
    end: int
    text: str


def python_mutants(file: str, source: bytes) -> Iterator[Mutant]:
    """Every small change of the code; none of annotations, docstrings and text."""
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def begin(node: ast.expr | ast.stmt) -> int:
        return lines[node.lineno - 1] + node.col_offset

    def end(node: ast.expr | ast.stmt) -> int:
        return lines[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)

    def between(left: ast.expr, right: ast.expr) -> Iterator[Mutant]:
        gap = source[end(left) : begin(right)].decode()
        found = re.search(r"not\s+in|is\s+not|and|or|in|is|<<|>>|//|[<>=!]=|[<>+\-*/%&|]", gap)
        if found and (word := " ".join(found[0].split())) in SWAPS:
            yield Mutant(file, end(left) + found.start(), end(left) + found.end(), SWAPS[word])

    for node in nodes(ast.parse(source)):
        match node:
            case ast.Compare(left=left, comparators=[right, *_]) | ast.BinOp(left=left, right=right):
                yield from between(left, right)
            case ast.BoolOp(values=[left, right, *_]):
                yield from between(left, right)
            case ast.Constant(value=bool(value)):
                yield Mutant(file, begin(node), end(node), str(not value))
            case ast.Constant(value=int(value)):
                yield Mutant(file, begin(node), end(node), str(value + 1))
            case ast.Constant(value=float(value)):
                yield Mutant(file, begin(node), end(node), repr(2 * value + 1))
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
                yield Mutant(file, begin(node), begin(operand), "")
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                yield Mutant(
                    file, begin(test), end(test), f"not ({source[begin(test) : end(test)].decode()})"
                )
            case ast.Call(args=[first, second, *_]) if not isinstance(first, ast.Starred):
                a, b = (source[begin(x) : end(x)] for x in (first, second))
                gap = source[end(first) : begin(second)]
                yield Mutant(file, begin(first), end(second), (b + gap + a).decode())
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break():
                yield Mutant(file, begin(node), end(node), "pass")
            case ast.Return(value=ast.expr()):
                yield Mutant(file, begin(node), end(node), "return None")


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All but annotations, text with values, and `__all__`."""
    yield tree
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "type_params") or isinstance(tree, ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from nodes(child)


def kernel_mutants(file: str, source: bytes) -> Iterator[Mutant]:
    """Operators between spaces, numbers, calls that stand alone; none of comments and of the preprocessor."""
    text = re.sub(rb"//[^\n]*|/\*.*?\*/|\"[^\"\n]*\"|^#(?:[^\n]*\\\n)*[^\n]*",
                  lambda found: re.sub(rb"[^\n]", b" ", found[0]), source, flags=re.S | re.M)  # fmt: skip
    for found in re.finditer(rb"(?<= )(<=?|>=?|==|!=|&&|\|\||<<|>>|[+\-*/%])(?= )", text):
        yield Mutant(file, *found.span(), SWAPS[found[0].decode()])
    for found in re.finditer(rb"(?<=[ (\[])\d+(?=[ )\];,u])", text):
        yield Mutant(file, *found.span(), str(int(found[0]) + 1))
    for found in re.finditer(rb"^ +\w[\w.>\[\]-]*\([^{}]*?\);$", text, re.M):
        yield Mutant(file, *found.span(), ";")


def drawn(sources: list[str], count: int, seed: int) -> list[Mutant]:
    """So many of all mutants of the sources, in an order that a larger count keeps."""
    found: list[Mutant] = []
    for file in sorted(sources):
        kind = python_mutants if file.endswith(".py") else kernel_mutants
        found += kind(file, (ROOT / file).read_bytes())
    return random.Random(seed).sample(found, min(count, len(found)))


# As a plugin of pytest: which test runs now, told to coverage here and, by the environment, in children.
def pytest_runtest_logstart(nodeid: str) -> None:
    os.environ["MUTANT_TEST"] = test = nodeid.partition("[")[0]
    if (current := coverage.Coverage.current()) is not None:
        current.switch_context(test)


def pytest_runtest_logreport(report: object) -> None:
    test = report.nodeid.partition("[")[0]  # type: ignore[attr-defined]
    line = json.dumps([test, report.duration, report.failed])  # type: ignore[attr-defined]
    with open(f"{os.environ['MUTANT_TIMES']}.{os.getpid()}", "a") as file:
        file.write(line + "\n")


def reach(out: Path, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Source -> line -> test functions; "seconds" of each, and in "failing" those that no mutant failed."""
    kept = out / "reach.json"
    if not kept.exists():
        rc = out / "coveragerc"
        rc.write_text(
            "[run]\nparallel = true\nsource = treeattn, collectives\npatch = subprocess\n"
            f"context = ${{MUTANT_TEST-}}\ndata_file = {out}/coverage\n"
        )
        paths = {"PYTHONPATH": f"{ROOT}:{Path(__file__).parent}", "MUTANT_TIMES": f"{out}/times"}
        covered = [sys.executable, "-m", "coverage", "run", f"--rcfile={rc}"]
        tests = ["-m", "pytest", "-q", "-p", "mutants", "-p", "no:cacheprovider", "-m", options.select]
        job = [MPIEXEC, "-n", "3", *covered, "-m", "mpi4py", *tests, "--with-mpi", *options.mpi.split()]
        kernels = [
            test
            for folder, these in KERNEL_TESTS.items()
            if any(source.startswith(folder) for source in options.sources)
            for test in these
        ]
        commands = [[*covered, *tests, *options.tests.split()], job]
        commands += [[sys.executable, *tests, *kernels]] if kernels else []
        for command in commands:
            subprocess.run(command, env=os.environ | paths, check=False)
        kept.write_text(json.dumps(found(out, rc)))
    return json.loads(kept.read_text())  # type: ignore[no-any-return]


def found(out: Path, rc: Path) -> dict[str, dict[str, Any]]:
    """What `reach` keeps, from the files that the processes left."""
    covered = coverage.Coverage(data_file=out / "coverage", config_file=str(rc))
    covered.combine()
    data, table = covered.get_data(), dict[str, dict[str, Any]]()
    for file in data.measured_files():
        lines = data.contexts_by_lineno(file).items()
        contexts = {
            str(line): sorted({name.rpartition("|")[2] for name in names} - {""}) for line, names in lines
        }
        table[os.path.relpath(os.path.realpath(file), ROOT)] = contexts
    seconds = table["seconds"] = defaultdict(float)
    failing = table["failing"] = {}
    for times in out.glob("times.*"):
        for test, took, failed in map(json.loads, times.read_text().splitlines()):
            seconds[test] += took
            failing |= {test: True} if failed else {}
    return table


def tests_of(mutant: Mutant, reached: dict[str, dict[str, Any]], limit: float) -> list[str]:
    """Those that reach its line, or its file if an import does; the quickest first, for half the limit."""
    for folder, tests in KERNEL_TESTS.items():
        if mutant.file.startswith(folder):
            return tests
    lines, seconds = reached.get(mutant.file, {}), reached["seconds"]
    line = (ROOT / mutant.file).read_bytes()[: mutant.start].count(b"\n") + 1
    anywhere = itertools.chain(*lines.values()) if str(line) in lines else ()
    candidates = set(lines.get(str(line)) or anywhere) - set(reached["failing"])
    ordered = sorted(candidates, key=lambda test: (seconds.get(test, 1.0), test))
    sums = itertools.accumulate(seconds.get(test, 1.0) for test in ordered)
    return ordered[: max(1, sum(total < limit / 2 for total in sums))]


def failing(tests: list[str], without: list[str], tree: Path, options: argparse.Namespace) -> str:
    """The first of the tests that fails in a tree, "timeout", or "" where all pass; `without` is not run."""
    environment = os.environ | {"PYTHONPATH": str(tree), "TREEATTN_CACHE": str(tree / "build/cache")}
    pytest = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", options.select]
    groups = defaultdict(list)
    for test in tests:
        groups[test.startswith("tests/mpi")].append(test)
    for on_ranks, chosen in groups.items():
        job = [MPIEXEC, "-n", "3", sys.executable, "-m", "mpi4py"] if on_ranks else [sys.executable]
        command = [
            "timeout",
            "-k",
            "5",
            str(options.limit),
            *job,
            *pytest,
            *["--with-mpi"] * on_ranks,
            *chosen,
            *(f"--deselect={test}" for test in without),
        ]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            named = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", done.stdout, re.M)
            return (
                "timeout"
                if done.returncode in (124, 137)
                else named[1]
                if named
                else "the end of the process"
            )
    return ""


def verdict(
    mutant: Mutant, tests: list[str], without: list[str], tree: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """killed (and by which test), survived, timeout, or not reached. A test that fails without the fault too
    does not count."""
    file, source = tree / mutant.file, (ROOT / mutant.file).read_bytes()
    if not set(tests) - set(without):
        return {"verdict": "not reached"}
    try:
        file.write_bytes(source[: mutant.start] + mutant.text.encode() + source[mutant.end :])
        by = failing(tests, without, tree, options)
    finally:
        file.write_bytes(source)
    if by in ("", "timeout"):
        return {"verdict": by or "survived"}
    if "::" in by and failing([by], [], tree, options):
        return verdict(mutant, tests, [*without, by], tree, options)
    return {"verdict": "killed", "by": by}


def change(mutant: Mutant) -> str:
    """What a reader sees of it."""
    old = (ROOT / mutant.file).read_bytes()
    new = old[: mutant.start] + mutant.text.encode() + old[mutant.end :]
    before, after = (text.decode().splitlines(keepends=True) for text in (old, new))
    return "".join(difflib.unified_diff(before, after, mutant.file, mutant.file, n=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/mutants"))
    parser.add_argument("--limit", type=int, default=300, help="seconds for a mutant")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--tests", default="tests/unit tests/command")
    parser.add_argument("--mpi", default="tests/mpi")
    parser.add_argument("--select", default="not deep")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    results, trees = out / "results.jsonl", Queue[Path]()
    done = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    known = {tuple(entry["mutant"]) for entry in done}
    reached = reach(out, options)
    for number in range(options.jobs):
        tree = out / f"tree-{number}"
        if not tree.exists():
            ignored = shutil.ignore_patterns(".git", ".venv*", "build", "__pycache__")
            shutil.copytree(ROOT, tree, symlinks=True, ignore=ignored)
        for file in options.sources:  # a run that was cut off may have left a mutant
            shutil.copy(ROOT / file, tree / file)
        trees.put(tree)

    def judge(mutant: Mutant) -> None:
        tree, started = trees.get(), time.monotonic()
        tests = tests_of(mutant, reached, options.limit)
        without = sorted(reached["failing"])
        entry = {"mutant": mutant, "tests": len(tests), **verdict(mutant, tests, without, tree, options)}
        trees.put(tree)
        entry |= {"seconds": round(time.monotonic() - started), "change": change(mutant)}
        done.append(entry)
        with results.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        print(entry["verdict"], mutant.file, entry.get("by", ""), f"{entry['seconds']} s", flush=True)

    wanted = [mutant for mutant in drawn(options.sources, options.count, options.seed) if mutant not in known]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(judge, wanted))
    counts = {
        kind: [e for e in done if e["verdict"] == kind]
        for kind in ("killed", "timeout", "survived", "not reached")
    }
    lines = [
        f"{len(done)} mutants: " + ", ".join(f"{len(found)} {kind}" for kind, found in counts.items()),
        "",
    ]
    lines += [
        f"{kind}:\n```diff\n{e['change']}```\n" for kind in ("survived", "not reached") for e in counts[kind]
    ]
    (out / "report.md").write_text("\n".join(lines))
    print(lines[0])


if __name__ == "__main__":
    main()

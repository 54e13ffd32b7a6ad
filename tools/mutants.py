"""Plants small faults, one at a time, and asks the tests that reach them: what no test notices is a gap.

Usage: python tools/mutants.py --count 500 --out build/mutants SOURCE.py .. [KERNEL.c ..]

The mutants are drawn by a seed from all places in the sources. The tests are collected once; one run of them
under coverage, kept beside the results, says which reaches which line, for how long, and which fails without
a fault. A fork for each mutant replaces the code of the functions that it changes and runs the tests that
reach the line, the quickest first, to the first that fails. What runs at import (constants, classes) is
planted by the loader, in a process of its own; so is, on 3 ranks, what the tests without ranks did not kill.
A change of C is compiled, and loaded in place of the kernels; tests that reach what calls them are run.
A run that was cut off goes on. `report.md` lists the survivors with their change.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import gc
import importlib.machinery
import inspect
import itertools
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import coverage
import pytest

ROOT = Path.cwd()
CALLERS = "treeattn/backends/cpu/"  # of the kernels
PYTEST = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
ONES = ["<", ">", "==", "+", "&", "<<", "and", "in", "is"]
OTHERS = ["<=", ">=", "!=", "-", "|", ">>", "or", "not in", "is not"]
SWAPS = {"*": "+", "/": "*", "//": "*", "%": "//", "**": "*"}
SWAPS |= dict(zip(ONES + OTHERS, OTHERS + ONES, strict=True)) | {"&&": "||", "||": "&&"}
LoaderType = importlib.machinery.SourceFileLoader


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
        found = re.search(r"not\s+in|is\s+not|and|or|in|is|<<|>>|//|\*\*|[<>=!]=|[<>+\-*/%&|]", gap)
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
            case ast.UnaryOp(op=ast.Not() | ast.USub() as operator):
                yield Mutant(file, begin(node), begin(node) + (3 if isinstance(operator, ast.Not) else 1), "")
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                yield Mutant(
                    file, begin(test), end(test), f"not ({source[begin(test) : end(test)].decode()})"
                )
            case ast.Call(args=[first, second, *_]) if not (
                isinstance(first, ast.Starred) or re.search(r"max|min", ast.unparse(node.func))
            ):
                a, b = (source[begin(x) : end(x)] for x in (first, second))
                gap = source[end(first) : begin(second)]
                yield Mutant(file, begin(first), end(second), (b + gap + a).decode())
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break():
                yield Mutant(file, begin(node), end(node), "pass")
            case ast.Return(value=ast.expr() as value):
                none = isinstance(value, ast.Constant) and value.value is None
                yield Mutant(file, begin(node), end(node), "return 0" if none else "return None")


def kernel_mutants(file: str, source: bytes) -> Iterator[Mutant]:
    """Operators between spaces, numbers, statements of one line; none of comments and of the preprocessor."""
    other = rb"//[^\n]*|/\*.*?\*/|\"[^\"\n]*\"|^#(?:[^\n]*\\\n)*[^\n]*"
    text = re.sub(other, lambda found: re.sub(rb"[^\n]", b" ", found[0]), source, flags=re.S | re.M)
    for found in re.finditer(rb"(?<= )(<=?|>=?|==|!=|&&|\|\||<<|>>|[+\-*/%&|])(?= [^,)])", text):
        yield Mutant(file, *found.span(), SWAPS[found[0].decode()])
    for found in re.finditer(rb"(?<=[ (\[])\d+(?=[ )\];,u])", text):
        yield Mutant(file, *found.span(), str(int(found[0]) + 1))
    for found in re.finditer(
        rb"(?<= )(?:[\w.>\[\]+-]+ [+*|&-]?= [^;{}]*|\w+\([^;{}]*\)|continue|break);$", text, re.M
    ):
        if re.match(rb"\s*$", text[: found.start()].rpartition(b"\n")[2]):
            yield Mutant(file, *found.span(), ";")


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All but annotations, text with values, and `__all__`."""
    yield tree
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "type_params") or isinstance(tree, ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from nodes(child)


def drawn(options: argparse.Namespace) -> list[Mutant]:
    """So many of all mutants of the sources, in an order that a larger count keeps."""
    found = []
    for file in sorted(options.sources):
        of = python_mutants if file.endswith(".py") else kernel_mutants
        found += of(file, (ROOT / file).read_bytes())
    return random.Random(options.seed).sample(found, min(options.count, len(found)))


def mutated(mutant: Mutant) -> bytes:
    source = (ROOT / mutant.file).read_bytes()
    return source[: mutant.start] + mutant.text.encode() + source[mutant.end :]


def change(mutant: Mutant) -> str:
    """What a reader sees of it."""
    texts = ((ROOT / mutant.file).read_bytes(), mutated(mutant))
    before, after = (text.decode().splitlines(keepends=True) for text in texts)
    return "".join(difflib.unified_diff(before, after, mutant.file, mutant.file, n=2))


def codes(code: CodeType) -> Iterator[CodeType]:
    """It, and all codes in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def planted(mutant: Mutant, functions: list[FunctionType]) -> bool:
    """Replace the code of the functions that it changes; not where a module or a class changes."""
    file = ROOT / mutant.file
    sources = file.read_bytes(), mutated(mutant)
    before, after = (list(codes(compile(source, file, "exec"))) for source in sources)

    def at_import(code: CodeType) -> list[object]:
        constants = [repr(constant) for constant in code.co_consts if not isinstance(constant, CodeType)]
        own = not code.co_flags & inspect.CO_OPTIMIZED and (code.co_code, constants, code.co_names)
        return [code.co_qualname, own]

    if list(map(at_import, before)) != list(map(at_import, after)):
        return False
    replaced = dict(zip(before, after, strict=True))
    for function in functions:
        if os.path.realpath(function.__code__.co_filename) == str(file):
            function.__code__ = replaced[function.__code__]
    return True


def plant_by_the_loader(mutant: Mutant) -> None:
    """Whoever imports the file from now on gets the mutant; nothing of the package is imported before."""
    assert "treeattn" not in sys.modules
    get_code = LoaderType.get_code

    def replaced(self: LoaderType, fullname: str) -> CodeType | None:
        if os.path.realpath(self.path) == str(ROOT / mutant.file):
            return compile(mutated(mutant), self.path, "exec")
        return get_code(self, fullname)

    LoaderType.get_code = replaced  # type: ignore[method-assign]


def compiled(mutant: Mutant, out: Path) -> bool:
    """Make `planted.so` of the kernels with it; whether that is a program, and another than `plain.so`.

    Quickly optimised, for the fastest instruction set: the one of the gate's tests."""
    from treeattn.backends.cpu import compile as kernels

    sources = [file for file in (ROOT / "kernels/cpu").iterdir() if file.suffix in (".c", ".h")]
    out.mkdir(exist_ok=True)
    inputs = sorted(file.name for file in sources if file.suffix == ".c")
    command = ["cc", *kernels._FLAGS, *kernels.ISA_FLAGS[kernels.available_isas()[0]], "-O1", *inputs, "-lm"]
    for name, change in ("plain.so", mutant._replace(end=mutant.start, text="")), ("planted.so", mutant):
        if name == "plain.so" and (out / name).exists():
            continue
        for file in sources:
            (out / file.name).write_bytes(file.read_bytes())
        (out / Path(change.file).name).write_bytes(mutated(change))
        done = subprocess.run([*command, "-o", name], cwd=out, capture_output=True, check=False)
    return not done.returncode and (out / "plain.so").read_bytes() != (out / "planted.so").read_bytes()


def plant_kernels(library: Path) -> None:
    """Whoever asks for the kernels of the fastest instruction set from now on gets this file."""
    from treeattn.backends.cpu import compile as kernels

    path = kernels.library_path
    fastest = kernels.available_isas()[0], ()
    kernels.library_path = lambda isa, *tried: library if (isa, tried) == fastest else path(isa, *tried)


class Runner:
    """A plugin of pytest that runs tests one by one: to measure, or to see whether one fails."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.task, self.failed = task, False
        if "library" in task:
            plant_kernels(Path(task["library"]))
        elif "mutant" in task:
            plant_by_the_loader(Mutant(*task["mutant"]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if "kept" in self.task:
            self.measure(session.items)
        elif by := self.first_failing(session.items, self.task["tests"]):
            print(f"\nkilled by {by}", file=sys.__stdout__, flush=True)
            session.testsfailed = 1
        return True

    def run(self, items: list[pytest.Item]) -> Iterator[tuple[str, float, bool]]:
        """Each test, its seconds, and whether it failed."""
        for item, following in itertools.zip_longest(items, items[1:]):
            started, self.failed = time.monotonic(), False
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            yield item.nodeid, time.monotonic() - started, self.failed

    def first_failing(self, items: list[pytest.Item], tests: list[str]) -> str:
        named = {item.nodeid: item for item in items}
        ran = self.run([named[test] for test in tests if test in named])
        return next((test for test, _, failed in ran if failed), "")

    def measure(self, items: list[pytest.Item]) -> str:
        """Which test reaches which line, in a file for `Reach`."""
        include = [f"*/{source}" for source in self.task["sources"]]
        if not all(source.endswith(".py") for source in self.task["sources"]):
            include.append(f"*/{CALLERS}*.py")
            plant_kernels(Path(self.task["kept"]).parent / "kernels/plain.so")
        covered = coverage.Coverage(data_file=None, config_file=False, include=include)
        covered.start()
        covered.switch_context(items[0].nodeid)
        tests = {}
        for (test, *ended), following in itertools.zip_longest(self.run(items), items[1:]):
            tests[test] = ended
            covered.switch_context(following.nodeid if following else "")
        covered.stop()
        data = covered.get_data()
        lines = {
            f"{os.path.relpath(os.path.realpath(file), ROOT)}:{line}": list(filter(None, names))
            for file in data.measured_files()
            for line, names in data.contexts_by_lineno(file).items()
        }
        Path(f"{self.task['kept']}.{os.getpid()}").write_text(json.dumps([tests, lines]))
        return ""


if __name__ != "__main__":

    def pytest_configure(config: pytest.Config) -> None:
        config.pluginmanager.register(RUNNER)

    RUNNER = Runner(json.loads(Path(os.environ["MUTANT_TASK"]).read_text()))


def in_process(task: dict[str, Any], ranks: int, arguments: list[str], options: argparse.Namespace) -> str:
    """Run pytest with this task, on so many ranks; the test that failed, "timeout" or ""."""
    described = options.out / "task.json"
    described.write_text(json.dumps(task))
    job = [str(Path(sys.executable).with_name("mpiexec")), "-n", str(ranks)] if ranks else []
    job += [sys.executable, *["-m", "mpi4py"] * bool(ranks), "-m", "pytest", *PYTEST, "-p", "mutants"]
    environment = os.environ | {"MUTANT_TASK": str(described), "PYTHONPATH": str(Path(__file__).parent)}
    if "mutant" in task:
        environment["TREEATTN_TEST_DEADLINE"] = environment["TREEATTN_TIMEOUT"] = "10"
    limit = ["timeout", "-k", "5", str(3600 if "kept" in task else 10 * options.limit)]
    command = [*limit, *job, *["--with-mpi"] * bool(ranks), "-m", options.select, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if by := re.search(r"killed by (\S+)", done.stdout):
        return by[1]
    return "timeout" if done.returncode in (124, 137) else "the end of the process" if done.returncode else ""


class Reach:
    """The tests that reach a line, up to a limit of seconds: the quickest first, but the tenth case of a test
    function counts as ten times as slow; none that fails without a fault."""

    def __init__(self, kept: Path, limit: float) -> None:
        self.tests, self.limit = dict[str, tuple[float, bool]](), limit
        self.lines = defaultdict[str, set[str]](set)
        for part in kept.parent.glob(f"{kept.name}.*"):
            tests, lines = json.loads(part.read_text())
            self.tests |= tests
            for line, reaching in lines.items():
                self.lines[line] |= set(reaching)

    def of(self, mutant: Mutant, at_import: bool) -> list[str]:
        line = (ROOT / mutant.file).read_bytes()[: mutant.start].count(b"\n") + 1
        found = self.lines.get(f"{mutant.file}:{line}", set())
        if not found and (at_import or not mutant.file.endswith(".py")):
            file = f"{mutant.file}:" if mutant.file.endswith(".py") else CALLERS
            within = [tests for at, tests in self.lines.items() if at.startswith(file)]
            found = set().union(*within)
        cases, ordered = Counter[str](), []
        for (seconds, failing), test in sorted((self.tests[test], test) for test in found):
            cases[test.partition("[")[0]] += 1
            ordered += [] if failing else [(cases[test.partition("[")[0]] * seconds, seconds, test)]
        sums = itertools.accumulate(seconds for _, seconds, _ in sorted(ordered))
        return [test for (*_, test), total in zip(sorted(ordered), sums, strict=True) if total < self.limit]


class Judge(Runner):
    """Holds the collected tests, and forks for each mutant."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__({"sources": options.sources, "kept": str(options.out / "reach")})
        self.options, self.results, self.mutants = options, options.out / "results.jsonl", drawn(options)
        lines = self.results.read_text().splitlines() if self.results.exists() else []
        self.done = {Mutant(*entry["mutant"]): entry for entry in map(json.loads, lines)}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.unfreeze()  # a conftest froze them
        alive, real = gc.get_objects(), functools.cache(os.path.realpath)
        ours = {str(ROOT / source) for source in self.options.sources}
        functions = [f for f in alive if isinstance(f, FunctionType) and real(f.__code__.co_filename) in ours]
        caches = [c for c in alive if isinstance(c, functools._lru_cache_wrapper)]
        caches = [c for c in caches if c.__module__.startswith("treeattn")]
        gc.freeze()
        if not list(self.options.out.glob("reach.*")):
            if not all(source.endswith(".py") for source in self.options.sources):
                compiled(self.mutants[0], self.options.out / "kernels")
            forked(lambda: self.measure(session.items), 3600)
        reach = Reach(self.options.out / "reach", self.options.limit / 2)

        def judged(mutant: Mutant, tests: list[str]) -> str:
            for cache in caches:
                cache.cache_clear()
            if not mutant.file.endswith(".py"):
                plant_kernels(self.options.out / "kernels/planted.so")
                return self.first_failing(session.items, tests)
            return self.first_failing(session.items, tests) if planted(mutant, functions) else "at import"

        at_import = []
        for mutant in (mutant for mutant in self.mutants if mutant not in self.done):
            started, tests, by = time.monotonic(), reach.of(mutant, False), "at import"
            if not mutant.file.endswith(".py") and not compiled(mutant, self.options.out / "kernels"):
                by = "no change"
            elif tests:
                by = forked(functools.partial(judged, mutant, tests), self.options.limit)
            if by == "at import":
                at_import.append(mutant)
            else:
                self.say(mutant, by, started)
        for mutant in at_import:
            started = time.monotonic()
            self.say(mutant, self.alone(mutant, reach.of(mutant, True), 0), started)
        return True

    def alone(self, mutant: Mutant, tests: list[str], ranks: int) -> str:
        files = sorted({test.partition("::")[0] for test in tests})
        task: dict[str, Any] = {"mutant": mutant, "tests": tests}
        if not mutant.file.endswith(".py") and compiled(mutant, self.options.out / "kernels"):
            task["library"] = str(self.options.out / "kernels/planted.so")
        return in_process(task, ranks, files, self.options) if tests else "not reached"

    def say(self, mutant: Mutant, by: str, started: float, ranks: int = 0) -> None:
        verdict = by if by in ("timeout", "not reached", "no change") else "killed" if by else "survived"
        seconds = round(time.monotonic() - started, 1)
        entry = {"mutant": mutant, "verdict": verdict, "by": by, "ranks": ranks, "seconds": seconds}
        self.done[mutant] = entry | {"change": change(mutant)}
        with self.results.open("a") as file:
            file.write(json.dumps(self.done[mutant]) + "\n")
        print(verdict, mutant.file, by, seconds, flush=True)

    def on_ranks(self) -> None:
        """The tests on 3 ranks that reach what no other killed."""
        kept = self.options.out / "ranks"
        if not list(self.options.out.glob("ranks.*")):
            in_process(self.task | {"kept": str(kept)}, 3, self.options.mpi.split(), self.options)
        reach = Reach(kept, self.options.limit / 2)
        for mutant in self.mutants:
            before, started = self.done[mutant], time.monotonic()
            if before["verdict"] in ("survived", "not reached") and not before["ranks"]:
                by = self.alone(mutant, reach.of(mutant, True), 3)
                self.say(mutant, before["by"] if by == "not reached" else by, started, 3)


def forked(work: Callable[[], str], limit: int) -> str:
    """What the work gives in a fork, of so many seconds of processor time; or how it ended."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        for output in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)
        try:
            said = f"done {work()}"
        except BaseException as error:  # of pytest itself
            said = f"done {error!r}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    ends = time.monotonic() + 10 * limit
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < ends:
        time.sleep(0.01)
    if not ended[0]:
        os.killpg(pid, signal.SIGKILL)
        ended = os.waitpid(pid, 0)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    if os.WIFSIGNALED(ended[1]) and os.WTERMSIG(ended[1]) in (signal.SIGKILL, signal.SIGXCPU):
        return "timeout"
    return said.removeprefix("done ") if said else "the end of the process"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/mutants"))
    parser.add_argument("--limit", type=int, default=30, help="processor seconds for a mutant")
    parser.add_argument("--tests", default="tests/unit")
    parser.add_argument("--mpi", default="tests/mpi")
    parser.add_argument("--select", default="not deep")
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    judge = Judge(options)
    pytest.main([*PYTEST, "-s", "-m", options.select, *options.tests.split()], plugins=[judge])
    judge.on_ranks()
    done = [judge.done[mutant] for mutant in judge.mutants]
    counts = Counter(entry["verdict"] for entry in done)
    lines = [f"{len(done)} mutants: " + ", ".join(f"{n} {kind}" for kind, n in counts.most_common()), ""]
    for kind in ("survived", "not reached"):
        lines += [f"{kind}:\n```diff\n{e['change']}```\n" for e in done if e["verdict"] == kind]
    (options.out / "report.md").write_text("\n".join(lines))
    print(lines[0])


if __name__ == "__main__":
    main()

"""What the documents show is what happens: their Python runs, their commands print what they say."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from treeattn.cli import commands
from treeattn.decoder.plan import CATALOG

ROOT = Path(__file__).resolve().parents[2]
# adding-a-scheme.md is a walk that changes the catalogue: its own test runs it.
PAGES = [
    ROOT / "README.md",
    ROOT / "docs/results/README.md",
    *sorted(p for p in (ROOT / "docs").glob("*.md") if p.name != "adding-a-scheme.md"),
]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda page: page.name)
def test_python_blocks_run_in_order(page, capsys):
    namespace: dict = {}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), namespace)
    capsys.readouterr()


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "py")], ids=lambda page: page.name)
def test_python_blocks_that_need_torch(page):
    """They stand as `py`, after the others."""
    pytest.importorskip("torch", reason="torch is not installed (the extra `oracle`)")
    namespace: dict = {}
    for block in (*blocks(page, "python"), *blocks(page, "py")):
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "console")], ids=lambda page: page.name)
def test_console_blocks_print_what_they_show(page):
    for block in blocks(page, "console"):
        first, _, wanted = block.partition("\n")
        words = shlex.split(first.removeprefix("$ "))
        assert words[0] == "treeattn"
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.rstrip() == wanted.rstrip()


def shell_lines(page: Path) -> list[str]:
    """Of `sh` blocks and indented ones, with what a backslash continues."""
    text = re.sub(r"\\\n\s*", " ", page.read_text())
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    fenced = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [*"".join(fenced).splitlines(), *re.findall(r"^ {4}(\S.*)$", prose, re.MULTILINE)]


def test_every_command_of_the_pages_is_one_with_these_options():
    """Many need files, ranks or devices that are not here; their names and options are read all the same."""
    read = 0
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "jobs/README.md"]:
        for line in (line for line in shell_lines(page) if re.search(r"\btreeattn [a-z]", line)):
            words = shlex.split(line, comments=True)
            start = max(place for place, word in enumerate(words) if word.endswith("treeattn"))
            context = click.Context(commands, info_name="treeattn")
            command = commands.get_command(context, words[start + 1])
            assert command is not None, f"{page.name}: {line}"
            arguments = words[start + 2 :]
            command.make_parser(click.Context(command, info_name=command.name)).parse_args(arguments)
            read += 1
    assert read > 50


def test_every_scheme_has_its_line_and_every_schedule_its_picture():
    text = (ROOT / "docs/schemes.md").read_text()
    for scheme in CATALOG.values():
        assert f"| `{scheme.name}` | {scheme.summary} |" in text
        if scheme.kind == "schedule":
            section = text.partition(f"### `{scheme.name}`\n")[2].partition("\n#")[0]
            assert f"](../tests/golden/{scheme.name}.svg)" in section


def test_public_ci_runs_targets_of_the_makefile():
    workflow, makefile = ((ROOT / name).read_text() for name in (".github/workflows/test.yml", "Makefile"))
    targets = [name for names in re.findall(r"target: \[(.*)\]", workflow) for name in names.split(", ")]
    private = re.findall(r"^make (\S+)", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert set(private) < set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"there is no make {target}"


def test_contributing_lists_every_folder():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = set(re.findall(r"`((?:treeattn|collectives|kernels|tests|jobs|benchmarks)/[a-z_/]*)`", text))
    for folder in [*(ROOT / "treeattn").iterdir(), *(ROOT / "tests").iterdir()]:
        if folder.is_dir() and not folder.is_symlink() and folder.name != "__pycache__":
            name = f"{folder.relative_to(ROOT)}/"
            assert any(row.startswith(name) for row in rows), f"CONTRIBUTING.md says nothing of {name}"


def test_links_point_to_files():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "jobs/README.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize(
    ("picture", "command"),
    [
        ("hierarchical", ["schedule", "hierarchical", "--ranks", "16", "--nodes", "4"]),
        ("token-tree", ["tree", "docs/mars.txt"]),
    ],
)
def test_pictures_are_current(picture, command, tmp_path):
    """Drawn again by the command that the README or the page names."""
    target = tmp_path / "drawn.svg"
    subprocess.run(
        [sys.executable, "-m", "treeattn", *command, "--format", "svg", "--out", target],
        cwd=ROOT,
        check=True,
        timeout=60,
    )
    assert target.read_text() == (ROOT / f"docs/images/{picture}.svg").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("results", "figure", "picture"),
    [
        ("tests/data/compare.jsonl", "time-decode", "time-decode"),
        ("docs/results/cluster_block.jsonl", "time-reduce", "cluster-time-block"),
        ("docs/results/cluster_cyclic.jsonl", "time-reduce", "cluster-time-cyclic"),
        ("docs/results/cluster_cyclic.jsonl", "traffic-reduce", "cluster-traffic-cyclic"),
        ("docs/results/compare_2.jsonl", "relative-reduce", "compare-relative-2"),
    ],
)
def test_figures_are_those_of_the_results(results, figure, picture, tmp_path):
    """Words, numbers and marks: the rest may differ between versions of matplotlib."""
    command = ["plot", ROOT / results, "--figures", figure.partition("-")[0], "--format", "svg"]
    subprocess.run(
        [sys.executable, "-m", "treeattn", *command, "--out", tmp_path], cwd=ROOT, check=True, timeout=60
    )
    drawn, kept = (tmp_path / f"{figure}.svg").read_text(), (ROOT / f"docs/images/{picture}.svg").read_text()
    written = re.findall(r"<!-- (.*?) -->", kept)  # what the outlines of letters say
    assert len(written) > 10
    assert re.findall(r"<!-- (.*?) -->", drawn) == written
    colours = re.findall(r"fill: (#\w+); stroke: #\w+", kept)
    assert len(colours) > 5
    assert re.findall(r"fill: (#\w+); stroke: #\w+", drawn) == colours


@pytest.mark.slow
def test_tables_of_results_are_those_of_the_results(fill_tables):
    """After new results: python docs/fill_tables.py"""
    filled_in = [path for path in PAGES if "<!-- end -->" in path.read_text()]
    assert len(filled_in) > 6
    for path in filled_in:
        page = path.read_text()
        found = [block for kind in fill_tables.KINDS for block in kind.findall(page)]
        assert len(found) == page.count("<!-- end -->"), path.name
        assert fill_tables.filled(page) == page, path.name


@pytest.mark.parametrize("tokens", [5, 4096])
def test_a_table_of_other_than_one_case_is_refused(fill_tables, tokens, tmp_path):
    """No case with 5 tokens, two with 4096."""
    lines = (ROOT / "tests/data/compare.jsonl").read_text()
    path = tmp_path / "two.jsonl"
    path.write_text(lines.replace('"tokens":16384,"batch":1', '"tokens":4096,"batch":2'))
    with pytest.raises(ValueError, match="has not one case"):
        fill_tables.filled(f"<!-- compare decode {tokens} {path} -->\n<!-- end -->")


def test_every_step_of_the_first_day_has_its_line(fill_tables):
    listed = subprocess.run(
        [ROOT / "benchmarks/gpu_day.sh", "--list"], capture_output=True, text=True, check=True
    )
    assert listed.stdout.split() == list(fill_tables.gpu_tables.STEPS)


def test_a_page_shows_what_was_measured_on_a_gpu_and_what_was_not(fill_tables, tmp_path, monkeypatch):
    """Results made up for this test, in another folder than the real ones."""
    monkeypatch.setattr(fill_tables.gpu_tables, "RESULTS", tmp_path)
    page = "".join(f"<!-- gpu {name} -->\n<!-- end -->\n" for name in fill_tables.gpu_tables.TABLES)
    empty = fill_tables.filled(page)
    assert empty.count("| not yet |  |") == len(fill_tables.gpu_tables.STEPS)
    assert empty.count("Not yet.") == 3
    machine = {"gpus": [{"name": "Some GPU", "driver_version": "600.1"}]}
    common = {"date": "2030-01-02T03:04:05+00:00", "machine": machine, "problem": None}
    row = {"heads": 32, "kv_heads": 8, "tokens": 8192}
    timed = {"floor_microseconds": 11.2, "microseconds": {"attention": 20.04, "torch": 31.0}}
    percent = {"percent_of_copy_rate": {"attention": 55.9, "torch": 36.1}}
    profiled = {"microseconds": 19.0, "dram_percent": 61.2, "occupancy_percent": 30.1, "registers": 86.0}
    stalls = {"occupancy_limit_percent": 31.2, "stalled_warps": {"long_scoreboard": 9.71, "barrier": 0.1}}
    results = {
        "kernel": {"rows": [row | timed | percent, row | {"problem": "out of GPU memory"}]},
        "roofline": {
            "rows": [{"dtype": "float32", "group": 4, "microseconds": 180.0, "percent_of_copy_rate": 91.2}]
        },
        "ncu": [row | profiled | stalls],
        "tests": {},
    }
    for step, result in results.items():
        facts = common | {"step": step, "result": result}
        facts |= {"problem": "2 tests failed"} if step == "tests" else {}
        (tmp_path / f"gpu_{step}.json").write_text(json.dumps(facts))
    shown = fill_tables.filled(empty)
    assert "[done](results/gpu_ncu.json) | 2030-01-02, 1 x Some GPU, driver 600.1 |" in shown
    assert "| failed: 2 tests failed | 2030-01-02" in shown
    assert "| 32/8 | 8192 | 11.2 | 20.0 (56) | 31.0 (36) |\n\n<!-- end -->" in shown
    assert "| float32 | 4 | 180.0 | 91 |" in shown
    assert "| 32/8 | 8192 | 19.0 | 61 | 30 (31) | 86 | long_scoreboard 9.7, barrier 0.1 |" in shown
    assert "Not yet." not in shown

"""What the documents show is what happens: their Python runs, their commands print what they say."""

import json
import re
import shlex
from pathlib import Path

import click
import pytest

import treeattn
from docs import fill_tables
from tests.command.launch import in_process
from tests.support.examples import run_examples
from treeattn import collectives, energy, token_tree
from treeattn.cli import commands
from treeattn.collectives import build, needs_nodes
from treeattn.collectives.clusters import description
from treeattn.collectives.clusters.description import load
from treeattn.collectives.clusters.placement import node_groups
from treeattn.collectives.clusters.simulate import simulate
from treeattn.selection import CATALOG
from treeattn.study.decode_step import StepShape, attention_cost, reduction_cost

ROOT = Path(__file__).resolve().parents[2]
# adding-a-scheme.md is a walk that changes the catalogue: its own test runs it.
PAGES = [
    ROOT / "README.md",
    ROOT / "docs/results/README.md",
    *sorted(p for p in (ROOT / "docs").glob("*.md") if p.name != "adding-a-scheme.md"),
]


RESULTS = sorted(path for path in (ROOT / "docs/results").rglob("*") if path.suffix in (".json", ".jsonl"))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda page: page.name)
def test_python_blocks_run_in_order(page, capsys):
    namespace: dict = {}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), namespace)
    capsys.readouterr()


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "py")], ids=lambda page: page.name)
@pytest.mark.slow
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
        done = in_process(*words[1:])
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
    assert read > 30


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
    private = set(re.findall(r"'make -s ([a-z-]+)\b", (ROOT / ".ci/run").read_text()))
    assert "lint" in private
    assert private <= set(targets)
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
    ("picture", "command"), [("hierarchical", ["schedule", "hierarchical", "--ranks", "16", "--nodes", "4"])]
)
def test_pictures_are_current(picture, command, tmp_path):
    """Drawn again by the command that the README or the page names."""
    target = tmp_path / "drawn.svg"
    in_process(*command, "--format", "svg", "--out", target)
    assert target.read_text() == (ROOT / f"docs/images/{picture}.svg").read_text()


@pytest.mark.slow
def test_tables_of_results_are_those_of_the_results():
    """After new results: python docs/fill_tables.py"""
    filled_in = [path for path in PAGES if "<!-- end -->" in path.read_text()]
    assert len(filled_in) > 6
    for path in filled_in:
        page = path.read_text()
        assert len(fill_tables.BLOCK.findall(page)) == page.count("<!-- end -->"), path.name
        assert fill_tables.filled(page) == page, path.name


def test_a_table_of_other_than_one_case_is_refused(tmp_path):
    lines = (ROOT / "tests/data/compare.jsonl").read_text()
    path = tmp_path / "two.jsonl"
    path.write_text(lines + lines.replace('"batch":1', '"batch":2'))
    with pytest.raises(ValueError, match="has not one case"):
        fill_tables.filled(f"<!-- compare {path} -->\n<!-- end -->")


@pytest.mark.parametrize(
    ("scheme", "block", "cyclic"),
    [("chain", 6, 14), ("k_nomial_tree", 4, 4), ("hierarchical", 2, 2), ("bine", 2, 3), ("ring", 7, 14)],
)
def test_messages_in_a_row_are_those_counted_by_hand(scheme, block, cyclic):
    for where, many in (("block", block), ("cyclic", cyclic)):
        assert fill_tables.in_a_row(fill_tables.summaries(f"cluster_{where}.jsonl")[scheme]) == many


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_results_come_from_a_clean_commit(path):
    """A number that nobody can measure again, since its sources were never committed, is no result."""
    assert b"+dirty" not in path.read_bytes()


def test_a_table_shows_the_rows_and_columns_that_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(fill_tables, "RESULTS", tmp_path)
    rows = [{"kind": kind, "time": {"median": 1.5}, "share": 0.25} for kind in "abc"]
    (tmp_path / "made.json").write_text(json.dumps({"runs": [{"name": "first", "rows": rows}]}))
    asked = "<!-- table made.json:runs/first/rows | kind=a,c as what; time/median as µs; share% as of all -->"
    shown = fill_tables.filled(f"{asked}\nold\n<!-- end -->")
    assert "old" not in shown
    assert shown.splitlines()[2:6] == [
        "| what | µs | of all |", "| --- | --- | --- |", "| a | 1.5 | 25 % |", "| c | 1.5 | 25 % |",
    ]  # fmt: skip
    waiting = "<!-- table gpu_other.json:rows | kind as what -->"
    assert "Not measured yet." in fill_tables.filled(f"{waiting}\n<!-- end -->")
    with pytest.raises(FileNotFoundError):
        fill_tables.filled(f"{waiting.replace('gpu_', '')}\n<!-- end -->")


@pytest.mark.parametrize(("ranks", "scheme", "since"), [(8, "all_gather_merge", 8), (64, "hierarchical", 52)])
def test_from_which_context_on_more_gpus_pay(ranks, scheme, since):
    """As the page's command simulates them: there they are as fast as one."""
    cluster, shape = description.load("dgx-h100"), StepShape(since << 10, 32, 8)
    places = tuple(range(ranks))
    nodes = {"nodes": node_groups(cluster, places)} if needs_nodes(scheme) else {}
    reduction = reduction_cost(cluster, places, build(scheme, ranks, **nodes), shape).time
    alone = attention_cost(cluster, 1, shape).time
    assert attention_cost(cluster, ranks, shape).time + reduction == pytest.approx(alone, rel=0.1)
    assert f"from {since}k" in (ROOT / "docs/huggingface.md").read_text()


#: What functions return: nobody makes one.
GIVEN_BACK = {"Accepted", "Certificate", "FoldOrder", "Packed", "Proof"}
PUBLIC = [
    getattr(package, name)
    for package in (treeattn, collectives, token_tree, energy)
    for name in package.__all__
    if callable(getattr(package, name)) and name not in GIVEN_BACK and not name.endswith("Error")
]


@pytest.mark.parametrize("named", [*PUBLIC, load, simulate], ids=lambda named: named.__qualname__)
def test_the_example_of_a_docstring_shows_what_comes_out(named):
    assert run_examples(named)


def test_an_example_that_shows_something_else_fails():
    def wrong():
        """
        >>> 1 + 1
        3
        """

    with pytest.raises(AssertionError, match="Got:\n    2"):
        run_examples(wrong)

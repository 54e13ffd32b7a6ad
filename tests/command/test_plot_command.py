"""``treeattn plot`` as a user runs it, on what a real run of ``treeattn compare`` wrote."""

import json
import sys

import pytest

from .launch import ROOT, in_process

RESULTS = ROOT / "tests" / "data" / "compare.jsonl"


def test_files_of_every_figure_that_there_is(tmp_path):
    out, numbers = tmp_path / "out", tmp_path / "numbers.json"
    done = in_process("plot", RESULTS, "--out", out, "--format", "svg,pdf", "--json", numbers)
    made = sorted(path.name for path in out.iterdir())
    assert made == ["relative.pdf", "relative.svg", "time.pdf", "time.svg"]
    assert sorted(done.stdout.splitlines()) == [str(out / name) for name in made]
    assert done.stderr.endswith("not in these results: scaling, predicted\n")  # above it perhaps progress
    summaries = json.loads(numbers.read_text())
    assert {one["ratio_low"] for one in summaries if one["label"] == one["baseline"]} == {None}
    assert {"label", "time_us", "low_us", "ratio", "verdict"} <= summaries[0].keys()
    assert "recursive_doubling" in (out / "time.svg").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--figures", "predicted"), "not in these results: predicted"),
     (("--figures", "time,scaling", "--format", "svg"), "not in these results: scaling")],
)  # fmt: skip
def test_a_figure_asked_for_by_name_is_missed(tmp_path, words, said):
    assert said in in_process("plot", RESULTS, *words, "--out", tmp_path, code=1).stderr
    assert (tmp_path / "time.svg").exists() == ("time,scaling" in words)


@pytest.mark.parametrize(
    "words", ["plot matplotlib", "plot pandas", "plot scipy.stats", "report jinja2", "report matplotlib"]
)
def test_without_the_extra(tmp_path, monkeypatch, words):
    command, module = words.split()
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "treeattn.study.figures", raising=False)
    done = in_process(command, RESULTS, "--out", tmp_path / "out", code=1)
    said = done.stderr.splitlines()[-1]  # above it perhaps progress
    assert said.startswith(f"treeattn: {module.partition('.')[0]} is missing (")
    assert done.stderr.endswith("): pip install '.[study]'\n")
    assert not (tmp_path / "out").exists()

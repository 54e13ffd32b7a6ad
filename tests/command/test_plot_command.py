"""``treeattn plot`` as a user runs it, on what a real run of ``treeattn compare`` wrote."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from tests.unit.study import made_results
from treeattn.study.figures import draw

from .launch import ROOT, in_process, run

RESULTS = ROOT / "tests" / "data" / "compare.jsonl"


def complaints(done):
    """Lines of stderr but for those that a busy machine has time to show."""
    return [line for line in done.stderr.splitlines() if not line.endswith("figures are drawn")]


@pytest.fixture
def undrawn(monkeypatch):
    """Files without pictures, which the tests of figures draw one by one."""
    files = {"svg": b"<svg/>", "png": b"\x89PNG\r\n\x1a\nIEND\xaeB`\x82"}
    monkeypatch.setattr(draw, "render", lambda chart, formats, *_: {form: files[form] for form in formats})


@pytest.mark.deep
def test_every_figure_is_drawn(tmp_path):
    written(tmp_path)


def test_files_of_every_figure(tmp_path, undrawn):
    written(tmp_path)


def written(tmp_path):
    done = in_process("plot", RESULTS, "--out", tmp_path / "out", "--json", tmp_path / "numbers.json")
    assert complaints(done) == []
    made = sorted(path.name for path in (tmp_path / "out").iterdir())
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert made == sorted(f"{chart['name']}.{form}" for chart in numbers for form in ("png", "svg"))
    assert {"time-decode.png", "relative-reduce.svg", "memory-decode.svg", "traffic-decode.png"} <= set(made)
    for path in (tmp_path / "out").iterdir():
        if path.suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
        else:
            assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
            assert path.read_bytes().endswith(b"IEND\xaeB`\x82")
    assert "left out predicted: no point carries a prediction" in done.stdout
    assert "left out speedup: no kv_ring among the schemes of decode" in done.stdout


def test_the_same_bytes_whatever_the_user_set(tmp_path):
    """No screen, no place for caches, another style: the files do not change. And no MPI is started."""
    (tmp_path / "matplotlibrc").write_text("font.size: 30\nsavefig.dpi: 10\n")
    settings = {
        "DISPLAY": "",
        "MPLBACKEND": "no-such-backend",
        "MPLCONFIGDIR": "/proc/none",
        "HOME": "/proc/none",
    }
    one = made_results.write(tmp_path / "one.jsonl", made_results.keys(["chain", "ring"], [4096]))
    words = ("plot", str(one), "--figures", "time", "--out")
    first = in_process(*words, tmp_path / "a")
    program = (
        f"import sys\nfrom treeattn.cli import main\ntry: main([*{words}, 'b'])\n"
        "finally: print('mpi4py.MPI' in sys.modules)"
    )
    second = run("-c", program, cwd=tmp_path, **settings, PYTHONPATH=str(ROOT))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert complaints(second) == []
    assert second.stdout.endswith("False\n")
    for form in ("png", "svg"):
        name = f"time-decode.{form}"
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_scaling_figure_names_what_it_leaves_out(tmp_path, undrawn):
    """Of 1, 2 and 4 ranks: a length that only one has, and 8 ranks with other software, in a line each."""
    paths = []
    for size, git in ((1, "a"), (2, "a"), (4, "a"), (8, "b")):
        software = made_results.run_line()["software"] | {"git": git * 16}
        keys = made_results.keys(["chain"], [4096, 8192] if size == 4 else [4096], ranks=size)
        path = tmp_path / f"of_{size}.jsonl"
        paths.append(made_results.write(path, keys, run=f"of {size}", nodes=[0] * size, software=software))
    words = ("--figures", "scaling", "--format", "svg", "--out", tmp_path, "--json", tmp_path / "n.json")
    done = in_process("plot", *paths, *words, code=1)
    lines = [line for line in done.stderr.splitlines() if line.startswith("scaling leaves out ")]
    longer, other = sorted(lines)
    assert longer.startswith("scaling leaves out of_4.jsonl: decoding step, 4 ranks · 8,192 tokens")
    assert longer.endswith("others differ in tokens")
    assert other.startswith("scaling leaves out of_8.jsonl: decoding step, 8 ranks · 4,096 tokens")
    assert other.endswith("others differ in version")
    (chart,) = json.loads((tmp_path / "n.json").read_text())
    assert [f"scaling leaves out {text}" for text in chart["left_out"]] == lines
    assert [point[0] for point in chart["series"][0]["points"]] == [1, 2, 4]


def test_a_file_cut_off_in_mid_line(tmp_path, undrawn):
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(RESULTS.read_bytes()[:-200])
    done = in_process("plot", cut, "--figures", "time", "--format", "svg", "--out", tmp_path, code=1)
    assert f"{cut}:109: not a result line" in done.stderr
    assert (tmp_path / "time-decode.svg").exists()


def test_a_figure_asked_for_by_name_is_missed(tmp_path, undrawn):
    done = in_process(
        "plot", RESULTS, "--figures", "cold,predicted", "--format", "svg", "--out", tmp_path, code=1
    )
    assert complaints(done) == ["left out predicted: no point carries a prediction"]
    assert (tmp_path / "cold-decode.svg").exists()


def test_an_empty_file_among_good_ones(tmp_path, undrawn):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    done = in_process(
        "plot", RESULTS, empty, "--figures", "time", "--format", "svg", "--out", tmp_path, code=1
    )
    assert f"{empty}: is empty" in done.stderr
    assert (tmp_path / "time-decode.svg").exists()


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = in_process("plot", RESULTS, "--out", tmp_path / "out", code=1)
    assert done.stderr.startswith("treeattn: figures need matplotlib (")
    assert done.stderr.endswith("): pip install 'treeattn[plot]'\n")
    assert not (tmp_path / "out").exists()

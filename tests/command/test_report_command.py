"""``treeattn report``: one file that needs nothing else, with all that was found."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from unittest import mock

import pytest
from msgspec.structs import asdict

from tests.unit.study import made_results
from treeattn.collectives import Schedule, build
from treeattn.study import plot
from treeattn.study.compare import results
from treeattn.study.compare.schema import NULL, SUM
from treeattn.study.figures import draw
from treeattn.study.intervals import Estimate

from .launch import in_process

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SCHEMES = ("ring", "chain", "binary_tree", SUM, NULL)


class Parsed(HTMLParser):
    """Tables as lists of rows of texts, headings, and where links and images lead."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.headings, self.sources, self._into = [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._into = self.tables[-1][-1]
        elif tag in ("h1", "h2"):
            self.headings.append("")
            self._into = self.headings
        self.sources += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        self._into = None if tag in ("td", "th", "h1", "h2") else self._into

    def handle_data(self, data):
        if self._into is not None:
            self._into[-1] += data


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A page of made-up results, with predictions, a schedule of one's own and text that must be escaped."""
    folder = tmp_path_factory.mktemp("report")
    own = folder / "mine.json"
    own.write_text(Schedule("mine", 4, 1, build("chain", 4).rounds).to_json())
    name = in_process("schedule", own).stdout.split(",")[0]
    keys = made_results.keys((*SCHEMES, name), tokens=[0], what="reduce")
    emulated = {"TREEATTN_EMULATED": "--nodes 2 --delay 1ms"}
    lines = [made_results.run_line(warning="<script>alert(1)</script>", environment=emulated)]
    estimate = asdict(Estimate(100.0, 90.0, 110.0, 1.0, 0.9, 1.1))
    lines += [made_results.point_line(k, n, estimate=estimate) for k in keys for n in range(6)]
    path, out = folder / "r.jsonl", folder / "report.html"
    path.write_text("\n".join(map(json.dumps, lines)))
    two = {name: plot.FIGURES[name] for name in ("time", "predicted")}
    with mock.patch.object(plot, "FIGURES", two):  # of the others a test of its own draws each
        done = in_process("report", path, "--schedule", own, "--out", out, "--title", "A & B")
    assert done.returncode == 0, done.stderr
    return path, name, out


def test_all_that_was_found_is_there_and_nothing_is_fetched(written):
    path, name, out = written
    text = out.read_text()
    page = Parsed(text)
    assert page.headings[0] == "A & B"
    for heading in (
        "Machines",
        "Method",
        "Figures",
        "Schedules",
        "To reproduce",
    ):
        assert heading in page.headings
    assert page.sources
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.sources)
    assert "http" not in re.sub(r"base64,[\w+/=]+", "", text)
    assert "<script>alert" not in text
    assert "Predicted against measured, " in text
    measured = next(table for table in page.tables if "median" in table[0])
    column = measured[0].index("median")
    shown = {row[0]: float(row[column].replace(",", "")) for row in measured[1:]}
    found = {s.key.label: s.times["completion"].median for s in results.summarise(results.read(path))}
    assert shown == pytest.approx(found, rel=0.01)
    answers = next(table for table in page.tables if "verdict" in table[0])
    assert {row[0] for row in answers[1:]} == {"ring", "chain", "binary_tree", name}
    assert "jobs/emulated_cluster --nodes 2 --delay 1ms -- mpiexec -n 4 " in text
    assert "treeattn report r.jsonl --schedule mine.json --out report.html" in text
    assert "of one launch" in text
    for scheme in ("ring", "chain", name):
        assert f"{scheme} on 4 ranks, step by step" in text


def test_what_cannot_be_read_or_drawn_is_said(written, tmp_path, monkeypatch):
    monkeypatch.setattr(draw, "problem", lambda: "figures need <matplotlib>")
    path, name, _ = written
    out = tmp_path / "r.html"
    broken = tmp_path / "broken.jsonl"
    broken.write_text(path.read_text() + "\nnot a line\n")
    in_process("report", broken, "--out", out, code=1)
    text = out.read_text()
    assert f"{name}: a schedule of one&#x27;s own: give its file with --schedule" in text
    assert "not a result line" in text
    assert "figures need &lt;matplotlib&gt;" in text
    (tmp_path / "none.jsonl").write_text("")
    in_process("report", tmp_path / "none.jsonl", "--out", out, code=2)


@pytest.mark.deep
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is at hand")
def test_a_click_sorts_in_a_browser(written, tmp_path):
    """The columns of medians and of schemes, up and down, as numbers and as words."""
    page = tmp_path / "clicked.html"
    click = """<script>
      const shown = [];
      const table = [...document.querySelectorAll("table")].find(t => t.textContent.includes("median"));
      for (const name of ["median", "median", "scheme"]) {
        const head = [...table.querySelectorAll("th")].find(h => h.textContent === name);
        head.click();
        shown.push([...table.tBodies[0].rows].map(row => row.cells[head.cellIndex].textContent));
      }
      document.body.dataset.shown = JSON.stringify(shown);
    </script>"""
    page.write_text(written[2].read_text().replace("</body>", f"{click}</body>"))
    words = (
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}",
        "--dump-dom",
    )
    done = subprocess.run([*words, page.as_uri()], capture_output=True, text=True, timeout=300)
    found = re.search(r'data-shown="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    up, down, names = json.loads(found[1].replace("&quot;", '"').replace("&amp;", "&"))
    numbers = [float(text.replace(",", "")) for text in up]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) > 3
    assert down == up[::-1]
    assert names == sorted(names)

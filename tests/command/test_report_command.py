"""``treeattn report``: one file that needs nothing else, with all that was found."""

import base64
import functools
import html
import re
import shutil
import subprocess
from html.parser import HTMLParser
from unittest import mock

import pytest

from tests.unit.study import made_results
from treeattn.cli import report
from treeattn.collectives import Schedule, build
from treeattn.report import Progress, ratio
from treeattn.study.compare import rows
from treeattn.study.compare.rows import SUM
from treeattn.study.compare.summary import summarise

from .launch import in_process, treeattn

SCHEMES = ("ring", "chain", "binary_tree", SUM)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FRAME = '<iframe srcdoc="{page}" style="width: {pixels}px; height: 900px; border: 0"></iframe>'
MEASURING = """
<script>onload = () => {
  document.title = [...document.querySelectorAll("iframe")].map(({contentDocument: page}) => {
    const cut = [...page.querySelectorAll(".main")].some(table => table.scrollWidth > table.clientWidth);
    return page.documentElement.scrollWidth + (cut ? " cut" : " whole");
  });
}</script>
"""


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
        elif tag in ("h1", "h2", "h3"):
            self.headings.append("")
            self._into = self.headings
        self.sources += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        self._into = None if tag in ("td", "th", "h1", "h2", "h3") else self._into

    def handle_data(self, data):
        if self._into is not None:
            self._into[-1] += data


def test_all_that_was_found_is_there_and_nothing_is_fetched(tmp_path):
    """Of made-up results, with predictions, a schedule of one's own and text that must be escaped."""
    own = Schedule("mine", 4, 1, build("chain", 4).rounds)
    fields = {
        "warning": "<script>alert(1)</script>", "environment": {"TREEATTN_EMULATED": "--nodes 2 --delay 1ms"},
        "predicted_us": 100.0, "predicted_low_us": 90.0, "predicted_high_us": 110.0,
    }  # fmt: skip
    made, out = tmp_path / "r.jsonl", tmp_path / "report.html"
    made_results.write(made, made_results.keys(SCHEMES, [0]), **fields)
    made_results.write(made, made_results.keys(["mine@1"], [0]), schedule=own.to_json(), **fields)
    in_process("report", made, "--out", out)
    text = out.read_text()
    page = Parsed(text)
    assert page.headings[0] == "Reductions compared"
    assert {"Machines", "Method", "Measured", "Figures", "Schedules", "To reproduce"} <= set(page.headings)
    assert page.sources
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.sources)
    assert "http" not in re.sub(r"base64,[\w+/=]+", "", text)
    assert "<script>" not in text
    measured = next(table for table in page.tables if "verdict" in table[0])
    shown = {
        row[0]: (row[measured[0].index("µs from\nlast entry")], row[measured[0].index("ratio")])
        for row in measured[1:]
    }
    found = summarise(rows.read(made))
    assert shown == {one["label"]: (f"{one['time_us']:.1f}", ratio(one["ratio"])) for one in found}
    fastest = found[0]
    assert f"fastest here: {fastest['label']}, {ratio(fastest['ratio'])} of {fastest['baseline']}" in text
    assert "jobs/emulated_cluster --nodes 2 --delay 1ms -- mpiexec -n 4 treeattn compare" in text
    assert "treeattn report r.jsonl --out report.html" in text
    for scheme in ("ring", "chain", "mine@1"):
        assert f"{scheme} on 4 ranks" in page.headings


@pytest.mark.parametrize(
    ("cluster", "node", "about"),
    [((), 1, "2 x 2 ranks with the prices of cpu-hdr200"), ((), 0, "3 + 1 ranks with the prices"),
     (("--cluster", "dual-socket"), 1, "socket")],
)  # fmt: skip
def test_why_the_fastest_is_so_is_drawn(tmp_path, cluster, node, about):
    """Over time, on one scale, the fastest and the first that is slower; and in each schedule's drawing."""
    out, keys = tmp_path / "r.html", made_results.keys(SCHEMES, [0])
    path = made_results.write(tmp_path / "r", keys, 9, nodes=[0, 0, node, 1])
    soon = functools.partial(Progress, first=0.2)
    with (
        mock.patch.object(report, "simulate", wraps=report.simulate) as simulated,
        mock.patch.object(report, "Progress", soon),
    ):
        done = in_process("report", path, "--out", out, *cluster)
    assert simulated.call_count == 3  # one for each schedule
    assert "drawing the report" in done.stderr
    text = out.read_text()
    drawn = [base64.b64decode(one).decode() for one in re.findall(r"svg\+xml;base64,([\w+/=]+)", text)]
    over_time = [one for one in drawn if 'class="bar wait"' in one]
    assert [re.search(r'aria-label="(\w+)', one)[1] for one in over_time] == ["ring", "chain"]
    assert len({tuple(re.findall(r">[\d.]+ µs<", one)) for one in over_time}) == 1
    assert all('class="critical"' in one for one in over_time)
    rounds = [one for one in drawn if 'class="round' in one]
    assert ["critical path" in one for one in rounds] == 3 * [True]
    assert about in text
    assert " ".join(("report.html", *cluster)) + "</pre>" in text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to render with: apt-get install chromium")
def test_nothing_is_wider_than_a_window_or_a_page(tmp_path):
    """A4 has 703 pixels between margins of 12 mm."""
    fields = {"environment": {"SLURM_JOB_NODELIST": "node" + "0001," * 40}, "commit": 4 * "0e5f6e114c"}
    fields |= {"hosts": "node0001,node0002", "predicted_us": 9.0, "warning": "ranks share cores " * 4}
    one, many = (
        made_results.keys([*SCHEMES, "hierarchical"], [0, 512], heads=n, kv_heads=1) for n in (1, 16)
    )
    path = made_results.write(tmp_path / "r.jsonl", [*one, *many], 8, **fields)
    in_process("report", path, "--out", tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    pages = {360: text, 1280: text, 703: text.replace("@media print", "@media all")}
    frames = [FRAME.format(page=html.escape(page), pixels=pixels) for pixels, page in pages.items()]
    (tmp_path / "frame.html").write_text("\n".join([*frames, MEASURING]))
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    done = subprocess.run(
        [CHROMIUM, *words, f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "frame.html").as_uri()],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    found = re.search(r"<title>(.*)</title>", done.stdout)[1].split(",")
    for (wide, main), pixels in zip(map(str.split, found), pages, strict=True):
        assert int(wide) <= pixels
        assert main == "whole" or pixels < 703


def test_what_is_wrong_is_said(tmp_path):
    out = tmp_path / "r.html"
    large, failed = made_results.keys(["chain"], [0], ranks=16), made_results.keys(["<ring>"], [0])
    path = made_results.write(tmp_path / "r.jsonl", large, same_bits=False)
    made_results.write(path, failed, 1, time_us=None, error="needs 8 ranks & more")
    in_process("report", path, "--out", out, "--cluster", "laptop", code=1)
    text = out.read_text()
    assert text.count("not drawn: laptop has 8 places") == 2  # over time, and by rounds
    assert "chain on 16 ranks" in Parsed(text).headings
    assert "chain: ranks ended with different bits" in text
    assert "&lt;ring&gt; (reduce, 4 ranks, 8,320 bytes" in text
    assert "needs 8 ranks &amp; more" in text


def test_one_ratio_from_an_own_schedule_to_the_report(tmp_path):
    """A researcher's walk on 4 ranks: every place says the same number of a scheme, and the same sentence."""
    own, lines, facts, drawn, page = (
        tmp_path / name for name in ("mine.json", "r.jsonl", "s.json", "d.json", "r.html")
    )
    own.write_text(Schedule("mine", 4, 1, build("recursive_doubling", 4).rounds).to_json())
    done = treeattn("simulate", "--cluster", "leonardo", "--schemes", f"{own},ring", "--json", facts)
    assert done.stdout.startswith("fastest here: mine@")
    assert " ".join(done.facts["headline"].split()) in done.said
    schemes = f"{own},ring,chain,recursive_doubling,mpi_allreduce"
    done = treeattn("compare", "--schemes", schemes, "--bytes", "1Ki", "--repetitions", 6,
                    "--out", lines, "--json", facts, ranks=4)  # fmt: skip
    found = done.facts
    in_process("report", lines, "--out", page)
    figures = ("--out", tmp_path / "figures", "--figures", "relative", "--json", drawn)
    plotted = in_process("plot", lines, *figures).facts
    assert {one["bytes"] for one in found["summaries"]} == {1024}
    ((case, headline),) = found["headlines"].items()
    assert done.said.startswith(f"{case}: {headline}")
    text = page.read_text()
    assert headline in text
    table = next(table for table in Parsed(text).tables if "verdict" in table[0])
    reported = {row[0]: row[table[0].index("ratio")] for row in table[1:]}
    ratios = [(one["label"], ratio(one["ratio"])) for one in found["summaries"]]
    assert [(one["label"], ratio(one["ratio"])) for one in plotted] == ratios
    assert [*reported.items()] == ratios
    printed = [line.split() for line in done.stdout.splitlines()]
    for label, said in ratios:
        assert any(words[:1] == [label] and said in words for words in printed), label
    assert sorted(ratios, key=lambda one: float(one[1])) == ratios
    assert headline.startswith(f"fastest here: {ratios[0][0]}, ")
    mine = next(label for label, _ in ratios if label.startswith("mine@"))
    assert {mine, "recursive_doubling"} <= set(
        re.split(" = |: ", text.split("the same messages: ")[1].split("<")[0])
    )

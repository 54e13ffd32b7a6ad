"""The pages as HTML: what is looked up is there, and no page is wider than its screen."""

import html
import inspect
import json
import pkgutil
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import click
import pytest

import treeattn
from treeattn import cache_nodes, collectives, energy, llama, token_tree
from treeattn.cli import commands
from treeattn.collectives import clusters

pytestmark = pytest.mark.deep
ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WIDTHS = (320, 375, 480, 640, 768, 900, 1024, 1200, 1312, 1400, 1471, 1600, 1920, 2560)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for needed in ("sphinx", "furo", "myst_parser", "sphinx_click", "sphinx_copybutton"):
        pytest.importorskip(needed, reason=f"{needed} is not installed (the extra `docs`)")
    out = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "sphinx", "-W", "-n", "-q", ROOT / "docs", out]
    subprocess.run(words, check=True, timeout=600)
    return out


def test_every_public_class_has_its_methods_there(site):
    index = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4])
    known = {line.split()[0] for line in index.decode().splitlines()}
    modules = (treeattn, token_tree, energy, llama, cache_nodes, collectives)
    for module in modules:
        for name in module.__all__:
            entry = getattr(module, name)
            if name.startswith("__") or inspect.ismodule(entry):
                continue
            assert f"{module.__name__}.{name}" in known
            if inspect.isclass(entry) and not issubclass(entry, Exception | tuple):
                for method, of in inspect.getmembers(entry, inspect.isfunction):
                    if (not method.startswith("_") or method == "__call__") and of.__doc__:
                        assert f"{module.__name__}.{name}.{method}" in known
    for module in pkgutil.iter_modules(clusters.__path__):
        assert f"{clusters.__name__}.{module.name}" in known
    for method in ("__call__", "begin", "test", "finish"):
        assert f"treeattn.Decoder.{method}" in known


def test_every_command_has_its_options_there(site):
    page = html.unescape(re.sub("<[^>]+>", "", (site / "commands.html").read_text()))
    context = click.Context(commands)
    for name in commands.list_commands(context):
        command = commands.get_command(context, name)
        section = page.partition(f"\n{name}¶")[2]
        for option in (option for option in command.params if isinstance(option, click.Option)):
            assert option.opts[0] in section, f"{name}: {option.opts[0]}"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is at hand")
def test_no_page_is_wider_than_its_screen(site, tmp_path):
    pages = [str(page.relative_to(site)) for page in site.rglob("*.html") if "_static" not in page.parts]
    script = """
      (async () => {
        const wide = [], frame = document.body.appendChild(document.createElement("iframe"));
        frame.style = "border: 0; height: 700px";
        for (const page of PAGES) {
          await new Promise(done => { frame.onload = done; frame.src = page; });
          for (const width of [...WIDTHS, "wider"]) {
            const shown = frame.contentDocument;
            frame.style.width = (width == "wider" ? 320 : width) + "px";
            if (width == "wider") shown.querySelector("article").style.width = "400px";
            await new Promise(done => setTimeout(done, 30));
            const parts = [shown.documentElement, ...shown.querySelectorAll(".content")];
            if (parts.some(part => part.scrollWidth > part.clientWidth)) wide.push([page, width]);
          }
        }
        document.body.dataset.wide = JSON.stringify(wide);
      })();"""
    script = script.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS))
    (site / "all.html").write_text(f"<!doctype html><body><script>{script}</script></body>")
    words = ("--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom",
             "--virtual-time-budget=600000", f"--user-data-dir={tmp_path}")  # fmt: skip
    address = (site / "all.html").as_uri()
    done = subprocess.run([CHROMIUM, *words, address], capture_output=True, text=True, timeout=600)
    found = re.search(r'data-wide="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    wide = json.loads(html.unescape(found[1]))
    assert [entry for entry in wide if entry[1] != "wider"] == []
    assert len(wide) == len(pages)  # what was made too wide on purpose

"""The version and the dependencies stand in setup.cfg, and whatever else names them agrees."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
VERSION = SETUP["metadata"]["version"]


def read(name: str) -> str:
    return (ROOT / name).read_text()


def test_the_changelog_begins_with_the_version():
    found = re.search(r"^## (\S+) - (unreleased|\d{4}-\d\d-\d\d)$", read("CHANGELOG.md"), re.MULTILINE)
    assert found is not None
    assert found[1] == VERSION


def test_the_citation_is_of_the_version_and_its_day():
    citation = read("CITATION.cff")
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [VERSION]
    days = re.findall(r"^date-released: (.*)$", citation, re.MULTILINE)
    heading = re.search(rf"^## {re.escape(VERSION)} - (.*)$", read("CHANGELOG.md"), re.MULTILINE)
    assert heading is not None
    assert days == ([] if heading[1] == "unreleased" else [heading[1]])


def test_no_source_names_the_version():
    """The package asks its own metadata."""
    sources = [ROOT / "docs/conf.py", ROOT / "pyproject.toml", ROOT / "Makefile"]
    for folder in ("treeattn", "collectives", "kernels", "jobs"):
        sources += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".c", ".cu", ".sh")]
    assert len(sources) > 150
    for path in sources:
        assert VERSION not in path.read_text(), f"{path.relative_to(ROOT)} names {VERSION}"

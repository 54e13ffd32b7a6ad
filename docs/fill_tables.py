"""Writes the tables of results into the pages that show them: python docs/fill_tables.py

A page has `<!-- table FILE EXPERIMENT KIND INDEX -->` and `<!-- end -->`; what stands between is replaced by
that table of docs/results/FILE, as `treeattn paper --json` wrote it. Numbers are never typed by hand, and a
test fails while a page shows others than the results.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from treeattn.study.paper import shown

DOCS = Path(__file__).resolve().parent
BLOCK = re.compile(r"<!-- table (\S+) (\S+) (model|measured) (\d+) -->\n.*?<!-- end -->", re.DOTALL)


def filled(page: str) -> str:
    """The text of a page with every table as the results have it."""
    return BLOCK.sub(lambda block: _block(*block.groups()), page)


def _block(file: str, name: str, kind: str, index: str) -> str:
    facts = json.loads((DOCS / "results" / file).read_text())
    experiment = next(entry for entry in facts["experiments"] if entry["name"] == name)
    table = _markdown(experiment[kind][int(index)])
    return f"<!-- table {file} {name} {kind} {index} -->\n\n{table}\n\n<!-- end -->"


def _markdown(table: dict[str, Any]) -> str:
    rows = [[shown(cell) for cell in row] for row in table["rows"]]
    return "\n".join(
        "| " + " | ".join(cells) + " |"
        for cells in (table["headings"], ["---"] * len(table["headings"]), *rows)
    )


if __name__ == "__main__":
    for page in DOCS.glob("*.md"):
        text = page.read_text()
        if filled(text) != text:
            page.write_text(filled(text))
            print(f"filled {page.name}")

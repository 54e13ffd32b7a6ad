"""A report as one HTML file that needs no network: text, tables that sort, pictures."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from html import escape

from treeattn.report import Column, Report, Row

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; padding: 0 1em; max-width: 75em; }
table { border-collapse: collapse; font-size: 13px; } .wide { overflow-x: auto; }
th, td { padding: .2em .7em; text-align: right; white-space: pre; border-bottom: 1px solid #8884; }
.words { text-align: left; } th { cursor: pointer; vertical-align: bottom; }
.red { color: #c33; } .dim { opacity: .75; }
pre { overflow-x: auto; } img { max-width: 100%; }
"""
# A click on a heading sorts by it, a second one the other way; "12,345" and "1.2 to 3.4" are numbers by their
# beginning, and a dash is last.
_SCRIPT = """
for (const head of document.querySelectorAll("th")) head.onclick = () => {
  const body = head.closest("table").tBodies[0], at = head.cellIndex;
  const up = head.dataset.up = +!+head.dataset.up;
  const key = row => { const text = row.cells[at].textContent, number = parseFloat(text.replaceAll(",", ""));
    return text === "-" ? [2, 0] : isNaN(number) ? [1, text] : [0, number]; };
  const less = (a, b) => a[0] - b[0] || (a[1] > b[1]) - (a[1] < b[1]);
  const rows = [...body.rows].sort((a, b) => less(key(a), key(b)));
  body.append(...(up ? rows : rows.reverse()));
};
"""


@dataclass(slots=True)
class Page(Report):
    """What is added to it becomes HTML, every column of tables among it."""

    title: str = "treeattn"
    _body: list[str] = field(default_factory=list)

    def heading(self, text: str, level: int = 2) -> None:
        """Add a heading."""
        self._body.append(f"<h{level}>{escape(text)}</h{level}>")

    def line(self, text: str = "", style: str | None = None) -> None:
        """Add a paragraph, without a terminal's empty lines before it."""
        if text.strip():
            self._body.append(f'<p class="{escape(style or "")}">{escape(text.strip())}</p>')

    def text(self, text: str) -> None:
        """Add lines as they are."""
        self._body.append(f"<pre>{escape(text)}</pre>")

    def folded(self, title: str, text: str) -> None:
        """Add lines that are shown by a click."""
        self._body.append(f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>")

    def picture(self, svg: bytes, what: str) -> None:
        """Add an SVG file as an image: its ids and styles stay its own."""
        data = base64.b64encode(svg).decode()
        self._body.append(f'<p><img alt="{escape(what)}" src="data:image/svg+xml;base64,{data}"></p>')

    def table(
        self,
        rows: Iterable[Row],
        columns: Iterable[Column[Row]],
        style: Callable[[Row], str] = lambda _: "",
    ) -> None:
        """Add a table that sorts by each of its columns."""
        kept = list(columns)
        sides = ["words" if column.words else "" for column in kept]
        head = "".join(f'<th class="{s}">{escape(c.heading)}</th>' for s, c in zip(sides, kept, strict=True))
        lines = []
        for row in rows:
            cells = [f'<td class="{s}">{escape(c.cell(row))}</td>' for s, c in zip(sides, kept, strict=True)]
            lines.append(f'<tr class="{escape(style(row))}">{"".join(cells)}</tr>')
        body = "\n".join(lines)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        self._body.append(f'<div class="wide">{table}</div>')

    def html(self) -> bytes:
        """The file."""
        parts = [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>{escape(self.title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{escape(self.title)}</h1>",
            *self._body,
            f"<script>{_SCRIPT}</script></body></html>\n",
        ]
        return "\n".join(parts).encode()

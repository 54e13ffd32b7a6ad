"""A schedule as one HTML page without outside resources: step through the rounds with buttons or keys."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from treeattn.collectives.drawings.svg import svg
from treeattn.collectives.schedule import Schedule

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>%(title)s</title>
<style>
:root { color-scheme: light dark; }
body { margin: 1.5rem; font: 14px/1.5 system-ui, sans-serif; background: Canvas; color: CanvasText; }
.controls { display: flex; flex-wrap: wrap; gap: .5rem; align-items: center; margin-bottom: .75rem; }
button { font: inherit; padding: .25rem .8rem; }
input[type=range] { width: 16rem; }
.drawing { overflow-x: auto; }
.drawing svg { max-width: none; }
.round { transition: opacity .2s; }
.past { opacity: .3 !important; } .future { opacity: 0 !important; }
#transfers { font-family: ui-monospace, monospace; min-height: 3em; max-width: 70rem; }
table { border-collapse: collapse; margin-top: .75rem; font-variant-numeric: tabular-nums; }
td, th { padding: 0 .6rem 0 0; text-align: left; font-weight: normal; }
.bar { display: inline-block; width: 14rem; height: .7rem; background: rgb(128 128 128 / 25%%); }
.bar span { display: block; height: 100%%; background: #0072b2; }
.whole .bar span { background: #d55e00; }
</style>
</head>
<body>
<div class="controls">
<button id="back" title="left arrow key">&larr; back</button>
<button id="on" title="right arrow key">next &rarr;</button>
<input id="at" type="range" min="0" max="%(rounds)d" value="0" aria-label="round">
<strong id="where" aria-live="polite"></strong>
</div>
<div id="transfers"></div>
<div class="drawing">
%(svg)s</div>
<table aria-label="contributions held"><tbody id="held"></tbody></table>
<script>
const steps = %(steps)s;
const size = %(size)d;
const byId = id => document.getElementById(id);
let at = 0;
const rows = Array.from({length: size}, (_, rank) => {
  const row = byId("held").insertRow();
  row.innerHTML = `<td>rank ${rank}</td><td><div class="bar"><span></span></div></td><td></td>`;
  return row;
});
function show(step) {
  at = Math.max(0, Math.min(steps.length - 1, step));
  byId("at").value = at;
  byId("where").textContent = at ? `round ${at} of ${steps.length - 1}` : "before the first round";
  byId("transfers").textContent = steps[at].transfers.join("  ");
  document.querySelectorAll("[data-round]").forEach(drawn => {
    const round = Number(drawn.dataset.round);
    drawn.classList.toggle("past", round < at && drawn.classList.contains("round"));
    drawn.classList.toggle("future", round > at);
  });
  rows.forEach((row, rank) => {
    const held = steps[at].held[rank];
    row.className = held >= size ? "whole" : "";
    row.querySelector("span").style.width = `${100 * held / size}%%`;
    row.cells[2].textContent = `${+held.toFixed(2)} of ${size}`;
  });
  byId("back").disabled = at === 0;
  byId("on").disabled = at === steps.length - 1;
}
byId("back").onclick = () => show(at - 1);
byId("on").onclick = () => show(at + 1);
byId("at").oninput = event => show(Number(event.target.value));
document.addEventListener("keydown", event => {
  const act = {ArrowLeft: () => show(at - 1), ArrowRight: () => show(at + 1), " ": () => show(at + 1),
               Home: () => show(0), End: () => show(steps.length - 1)}[event.key];
  if (act) { event.preventDefault(); act(); }
});
show(0);
</script>
</body>
</html>
"""


def html(schedule: Schedule, nodes: Sequence[Any] | None = None) -> str:
    """A page that shows one round at a time, its transfers, and how many contributions each rank holds.

    For a schedule of several chunks the number held is the mean over the chunks that the result keeps on
    that rank, or where it keeps none over all. `nodes` and errors as for `svg`.
    """
    drawing = svg(schedule, nodes)
    names = [[], *([t.arrow for t in round_] for round_ in schedule.rounds)]
    held = list(_contributions(schedule))
    steps = [{"transfers": transfers, "held": counts} for transfers, counts in zip(names, held, strict=True)]
    return _PAGE % {
        "title": escape(f"{schedule.name} on {schedule.size} ranks"),
        "rounds": len(schedule.rounds),
        "size": schedule.size,
        "steps": json.dumps(steps, separators=(",", ":")),
        "svg": drawing,
    }


def _contributions(schedule: Schedule) -> Iterator[list[float]]:
    """Before the first round and after each one: contributions held per rank, mean over its chunks."""
    held = [[1 << rank] * schedule.chunks for rank in range(schedule.size)]
    yield [_mean(schedule, rank, masks) for rank, masks in enumerate(held)]
    for round_ in schedule.rounds:
        before = [list(masks) for masks in held]
        for t in round_:
            for chunk in t.chunks:
                kept = held[t.dst][chunk] if t.merge else 0
                held[t.dst][chunk] = kept | before[t.src][chunk]
        yield [_mean(schedule, rank, masks) for rank, masks in enumerate(held)]


def _mean(schedule: Schedule, rank: int, masks: Sequence[int]) -> float:
    promised = schedule.promised(rank)
    kept = masks[promised.start : promised.stop] or masks
    return round(sum(mask.bit_count() for mask in kept) / len(kept), 3)

"""Which points share a figure: equal in everything but the scheme and what the axis shows."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec.structs import asdict

from treeattn.study.compare.results import Results, Summary, compared_series
from treeattn.study.compare.schema import WIRE_BYTES, Key, Point, Run
from treeattn.study.figures.style import in_order


@dataclass(frozen=True, slots=True)
class Axis:
    """A quantity on the x axis. joins: fields in which points of one line may differ, the widest choice
    first: a narrower one is taken where a scheme would have two points in one place."""

    label: str
    value: Callable[[Key], float]
    joins: tuple[tuple[str, ...], ...]


TOKENS = Axis("context length over all ranks, tokens", lambda key: key.tokens, (("tokens",),))
RANKS = Axis("ranks", lambda key: key.ranks, (("ranks", "layout"), ("ranks",)))
ARRIVALS = Axis("ranks enter so much apart, µs", lambda key: key.spread, (("arrivals",),))
PAYLOAD = Axis(
    "records of a rank, bytes",
    lambda key: key.batch * key.queries * key.heads * (key.head_dim + 2) * WIRE_BYTES[key.wire],
    (("batch", "queries", "heads", "kv_heads", "head_dim"),),
)

#: What is measured -> its name in titles, and the axis on which its cases lie.
KINDS = {"decode": ("decoding step", TOKENS), "reduce": ("reduction", PAYLOAD)}


@dataclass
class Study:
    """What figures are made of. files: run -> the file that holds it. rooflines: file name -> what
    ``treeattn roofline --json`` wrote there. baseline: the scheme of relative times."""

    results: Results = field(default_factory=Results)
    summaries: list[Summary] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    rooflines: dict[str, dict[str, Any]] = field(default_factory=dict)
    baseline: str = ""

    def schemes(self) -> list[str]:
        """Every scheme in these results, in the order of all figures."""
        return in_order(summary.key.scheme for summary in self.summaries)

    @functools.cached_property
    def blocks(self) -> dict[tuple[Any, ...], list[Point]]:
        """(case, version) -> its points, which were measured beside each other."""
        found: dict[tuple[Any, ...], list[Point]] = {}
        for point in self.results.points:
            found.setdefault((point.key.case, self.results.version(point)), []).append(point)
        return found


@dataclass(frozen=True, slots=True)
class Case:
    """The points of one figure. fixed: what they have in common. suffix: of the file's name, from what
    differs between the cases of one kind; "" where there is only one."""

    what: str
    axis: Axis
    fixed: dict[str, Any]
    members: tuple[Summary, ...]
    study: Study
    suffix: str = ""

    @property
    def series(self) -> Literal["completion", "after_last_entry"]:
        """What schemes are compared by: from the last entry on if in some place it is so."""
        ordered = sorted(self.members, key=lambda summary: repr(summary.key.case))
        of_cases = (list(of) for _, of in itertools.groupby(ordered, lambda summary: summary.key.case))
        late = any(compared_series(of_case) == "after_last_entry" for of_case in of_cases)
        return "after_last_entry" if late else "completion"

    def by_scheme(self) -> Iterator[tuple[str, list[Summary]]]:
        """(label of a scheme, its points from left to right), in the order of all figures."""
        for scheme in in_order(summary.key.label for summary in self.members):
            mine = [summary for summary in self.members if summary.key.label == scheme]
            yield scheme, sorted(mine, key=lambda summary: self.axis.value(summary.key))

    def places(self) -> list[float]:
        """Where on the axis there are points."""
        return sorted({self.axis.value(summary.key) for summary in self.members})

    def at_end(self) -> list[Summary]:
        """The points farthest right, such as those of the longest context; one for each scheme."""
        last = self.places()[-1]
        return [mine[-1] for _, mine in self.by_scheme() if self.axis.value(mine[-1].key) == last]

    def title(self, key: Key | None = None) -> str:
        """The case in words; with what stands on the axis if a `key` is given."""
        return _words(self.fixed if key is None else self.fixed | _fields(key))

    def around(
        self, name: str, title: str, note: str, key: Key | None = None
    ) -> tuple[str, str, str, tuple[str, ...]]:
        """Name, title, case and notes of a chart. {} stands for what is measured. key: as for `title`."""
        kind, notes = KINDS[self.what][0], (note, *self.notes())
        return name.format(self.what) + self.suffix, title.format(kind), self.title(key), notes

    def runs(self) -> dict[str, dict[str, Run]]:
        """Version -> id -> run, of the points in this case."""
        results, compared = self.study.results, {summary.key.case for summary in self.members}
        found = {summary.version: dict[str, Run]() for summary in self.members}
        for point in results.points:
            if point.key.case in compared and results.version(point) in found:
                found[results.version(point)][point.run] = results.runs[point.run]
        return found

    def notes(self) -> tuple[str, ...]:
        """Where the points come from: versions and machine, warnings of the runs, schemes that failed."""
        compared = {summary.key.case for summary in self.members}
        runs = {name: list(of.values()) for name, of in self.runs().items()}
        notes = [
            f"{name}; started {', '.join(sorted({run.started[:10] for run in of}))}."
            for name, of in runs.items()
        ]
        warnings = dict.fromkeys(run.warning for of in runs.values() for run in of if run.warning)
        notes += [f"Warning: {text}." for text in warnings]
        failed = [entry.key.label for entry in self.study.results.errors if entry.key.case in compared]
        notes += [f"Could not run here: {', '.join(in_order(failed))}."] if failed else []
        return tuple(notes)


def cases(study: Study, axis: Axis | None = None) -> list[Case]:
    """All points, split into figures over `axis`, by default that of `KINDS`."""
    found: list[Case] = []
    for what, (_, own) in KINDS.items():
        chosen = axis or own
        summaries = [summary for summary in study.summaries if summary.key.what == what]
        groups = list(_split(summaries, chosen, chosen.joins))
        common = set.intersection(*(set(fixed.items()) for fixed, _ in groups)) if groups else set()
        found += [
            Case(what, chosen, fixed, tuple(members), study, _suffix(fixed, common, study))
            for fixed, members in groups
        ]
    return found


def left_out(study: Study, axis: Axis) -> tuple[str, ...]:
    """What no line over `axis` can hold, each with the reason, where there are several places to join."""
    if len({axis.value(summary.key) for summary in study.summaries}) < 2:
        return ()
    every = cases(study, axis)
    return tuple(_why_alone(case, every) for case in every if len(case.places()) < 2)


def _why_alone(case: Case, every: list[Case]) -> str:
    """The reason is what keeps it from the most similar case in another place."""
    others = [other for other in every if other.what == case.what and other.places() != case.places()]
    apart = [
        [name for name, value in case.fixed.items() if other.fixed.get(name, value) != value]
        for other in others
    ]
    words = {"build": "version", "layout": "nodes"}
    named = ", ".join(words.get(name, name) for name in min(apart, key=len)) if apart else ""
    reason = f"others differ in {named}" if named else "there is no other to join it with"
    files = dict.fromkeys(case.study.files.get(run, run) for of in case.runs().values() for run in of)
    return f"{', '.join(files)}: {KINDS[case.what][0]}, {case.title(case.members[0].key)}: {reason}"


def _split(
    summaries: Iterable[Summary], axis: Axis, joins: tuple[tuple[str, ...], ...]
) -> Iterator[tuple[dict[str, Any], list[Summary]]]:
    joined = joins[0] if joins else ()
    groups: dict[tuple[Any, ...], list[Summary]] = {}
    for summary in summaries:
        build, _, layout = summary.version.rpartition(", ranks ")  # as `results.version` puts them together
        fields = _fields(summary.key) | {"layout": _brief(layout), "build": build}
        fixed = tuple((name, value) for name, value in fields.items() if name not in joined)
        groups.setdefault(fixed, []).append(summary)
    for fixed, members in groups.items():
        if joins and len({(axis.value(m.key), m.key.label) for m in members}) < len(members):
            yield from _split(members, axis, joins[1:])
        else:
            yield dict(fixed), members


def _brief(layout: str) -> str:
    """Ranks on each node, 4+4+4+2 as 3x4+2: names of files have an end."""
    nodes, *order = layout.split()
    runs = [(size, len(list(run))) for size, run in itertools.groupby(nodes.split("+"))]
    parts = [f"{count}x{size}" if count > 2 else "+".join([size] * count) for size, count in runs]
    return " ".join(["+".join(parts), *order])


def _fields(key: Key) -> dict[str, Any]:
    """Without what is compared, and without tokens where they have no part."""
    apart = ("scheme", "transport", "executor", *(["tokens"] if key.what == "reduce" else []))
    return {name: value for name, value in asdict(key).items() if name not in apart}


def _suffix(fixed: dict[str, Any], common: set[tuple[str, Any]], study: Study) -> str:
    """Of a file's name, and of no folder's: what is not common to all cases of one kind."""
    builds = list(dict.fromkeys(summary.version.rpartition(", ranks ")[0] for summary in study.summaries))
    known = {name: value for name, value in fixed.items() if (name, value) not in common}
    if "build" in known:
        known["build"] = builds.index(known["build"]) + 1
    return "".join(re.sub(r"[^\w.+=:-]", "_", f"-{name}{value}") for name, value in known.items())


def _words(fields: dict[str, Any]) -> str:
    known = {"layout": "", **fields}
    nodes = f" on nodes of {known['layout']}" if known["layout"] else ""  # such as 4+4, 16x8 or 2+2 cyclic
    nodes = " on one node" if known["layout"].isdecimal() else nodes
    parts = [f"{known['ranks']} ranks{nodes}"] if "ranks" in known else []
    parts += [f"{known['ranks_per_node']} a node"] if known.get("ranks_per_node") else []
    parts += [f"{known['tokens']:,} tokens"] if "tokens" in known else []
    if "heads" in known:
        parts.append("{heads} query and {kv_heads} KV heads × {head_dim}".format(**known))
        parts.append("batch {batch}, queries {queries}".format(**known))
    parts.append("{dtype}, {wire} records".format(**known))
    parts += ["on GPUs"] if known.get("device") == "cuda" else []
    late = known.get("arrivals", "together") != "together"
    parts += [f"arrivals {known['arrivals']}"] if late else []
    return " · ".join(parts)

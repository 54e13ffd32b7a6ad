"""Schedules to test with: of the catalogue, drawn to be correct by construction, and mutations of them."""

from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from hypothesis import strategies as st

from treeattn.collectives import (
    Schedule,
    Transfer,
    build,
    check,
    names,
    needs_nodes,
    on_chunks,
    on_ranks,
    reversed_as_copies,
    side_by_side,
    then,
    to_root,
)
from treeattn.errors import ScheduleError

SIZES = st.integers(1, 8)
CHANGES = ["drop", "double", "src", "dst", "turn", "merge", "chunks", "round", "swap"]


def cut(draw: Any, ranks: list[int]) -> tuple[tuple[int, ...], ...]:
    """The ranks in neighbouring parts, each of at least one."""
    cuts = sorted(draw(st.sets(st.integers(1, len(ranks) - 1)))) if len(ranks) > 1 else []
    return tuple(tuple(ranks[first:end]) for first, end in pairwise([0, *cuts, len(ranks)]))


@st.composite
def node_groups(draw, size):
    """Nodes of any ranks: in order or dealt out, of like or unlike sizes."""
    return cut(draw, draw(st.one_of(st.just(list(range(size))), st.permutations(range(size)))))


def tree(draw, size):
    """A tree of drawn arity: up to rank 0 level by level, and back as copies."""
    parents = [None, *(draw(st.integers(0, rank - 1)) for rank in range(1, size))]
    depth = [0] * size
    for rank in range(1, size):
        depth[rank] = depth[parents[rank]] + 1
    levels = range(max(depth), 0, -1)
    up = tuple(tuple(Transfer(r, parents[r]) for r in range(size) if depth[r] == level) for level in levels)
    return then(up, reversed_as_copies(up))


def butterfly(draw, size):
    """Groups of drawn sizes that all send to each other, near first; the ranks beyond fold into others."""
    radices, core = [], 1
    while 2 * core <= size and draw(st.booleans()):
        radices.append(draw(st.integers(2, size // core)))
        core *= radices[-1]
    rounds, distance = [], 1
    for radix in radices:
        digit = [rank // distance % radix for rank in range(core)]
        rest = [rank - digit[rank] * distance for rank in range(core)]
        pairs = ((a, b) for a in range(core) for b in range(core) if a != b and rest[a] == rest[b])
        rounds.append(tuple(Transfer(a, b) for a, b in pairs))
        distance *= radix
    fold = tuple(Transfer(rank, rank % core) for rank in range(core, size))
    fold = (fold,) if fold else ()
    return then(fold, rounds, reversed_as_copies(fold))


def owners(draw, size):
    """Every chunk is gathered at its rank, all at once, and copied from there."""
    gather = tuple(
        Transfer(src, dst, range(dst, dst + 1)) for dst in range(size) for src in range(size) if src != dst
    )
    gather = (gather,) if gather else ()
    return then(gather, reversed_as_copies(gather))


@st.composite
def drawn_schedules(draw, sizes):
    """Correct by construction: combinators and rewrites that keep the proof."""
    size = draw(sizes)
    parts = []
    for _ in range(draw(st.integers(1, 2))):
        made = draw(st.sampled_from([tree, butterfly, butterfly, owners]))
        chunks = size if made is owners else 1
        rounds = on_ranks(made(draw, size), draw(st.permutations(range(size))))
        width = draw(st.integers(1, 3))
        parts.append((chunks * width, on_chunks(rounds, 0, width)))
    first = [0, parts[0][0]]
    rounds = side_by_side(*(on_chunks(rounds, at) for at, (_, rounds) in zip(first, parts, strict=False)))
    chunks = sum(count for count, _ in parts)
    if size > 1 and draw(st.booleans()):  # contributions change places: every one is still there once
        order = draw(st.permutations(range(size)))
        swap = tuple(Transfer(a, b, range(chunks), False) for a, b in enumerate(order) if a != b)
        rounds = then((swap,) if swap else (), rounds)
    if size > 1 and draw(st.booleans()):  # what is complete may be copied anywhere
        a, b = draw(st.permutations(range(size)))[:2]
        rounds = then(rounds, ((Transfer(a, b, range(chunks), False),),))
    return Schedule("drawn", size, chunks, tuple(tuple(_split(draw, round_)) for round_ in rounds if round_))


def _split(draw, round_):
    """Some transfers of several chunks become two messages of the same round."""
    for t in round_:
        middle = draw(st.integers(t.chunks.start, t.chunks.stop - 1))
        if middle > t.chunks.start:
            yield t._replace(chunks=range(t.chunks.start, middle))
        yield t._replace(chunks=range(middle, t.chunks.stop))


@st.composite
def catalogued(draw, sizes):
    """A schedule of the catalogue; over drawn nodes where it is shaped by them."""
    size, name = draw(sizes), draw(st.sampled_from(names("schedule")))
    return build(name, size, **({"nodes": draw(node_groups(size))} if needs_nodes(name) else {}))


@st.composite
def schedules(draw, sizes=SIZES):
    """Correct ones of both kinds, some of them to rank 0 alone, and mutants that the check accepts."""
    schedule = draw(st.one_of(drawn_schedules(sizes), catalogued(sizes)))
    schedule = to_root(schedule) if schedule.result == "replicated" and draw(st.booleans()) else schedule
    for _ in range(draw(st.integers(0, 6))):  # about one mutant of seventeen is correct
        mutant = draw(mutated(schedule))
        schedule = mutant if accepted(mutant) else schedule
    return schedule


def accepted(schedule):
    """Whether the check accepts it."""
    try:
        check(schedule)
    except ScheduleError:
        return False
    return True


@st.composite
def mutated(draw, schedule):
    """One drawn change, which may or may not break the schedule: transfers dropped, doubled, retargeted,
    turned, flipped between merge and copy, given other chunks or another round; or two rounds swapped."""
    places = [(i, j) for i, round_ in enumerate(schedule.rounds) for j in range(len(round_))]
    if not places:
        return schedule
    i, j = draw(st.sampled_from(places))
    rounds = [list(round_) for round_ in schedule.rounds]
    t = rounds[i][j]
    first = draw(st.integers(0, schedule.chunks - 1))
    change = draw(st.sampled_from(CHANGES))
    rank = draw(st.integers(0, schedule.size - 1))
    new = {
        "drop": [],
        "double": [t, t],
        "src": [t._replace(src=rank)],
        "dst": [t._replace(dst=rank)],
        "turn": [t._replace(src=t.dst, dst=t.src)],
        "merge": [t._replace(merge=not t.merge)],
        "chunks": [t._replace(chunks=range(first, draw(st.integers(first + 1, schedule.chunks))))],
        "round": [],
        "swap": [t],
    }[change]
    rounds[i][j : j + 1] = new
    if change in ("round", "swap"):
        other = draw(st.integers(0, len(rounds) - 1))
        if change == "round":
            rounds[other].append(t)
        else:
            rounds[i], rounds[other] = rounds[other], rounds[i]
    return replace(schedule, rounds=tuple(map(tuple, rounds)))


class Case(NamedTuple):
    """A reduction: `records` records, cut at multiples of `granularity`; a seed for everything else."""

    schedule: Schedule
    nodes: tuple[tuple[int, ...], ...]
    records: int
    granularity: int
    seed: int


@st.composite
def cases(draw, sizes=SIZES):
    """Reductions over any nodes; there may be fewer records than chunks."""
    schedule = draw(schedules(sizes))
    granularity = draw(st.sampled_from([1, 1, 1, 2, 3]))
    rows = draw(st.one_of(st.integers(1, 9), st.just(2 * schedule.chunks)))
    nodes = draw(node_groups(schedule.size))
    return Case(schedule, nodes, min(rows, 40) * granularity, granularity, draw(st.integers(0, 999)))


def different_brackets() -> Schedule:
    """Rank 3 folds ((0+1)+2)+3 at once, the others pair up: (0+1)+(2+3)."""
    first = (*(Transfer(r, 3) for r in range(3)), Transfer(0, 1), Transfer(1, 0), Transfer(3, 2))
    return Schedule("brackets", 4, 1, (first, (Transfer(2, 0), Transfer(2, 1), Transfer(0, 2))))


def star(size: int, name: str = "star") -> Schedule:
    """One that no catalogue has: everyone sends to rank 0, which sends back."""
    up = (tuple(Transfer(rank, 0) for rank in range(1, size)),) if size > 1 else ()
    return Schedule(name, size, 1, up + reversed_as_copies(up))

"""The kernel that pulls records out of other ranks' memory; ranks are threads."""

import itertools
from typing import Any

import numpy as np
import pytest

from tests.support.drawn import sample
from tests.support.reducer_contract import plain, promised, wanted
from treeattn import collectives
from treeattn.backends import cpu, cuda
from treeattn.collectives import program as ir
from treeattn.collectives.schedule import Schedule
from treeattn.errors import RestrictionError

from .faults import FAULTS, planted, weakly_ordered
from .node import Node
from .runtime import EmulatorRuntime

Array = np.ndarray[Any, Any]
HEAD_DIM = 8
#: Ranks of each node: as a launcher fills nodes, of different sizes, dealt out in turn, and a node of one.
NODES = [
    ((0, 1), (2, 3)),
    ((0, 1, 2, 3), (4, 5, 6, 7)),
    ((0, 1, 2), (3, 4)),
    ((0, 2, 4), (1, 3, 5)),
    ((0, 1), (2,), (3, 4, 5)),
]


def made(steps: int, size: int, records: int, head_dim: int = HEAD_DIM) -> Array:
    """Partials of each step, of each rank, of every kind."""
    rng = np.random.default_rng(size * records)
    partials = rng.standard_normal((steps, size, records, head_dim + 2)).astype(np.float32) * 5
    partials[..., 1] = np.abs(partials[..., 1])
    partials[1, :, ::3, 0] = -np.inf
    partials[2, ::2, 1::3, 0] = np.nan
    return partials


def assert_same_bits(schedule: Schedule, held: list[Array], partials: Array, group: int = 1) -> None:
    """Of what each rank is promised; chunks are cut between groups of records."""
    case = plain(schedule, schedule.size, len(partials[0]))._replace(granularity=group)
    operator = cpu.MergeOperator(partials.shape[2] - 2)
    for rank, (got, want) in enumerate(zip(held, wanted(case, partials, operator), strict=True)):
        np.testing.assert_array_equal(promised(case, rank, got).view(np.uint32), want.view(np.uint32))


SCHEMES = collectives.names("schedule")
ONE_NODE = {size: (tuple(range(size)),) for size in (2, 3, 4, 5, 8)}
ANY_NODES = [*(ONE_NODE[size] for size in (2, 3, 5, 8)), *NODES]


@pytest.mark.parametrize(
    ("scheme", "nodes", "records", "head_dim", "group"),
    [
        *sample(24, itertools.product(SCHEMES, ANY_NODES, [2, 11], [HEAD_DIM], [1])),
        # Records wider than a block; chunks cut between 2 groups of records over 4 ranks: some are empty.
        *(("reduce_scatter_gather", ONE_NODE[4], 9, head_dim, 1) for head_dim in (64, 128, 300)),
        ("ring", ONE_NODE[4], 10, HEAD_DIM, 5),
    ],
)
def test_every_schedule_gives_the_bits_of_the_definition(
    scheme: str, nodes: tuple[tuple[int, ...], ...], records: int, head_dim: int, group: int
) -> None:
    """Fewer records than blocks and than ranks, and more; five steps use every slot again. What goes between
    nodes comes between two launches; whatever the schedule knows of nodes."""
    size = sum(map(len, nodes))
    schedule, partials = built(scheme, nodes), made(5, size, records, head_dim)
    with Node(schedule, records, head_dim, nodes=nodes, group=group) as node:
        assert any(program.exchanges for program in node.programs) == (len(nodes) > 1)
        for held, step in zip(node.run(list(partials)), partials, strict=True):
            assert_same_bits(schedule, held, step, group)
        assert node.late == [None] * size
        assert len(nodes) > 1 or [runtime.launches for runtime in node.runtimes] == [5] * size


def built(scheme: str, nodes: tuple[tuple[int, ...], ...]) -> Schedule:
    """Schemes that are shaped by nodes get these."""
    given = {"nodes": nodes} if collectives.needs_nodes(scheme) else {}
    return collectives.build(scheme, sum(map(len, nodes)), **given)


@pytest.mark.parametrize("scheme", ["hierarchical", "split_rail"])
def test_schemes_for_nodes_take_few_launches(scheme: str) -> None:
    """One before the messages between two nodes, one after."""
    nodes = NODES[1]
    schedule, partials = built(scheme, nodes), made(3, 8, 8)
    with Node(schedule, 8, HEAD_DIM, nodes=nodes) as node:
        node.run(list(partials))
        leads = {0, 4} if scheme == "hierarchical" else set(range(8))
        assert [len(program.exchanges) for program in node.programs] == [rank in leads for rank in range(8)]
        assert [r.launches for r in node.runtimes] == [3 * (1 + (rank in leads)) for rank in range(8)]


@pytest.mark.parametrize("scheme", ["hierarchical", "split_rail", "recursive_doubling"])
def test_a_launch_that_does_not_wait_for_messages_is_seen(scheme: str) -> None:
    nodes = NODES[0]
    schedule, partials = built(scheme, nodes), made(3, 4, 8)
    with Node(schedule, 8, HEAD_DIM, nodes=nodes, early=True) as node:
        for held, step in zip(node.run(list(partials)), partials, strict=True):
            with pytest.raises(AssertionError, match="not equal"):
                assert_same_bits(schedule, held, step)


def test_a_step_of_several_launches_counts_once() -> None:
    """Else a number of the step before is taken for one of this step, or one is awaited that never comes."""
    nodes = NODES[0]
    schedule, partials = built("hierarchical", nodes), made(3, 4, 3)
    seen = {}
    for fault in (None, "step_not_counted", "part_counted"):
        edit = planted(FAULTS[fault]) if fault else str
        with Node(schedule, 3, HEAD_DIM, nodes=nodes, seconds=0.5, edit=edit) as node:
            node.run(list(partials[:1]))
            node.run(list(partials[1:2]), ranks=[0, 2, 3])  # rank 0 needs rank 1
            absent = node.late[0]
        with Node(schedule, 3, HEAD_DIM, nodes=nodes, seconds=0.5, edit=edit) as node:
            node.run(list(partials))
            seen[fault] = absent, node.late
    assert seen[None] == ((1, 1), [None] * 4)
    assert seen["step_not_counted"][0] is None
    assert any(seen["part_counted"][1])


def test_a_rank_that_is_late_within_its_node_spoils_the_others() -> None:
    """Its leader gives up and sends NaN on, which is no result: the other leader waits for nobody in vain."""
    nodes = NODES[0]
    schedule, partials = built("hierarchical", nodes), made(3, 4, 3)
    with Node(schedule, 3, HEAD_DIM, nodes=nodes, seconds=0.3) as node:
        node.run(list(partials[:1]))
        (held,) = node.run(list(partials[1:2]), ranks=[0, 2, 3])
        assert np.isnan(held).all()
        assert node.late[:3] == [(1, 1), None, None]


def test_a_recorded_step_counts_on() -> None:
    """The number of a step lies on the device: a graph that is launched again is the next step."""
    schedule, partials = collectives.build("recursive_doubling", 2), made(4, 2, 3)
    with Node(schedule, 3, HEAD_DIM) as node:
        node.pulls = [
            _Recorded(runtime, pull) for runtime, pull in zip(node.runtimes, node.pulls, strict=True)
        ]
        for held, step in zip(node.run(list(partials)), partials, strict=True):
            assert_same_bits(schedule, held, step)
        assert [runtime.graph_launches for runtime in node.runtimes] == [4, 4]


def test_a_step_without_a_rank_has_no_result() -> None:
    schedule, partials = collectives.build("all_gather_merge", 2), made(3, 2, 3)
    with Node(schedule, 3, HEAD_DIM, finish=True, seconds=0.3) as node:
        node.run(list(partials[:1]))
        node.run(list(partials[:1]), ranks=[0])
        assert np.isnan(node.results[0][0]).all()
        assert np.isnan(node.results[0][1]).all()


class _Recorded:
    def __init__(self, runtime: EmulatorRuntime, pull: cuda.PlannedPull) -> None:
        self._launch, self.timed_out_peer = runtime.capture(pull), pull.timed_out_peer

    def __call__(self) -> None:
        self._launch()


@pytest.mark.parametrize(
    ("scheme", "who"), [("all_gather_merge", {(2, 1)}), ("binary_tree", {(2, 1), (0, 2)})]
)
def test_a_rank_that_does_not_come_is_named(scheme: str, who: set[tuple[int, int]]) -> None:
    """By those who wait for it; who waits for one of these may reach the limit at the same time."""
    schedule, partials = collectives.build(scheme, 3), made(3, 3, 4)
    with Node(schedule, 4, HEAD_DIM, seconds=0.3) as node:
        node.run(list(partials[:1]))
        (held,) = node.run(list(partials[1:2]), ranks=[0, 1])
        assert node.late[0] == (2, 1)
        assert node.late[1] in who
        assert np.isnan(held).all()
        (held,) = node.run(list(partials[2:]), ranks=[0, 1])  # at once: what gave up stays so
        assert np.isnan(held).all()


def test_a_rank_that_gave_up_is_not_waited_for() -> None:
    """It says so to those who wait for it, who pass on whom it missed."""
    schedule, partials = collectives.build("chain", 3), made(3, 3, 2)
    with Node(schedule, 2, HEAD_DIM, seconds=0.3) as node:
        node.run(list(partials[:1]), ranks=[1])
        assert node.late[1] == (2, 1)
        (launch,) = node.pulls[0]._launches
        launch.args[2][0].base["limit"] = 1 << 62  # rank 0 waits for rank 1 alone, and for good
        node.run(list(partials[:1]), ranks=[0])
        assert node.late[0] == (2, 1)


def test_a_rank_whose_result_counts_nobody_waits_for_its_readers() -> None:
    """With two records, rank 0 of three keeps none: it may begin a second step, but no third."""
    schedule, partials = collectives.build("head_scatter", 3), made(5, 3, 2)
    with Node(schedule, 2, HEAD_DIM, seconds=0.3) as node:
        node.run(list(partials[:2]), ranks=[0])
        assert node.late[0] is None
        node.run(list(partials[2:3]), ranks=[0])
        assert node.late[0] is not None
    with Node(schedule, 2, HEAD_DIM, seconds=0.3, edit=planted(FAULTS["not_awaited"])) as node:
        node.run(list(partials), ranks=[0])
        assert node.late[0] is None
        held = node.run(list(partials), ranks=[1, 2])
        with pytest.raises(AssertionError, match="not equal"):
            assert_same_bits(schedule, [partials[0][0], *held[0]], partials[0])


def test_a_stale_number_lets_a_step_end_before_the_others_begin_it() -> None:
    schedule, partials = collectives.build("all_gather_merge", 2), made(4, 2, 3)
    for edit, late in ((str, (1, 1)), (planted(FAULTS["stale_number"]), None)):
        with Node(schedule, 3, HEAD_DIM, seconds=0.3, edit=edit) as node:
            node.run(list(partials[:2]))
            node.run(list(partials[2:3]), ranks=[0])
            assert node.late[0] == late


# How a rank announces a round, in place of one release of system scope -> whether that is wrong.
_RELEASE = "store_release(number_of(a, a.rank), step"
_RELAXED = "emulator::store_relaxed(number_of(a, a.rank), step"
ORDERS = {
    "release": (_RELEASE, False),
    "fence": (f"weak::fence_system(), {_RELAXED}", False),
    "no_fence": (_RELAXED, True),
    "fence_of_a_gpu": (f"weak::fence_gpu(), {_RELAXED}", True),
    "release_of_a_gpu": (f"weak::fence_gpu(), emulator::{_RELEASE}", True),
}


@pytest.mark.deep
@pytest.mark.parametrize("order", [*ORDERS, "no_barrier"])
def test_values_show_what_is_announced_before_it_has_landed(order: str) -> None:
    """Where stores land late and in any order. Without a barrier those of other threads are not ordered."""
    new, wrong = ORDERS.get(order, (_RELEASE, True))
    barrier = FAULTS["announced_early"]

    def edit(text: str) -> str:
        text = weakly_ordered(text).replace(_RELEASE, new)
        return planted(barrier)(text) if order == "no_barrier" else text

    seen = []
    for scheme in ("all_gather_merge", "recursive_doubling", "binary_tree", "reduce_scatter_gather"):
        schedule, partials = collectives.build(scheme, 3), made(5, 3, 11)
        with Node(schedule, 11, HEAD_DIM, edit=edit) as node:
            for held, step in zip(node.run(list(partials)), partials, strict=True):
                try:
                    assert_same_bits(schedule, held, step)
                except AssertionError:
                    seen.append(scheme)
            assert node.late == [None] * 3
    assert bool(seen) == wrong


def test_more_sources_than_the_kernel_takes_are_refused() -> None:
    sources = tuple(ir.Region(rank, 0, 1) for rank in range(1, 130))
    program = ir.Program(0, (ir.Fold(1, ir.Region(ir.OWN, 0, 1), sources),), 1, 1, 0)
    operator = cuda.MergeOperator(HEAD_DIM, runtime=EmulatorRuntime())
    with pytest.raises(RestrictionError, match="folds 129 ranks at once.*recursive_doubling"):
        operator.planned_gets(np.zeros((1, 10), np.float32), program, [0] * 130, 1.0, 1)

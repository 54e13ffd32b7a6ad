"""The catalogue: every scheme at every size, scheme strings, and what each algorithm promises."""

import doctest
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
from catalog_variants import VARIANTS, digest, label, served
from hypothesis import given
from hypothesis import strategies as st

from tests.support.drawn import examples
from tests.support.refusals import refused
from treeattn.collectives import build, check, names, needs_nodes
from treeattn.collectives.catalog import CATALOG, Scheme, complete, select
from treeattn.collectives.schedule import TRANSFER_LIMIT
from treeattn.errors import RestrictionError, ScheduleError

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
#: Variant of a scheme -> what its schedules on 1 to 33 ranks hash to.
DIGESTS = dict(line.rsplit(maxsplit=1) for line in (GOLDEN / "schedules.sha256").read_text().splitlines())
SCHEDULES = names("schedule")
ON_NODES = [row.name for row in CATALOG.values() if row.parameter("nodes")]


# Every scheme, every size


@pytest.mark.parametrize("variant", VARIANTS, ids=label)
def test_every_scheme_is_an_exact_reduction_at_every_size(variant):
    name, params = variant
    schedules = list(served(variant))
    for schedule in schedules:
        certificate, size = check(schedule), schedule.size
        assert certificate.determinism in ("A", "C"), f"on {size} ranks"
        assert schedule.name.split(":")[0] == name
        assert certificate.messages == schedule.messages
        assert all(schedule.rounds), f"a round without transfers on {size} ranks"
        assert size > 1 or schedule.rounds == ()
        if schedule.size in (4, 9) and params.get("nodes") != "cyclic over 3":  # these have no text
            assert build(schedule.name, schedule.size) == schedule
    # Or refusals alone would do. What needs a result on every rank takes no scheme that scatters it.
    inner = [CATALOG[value] for value in params.values() if value in CATALOG]
    assert bool(schedules) != any(build(row.name, 2).result == "scattered" for row in inner)
    made = digest(schedules)
    assert DIGESTS.get(label(variant), made) == made, "if it is meant: python tests/golden/regenerate.py"


def test_every_variant_has_its_digest():
    assert DIGESTS.keys() == {label(variant) for variant in VARIANTS}


@given(st.sampled_from(ON_NODES), st.integers(1, 24), st.randoms(use_true_random=False))
@examples(150)
def test_nodes_may_hold_any_ranks_in_any_number(name, size, rng):
    ranks = rng.sample(range(size), size)
    cuts = sorted(rng.sample(range(1, size), rng.randint(0, size - 1)))
    nodes = [ranks[a:b] for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
    assert check(build(name, size, nodes=nodes)).determinism == "A"


# Rows


@pytest.mark.parametrize("name", SCHEDULES)
def test_parameters_are_those_of_the_generator(name):
    row = CATALOG[name]
    signature = inspect.signature(row.generator).parameters
    assert list(signature) == ["size", *(parameter.name for parameter in row.parameters)]
    for parameter in row.parameters:
        default = signature[parameter.name].default
        if default is not inspect.Parameter.empty:
            assert default == parameter.default


# Scheme strings


def test_names_of_the_literature_are_read_as_the_one_name():
    aliases = [alias for row in CATALOG.values() for alias in row.aliases]
    assert len({*aliases, *CATALOG}) == len(aliases) + len(CATALOG)
    assert select("rabenseifner:order=near").text == "reduce_scatter_gather:order=near"
    assert build("hierarchical:inner=binomial_tree:outer=pat", 8, nodes=(4, 4)).name == (
        "hierarchical:inner=k_nomial_tree:outer=all_gather_trees:nodes=4+4"
    )
    with pytest.raises(ScheduleError, match="did you mean rabenseifner?"):
        select("rabenseifer")
    page = (Path(__file__).resolve().parents[3] / "docs" / "schemes.md").read_text()
    assert [alias for alias in aliases if f"`{alias}`" not in page] == []


def test_schemes_nest_in_parentheses():
    text = "hierarchical:inner=(k_nomial_tree:radix=4):outer=(recursive_multiplying:factors=2+3):nodes=4+2"
    assert dict(select(text).given) == {
        "inner": "k_nomial_tree:radix=4",
        "outer": "recursive_multiplying:factors=2+3",
        "nodes": (4, 2),
    }
    nested = "hierarchical:outer=(split_rail:rail=(k_nomial_tree:radix=3))"
    assert select(nested).text == nested
    assert check(build(nested, 7, nodes=(3, 3, 1))).determinism == "A"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("k_nomial_tree:radix=2", "k_nomial_tree"),
        (" chain ", "chain"),
        ("hierarchical:outer=(recursive_doubling):inner=(k_ary_tree:radix=4)",
         "hierarchical:inner=(k_ary_tree:radix=4)"),
        ("hierarchical:inner=(binary_tree)", "hierarchical"),
        ("hierarchical:nodes=8+8+8+8+2", "hierarchical:nodes=4x8+2"),
        ("hierarchical:nodes=3x8", "hierarchical:nodes=8+8+8"),
        ("hierarchical:nodes=4+4+2", "hierarchical:nodes=4+4+2"),
        ("mpi_allreduce", "mpi_allreduce"),
    ],
)  # fmt: skip
def test_canonical_is_the_one_spelling(text, expected):
    assert select(text).text == expected
    assert select(expected).text == expected


def test_needs_nodes_where_the_text_gives_none():
    assert needs_nodes("hierarchical")
    assert needs_nodes("split_rail:rail=ring")
    assert not needs_nodes("hierarchical:nodes=4+4")
    assert not needs_nodes("ring")
    assert not needs_nodes("mpi_allreduce")


# Lists in messages follow the catalogue, so no expectation below spells one out.
BAD_STRINGS = [
    ("binary_tre", "there is no scheme 'binary_tre'; did you mean binary_tree? known: {names}"),
    ("", "there is no scheme ''; known: {names}"),
    ("k_nomial_tree:radix=0", "radix=0 is not allowed; radix (branches of the tree) takes an integer of"),
    ("k_nomial_tree:radix=two", "radix=two is not allowed"),
    ("k_nomial_tree:radix", "'radix' is not of the form key=value"),
    ("k_nomial_tree:radix=2:radix=4", "gives radix twice"),
    ("k_nomial_tree:radx=4", "has no parameter 'radx'; did you mean radix? known: radix"),
    ("chain:radix=4", "chain has no parameter 'radix'; it takes none"),
    ("recursive_multiplying:factors=4+1", "takes integers of at least 2 joined by +"),
    ("reduce_scatter_gather:order=middle", "takes far or near"),
    ("hierarchical:nodes=4+0", "takes node sizes such as 4+4+2"),
    ("hierarchical:inner=k_ary_tree:radix=4", "parameters of an inner scheme go in parentheses"),
    ("hierarchical:inner=(k_ary_tree:radix=4", "the parentheses do not match"),
    ("hierarchical:inner=ring", "inner=ring gathers at no root; take one of {rooted}"),
    ("hierarchical:inner=(k_ary_tree:radix=0)", "k_ary_tree: radix=0 is not allowed"),
    ("hierarchical:outer=rung", "there is no scheme 'rung'; did you mean ring?"),
    ("hierarchical:outer=mpi_allreduce", "outer=mpi_allreduce is a reducer of a library"),
]


@pytest.mark.parametrize(("text", "remedy"), BAD_STRINGS)
def test_a_bad_string_is_one_line_that_names_the_remedy(text, remedy):
    rooted = [row.name for row in CATALOG.values() if row.rooted]
    with refused(remedy.format(names=", ".join(CATALOG), rooted=", ".join(rooted)), error=ScheduleError):
        select(text)


# The scheme, the ranks, parameters, the error, and what it says.
NOT_BUILT = [
    ("k_nomial_tree", 4, {"radix": 2.5}, ScheduleError, "radix=2.5 is not allowed"),
    ("k_nomial_tree", 4, {"radix": 1}, ScheduleError, "radix=1 is not allowed"),
    ("k_nomial_tree", 4, {"radius": 1}, ScheduleError, "has no parameter 'radius'; did you mean radix?"),
    ("k_nomial_tree:radix=4", 4, {"radix": 4}, ScheduleError, "radix is given twice: in 'k_nomial_tree:radi"),
    ("mpi_allreduce", 4, {}, ScheduleError, f"has no schedule; schedules: {', '.join(SCHEDULES)}$"),
    (build("chain", 3), 5, {}, ScheduleError, "is not the name of a scheme: it is a schedule already"),
    *(("chain", size, {}, ScheduleError, "is not a number of ranks") for size in (0, -3, 2.0, "4", None)),
    *(
        ("hierarchical", 4, {"nodes": nodes}, ScheduleError, "takes node sizes such as")
        for nodes in ((), ((0, 1), ()), ((),), 4, "", ((0, 1), (2.0, 3)), (2, 0, 2), (2, "x"), ((0, 1), 2))
    ),
    *(
        (name, 10, {"nodes": nodes}, RestrictionError, f"{name}: .*{problem}")
        for name in ON_NODES
        for nodes, problem in (
            ("4+4", r"nodes=4\+4 hold 8 ranks, but there are 10"),
            (((1, 0), (2, 3)), "must hold each of the ranks 0 to 9 once"),
            ((tuple(range(10)), (3,)), "must hold each of the ranks 0 to 9 once"),
        )
    ),
    *(
        (text, 8, {"nodes": (4, 4)}, RestrictionError, "leaves its result scattered")
        for text in ("hierarchical:outer=head_scatter", "split_rail:rail=head_scatter")
    ),
    ("recursive_multiplying:factors=3+3", 8, {}, RestrictionError, r"3\+3 multiply to 9, more than the 8"),
    *(
        (text, size, {}, RestrictionError, f"the limit is {TRANSFER_LIMIT}")  # before they are made
        for text, size in (
            ("ring", 513),
            ("all_gather_merge", 725),
            ("recursive_multiplying:factors=4096", 4096),
            ("split_rail", 4096),
            ("multi_leader:leaders=1024", 4096),
            ("uneven_nodes", 4096),
            ("all_gather_trees", 1023),
            ("double_binary_tree:chunks=100000", 64),
            ("hierarchical:inner=chain:outer=ring:nodes=4096x1", 4096),
        )
    ),
]


@pytest.mark.parametrize(("scheme", "size", "params", "error", "words"), NOT_BUILT)
def test_what_cannot_be_built_is_named(scheme, size, params, error, words):
    with pytest.raises(error, match=words):
        build(scheme, size, **params)


# The walk of the contributing guide


@mock.patch.dict(CATALOG)
def test_the_walk_of_adding_a_scheme_works(tmp_path, monkeypatch):
    page = Path(__file__).resolve().parents[3] / "docs" / "adding-a-scheme.md"
    text = page.read_text()
    source, row = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "star.py").write_text(source)
    name = "treeattn.collectives.schemes.star"
    spec = importlib.util.spec_from_file_location(name, tmp_path / "star.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    star = complete(eval(row.strip().rstrip(","), {"Scheme": Scheme}))
    rows = dict(CATALOG)
    CATALOG.clear()  # the first row, since a reader may find it anywhere
    CATALOG.update({"star": star, **rows})

    example = "".join(re.findall(r"^```pycon\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    runner = doctest.DocTestRunner()
    runner.run(doctest.DocTestParser().get_doctest(example, {}, page.name, str(page), 0))
    assert runner.tries == 7
    assert runner.failures == 0

    # What the tests above demand of every row.
    test_parameters_are_those_of_the_generator("star")
    test_every_scheme_is_an_exact_reduction_at_every_size(("star", {}))

"""Linear maps of a head commute with the merge: `project=` of a decoder, before and after the reduction."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import treeattn
from tests.support.ranks import assert_same_bits
from tests.support.token_trees import Case
from treeattn import collectives, partial, reference
from treeattn.decoder.plan import CATALOG
from treeattn.shards import parse_layout
from treeattn.token_tree import verify

pytestmark = pytest.mark.mpi

SHAPE = {"batch": 2, "queries": 3, "heads": 4, "kv_heads": 2, "head_dim": 16}
WHOLE = [name for name, row in CATALOG.items() if row.transports == ("mpi",) and not row.scattered] + [
    name for name in collectives.names("schedule") if collectives.build(name, 4).result == "replicated"
]
SCATTERED = ["head_scatter", "head_all_to_all"]


def made_up(comm, out_dim, dtype=np.float32, tokens=37):
    """q, this rank's k and v, the map, and (out, lse) of all keys, projected in float64."""
    draw = np.random.default_rng(2)
    q = draw.standard_normal((2, 3, 4, 16)).astype(dtype)
    k, v = (draw.standard_normal((2, tokens, 2, 16)).astype(dtype) for _ in "kv")
    project = (draw.standard_normal((4, 16, out_dim)) / 4).astype(dtype)
    out, lse = reference.attention(q, k, v, scale=0.25)
    (own,) = parse_layout("contiguous").runs(tokens, comm.rank, comm.size)
    wanted = np.einsum("bqhi,hio->bqho", out, project.astype(np.float64))
    return q, k[:, own], v[:, own], project, wanted, lse


@pytest.mark.parametrize(
    ("scheme", "out_dim"),
    [
        *((scheme, dim) for scheme in WHOLE for dim in (8, 40)),
        *(("hierarchical", dim) for dim in (1, 15, 16)),
    ],
)
def test_every_scheme(comm, scheme, out_dim):
    """Dimensions below 16 before the reduction, others after it; rings always after it."""
    q, k, v, project, wanted, lse = made_up(comm, out_dim)
    with treeattn.Decoder(comm, **SHAPE, dtype="float32", scheme=scheme, project=project) as decoder:
        for _ in range(2):
            out, got_lse = decoder(q, k, v)
            np.testing.assert_allclose(out, wanted, rtol=0, atol=2e-5)
            np.testing.assert_allclose(got_lse, lse, rtol=0, atol=2e-5)
            assert_same_bits(comm, out, got_lse)
        decoder.begin(q, k, v)
        np.testing.assert_array_equal(decoder.finish()[0], out)


@pytest.mark.parametrize("out_dim", [8, 40])
def test_a_map_commutes_with_the_merge(comm, out_dim):
    """Projecting the records of all ranks and folding them, or the other way round, in float64."""
    draw = np.random.default_rng(4)
    records = draw.standard_normal((comm.size, 2, 4, 3, 18))
    records[..., 0] *= 20
    records[..., 1] = abs(records[..., 1]) + 1
    records[0, 0, 1] = partial.identity((3,), 16, np.float64)
    project = draw.standard_normal((4, 16, out_dim))

    def projected(some):
        return np.concatenate((some[..., :2], some[..., 2:] @ project), axis=-1)

    def folded(some):
        whole = some[0].copy()
        for other in some[1:]:
            partial.merge(whole, other)
        return whole

    before, after = folded(projected(records)), projected(folded(records))
    np.testing.assert_allclose(before, after, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("out_dim", [8, 40])
def test_float64(comm, out_dim):
    q, k, v, project, wanted, lse = made_up(comm, out_dim, np.float64)
    with treeattn.Decoder(comm, **SHAPE, dtype="float64", scheme="chain", project=project) as decoder:
        out, got_lse = decoder(q, k, v)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-12)
    np.testing.assert_allclose(got_lse, lse, rtol=0, atol=1e-12)


@pytest.mark.parametrize("out_dim", [8, 40])
def test_what_travels_is_the_shorter(comm, out_dim):
    """24 records of at most 16 numerators."""
    project = np.zeros((4, 16, out_dim), np.float32)
    with treeattn.Decoder(comm, **SHAPE, dtype="float32", scheme="binary_tree", project=project) as decoder:
        sizes = {size for _, size in decoder.sent}
        assert sizes == ({24 * (min(out_dim, 16) + 2) * 4} if comm.size > 1 else set())
        assert decoder.out.shape == (2, 3, 4, out_dim)


@pytest.mark.parametrize("out_dim", [8, 40])
@pytest.mark.parametrize("scheme", SCATTERED)
def test_a_slice_of_heads(comm, scheme, out_dim):
    q, k, v, project, wanted, lse = made_up(comm, out_dim)
    if comm.size > SHAPE["heads"]:
        pytest.skip("a rank without heads")
    with treeattn.Decoder(
        comm, **SHAPE, dtype="float32", scheme=treeattn.Reduction(scheme, output="heads"), project=project
    ) as decoder:
        out, got_lse = decoder(q, k, v)
        np.testing.assert_allclose(out, wanted[:, :, decoder.heads], rtol=0, atol=2e-5)
        np.testing.assert_allclose(got_lse, lse[:, decoder.heads], rtol=0, atol=2e-5)


@pytest.mark.parametrize("out_dim", [8, 40])
@pytest.mark.parametrize("options", [{"groups": 2}, {"progress": "thread"}, {"executor": "mpi"}])
def test_other_ways_to_reduce(comm, options, out_dim):
    q, k, v, project, wanted, lse = made_up(comm, out_dim)
    how = treeattn.Reduction(**options)
    with treeattn.Decoder(comm, **SHAPE, dtype="float32", project=project, scheme=how) as decoder:
        out, got_lse = decoder(q, k, v)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=2e-5)
    np.testing.assert_allclose(got_lse, lse, rtol=0, atol=2e-5)


@pytest.mark.parametrize("out_dim", [8, 40])
def test_rules_masks_and_sinks(comm, out_dim):
    """A sink has no numerator, wherever that is projected; a mask plans attention anew."""
    q, k, v, project, _, _ = made_up(comm, out_dim)
    plan = SHAPE | {"dtype": "float32", "rules": treeattn.Rules(sink_logits=[1.0, 0, -1, 2], softcap=3.0)}
    mask = np.random.default_rng(1).random((2, 3, k.shape[1])) < 0.7
    with (
        treeattn.Decoder(comm, **plan, project=project) as decoder,
        treeattn.Decoder(comm, **plan) as plain,
    ):
        for options in ({}, {"mask": mask}):
            out, lse = decoder(q, k, v, **options)
            wanted, plain_lse = plain(q, k, v, **options)
            np.testing.assert_allclose(out, np.einsum("bqhi,hio->bqho", wanted, project), rtol=0, atol=1e-5)
            np.testing.assert_array_equal(lse, plain_lse)


@pytest.mark.parametrize("out_dim", [8, 40])
def test_queries_without_keys_and_heads_with_nan(comm, out_dim):
    q, k, v, project, _, _ = made_up(comm, out_dim)
    with treeattn.Decoder(comm, **SHAPE, dtype="float32", project=project) as decoder:
        out, lse = decoder(q, k, v, lengths=[0, 0])
        assert not out.any()
        assert (lse == -np.inf).all()
        k[0, :, 1] = np.nan
        out, lse = decoder(q, k, v)
        assert np.isnan(out[0, :, 2:]).all() == bool(comm.allreduce(k.size))
        assert np.isfinite(out[0, :, :2]).all()
        assert np.isfinite(out[1]).all()


@pytest.mark.parametrize("out_dim", [3, 300])
@pytest.mark.parametrize("owner", ["single", "position", "round_robin"])
def test_drafts_are_projected_as_the_context_is(comm, owner, out_dim):
    """Before the records of both merge, or after all; ragged trees, any grouping of heads, empty shards."""
    for turn in range(4):
        case = Case.draw(40 + turn, comm.size)
        k, v, lengths = case.shard(comm.rank)
        heads, head_dim = case.q.shape[2:]
        project = np.random.default_rng(turn).standard_normal((heads, head_dim, out_dim)).astype(np.float32)
        arrays, options = (case.q, k, v, case.draft_k, case.draft_v, case.tree), {"lengths": lengths}
        options |= {"comm": comm, "owner": owner}
        plain, plain_lse = verify(*arrays, **options)
        out, lse = verify(*arrays, **options, project=project)
        assert out.shape == (*plain.shape[:3], out_dim)
        wanted = np.einsum("bqhi,hio->bqho", plain.astype(np.float64), project)
        np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-5 * np.abs(plain).max() * head_dim)
        np.testing.assert_array_equal(lse, plain_lse)
        assert not out[~case.tree.real].any()
        assert_same_bits(comm, out, lse)


def test_a_bad_map_for_drafts(comm):
    case = Case.draw(40, comm.size)
    k, v, lengths = case.shard(comm.rank)
    project = np.zeros((*case.q.shape[2:], 5), np.float32)
    with pytest.raises(treeattn.ArgumentError, match="project has shape") as caught:
        verify(
            *(case.q, k, v, case.draft_k, case.draft_v, case.tree),
            comm=comm,
            lengths=lengths,
            project=project[:, 1:] if comm.rank == comm.size - 1 else project,
        )
    assert len(set(comm.allgather(str(caught.value)))) == 1


def test_maps_of_other_types(comm):
    q, k, v, project, wanted, _ = made_up(comm, 8, ml_dtypes.bfloat16)
    for given in (project, project.view(np.uint16), project.astype(np.float64), project.transpose(0, 2, 1)):
        turned = given if given.shape == project.shape else given.transpose(0, 2, 1)
        with treeattn.Decoder(comm, **SHAPE, project=turned) as decoder:
            np.testing.assert_allclose(decoder(q, k, v)[0], wanted, rtol=0, atol=2e-5)


def test_a_map_is_taken_once(comm):
    q, k, v, project, wanted, _ = made_up(comm, 8)
    with treeattn.Decoder(comm, **SHAPE, dtype="float32", project=project) as decoder:
        project[...] = 7
        np.testing.assert_allclose(decoder(q, k, v)[0], wanted, rtol=0, atol=2e-5)


BAD = {
    "heads": (
        np.zeros((3, 16, 8), np.float32),
        r"project has shape \[3, 16, 8\], expected .* \[4, 16, any\]",
    ),
    "v_dim": (np.zeros((4, 8, 16), np.float32), r"project has shape \[4, 8, 16\]"),
    "out_dim": (np.zeros((4, 16, 0), np.float32), r"project has shape \[4, 16, 0\]"),
    "axes": (np.zeros((16, 8), np.float32), r"project has shape \[16, 8\]"),
    "integers": (np.zeros((4, 16, 8), int), "arrays of int64 are not supported"),
    "a list": ([[1.0]], "project is a list: pass an array"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_map_of_one_rank_raises_alike_on_every_rank(comm, case):
    given, message = BAD[case]
    project = given if comm.rank == comm.size - 1 else np.zeros((4, 16, 8), np.float32)
    with pytest.raises(treeattn.ArgumentError, match=message) as caught:
        treeattn.Decoder(comm, **SHAPE, dtype="float32", project=project)
    assert len(set(comm.allgather(str(caught.value)))) == 1


@pytest.mark.parametrize("mine", ["other", None])
def test_maps_that_differ_between_ranks(comm, mine):
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    project = np.zeros((4, 16, 8), np.float32)
    if comm.rank == comm.size - 1:
        project = None if mine is None else project + 1
    with pytest.raises(treeattn.ArgumentError, match="project differs between ranks: .*every rank must pass"):
        treeattn.Decoder(comm, **SHAPE, dtype="float32", project=project)


def test_a_gpu_projects_nothing(comm, monkeypatch):
    from tests.emulator.raw_module import compiler_problem
    from tests.emulator.runtime import EmulatorRuntime
    from treeattn.backends.cuda import cupy_runtime

    if compiler_problem() is not None:
        pytest.skip(str(compiler_problem()))
    monkeypatch.setattr(cupy_runtime, "current", EmulatorRuntime)
    with pytest.raises(
        treeattn.RestrictionError, match="project= is for device='cpu': on a GPU leave it out"
    ):
        treeattn.Decoder(
            comm, **SHAPE, dtype="float32", project=np.zeros((4, 16, 8), np.float32), device="cuda"
        )

"""A model process without keys and values, and cache nodes: drawn calls against a dense float64 oracle."""

import datetime
import os
import shutil
import tempfile

import numpy as np
import pytest

import treeattn
from tests.support.examples import run_examples
from treeattn import cache_nodes, collectives, reference
from treeattn.attention.shape import CACHE_DTYPES
from treeattn.errors import ArgumentError, RestrictionError, ScheduleError, StateError

LAYERS, KV_HEADS, HEADS, HEAD_DIM = 2, 2, 4, 16
SHAPE = {"layers": LAYERS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "dtype": "float32"}


def meet(comm, model, **options):
    """`model(nodes)` on rank 0, all others are nodes; what a node was, there."""
    if comm.size == 1:
        pytest.skip("one rank is a model process without cache nodes")
    if comm.rank:
        return cache_nodes.serve(comm)
    with cache_nodes.connect(comm, **options) as nodes:
        model(nodes)
    return None


def test_the_example_of_connect_is_what_a_job_does(comm, several):
    assert run_examples(cache_nodes.connect)


class Dense:
    """All keys and values of all layers and sequences, in one place."""

    def __init__(self, batch, seed):
        self.draw = np.random.default_rng(seed)
        self.held = [[[] for _ in range(batch)] for _ in range(LAYERS)]
        self.begins = np.zeros(batch, np.int64)

    def new(self, tokens, heads=KV_HEADS):
        shape = len(self.held[0]), tokens, heads, HEAD_DIM
        return self.draw.standard_normal(shape).astype(np.float32)

    def check(self, layer, q, counts, out, lse, rules):
        """Row by row, what was appended last being the queries'."""
        for row, held in enumerate(self.held[layer]):
            count = int(counts[row])
            if not count:
                continue
            k, v = (np.stack(part)[None] for part in zip(*held, strict=True))
            total = len(held)
            stands = np.arange(total - count, total)[None]
            visible = {name: getattr(rules, name) for name in ("causal", "window", "leading")}
            seen = reference.seen(np.arange(total), stands, begins=self.begins[row : row + 1], **visible)
            wanted = reference.attention(
                q[row : row + 1, :count], k, v, scale=HEAD_DIM**-0.5, seen=seen, softcap=rules.softcap
            )
            np.testing.assert_allclose(out[row, :count], wanted[0][0], rtol=0, atol=2e-5)
            np.testing.assert_allclose(lse[row, :, :count], wanted[1][0], rtol=0, atol=2e-5)


ROOTED = [row.name for row in collectives.catalog.CATALOG.values() if row.rooted]
RULES = [
    treeattn.Rules(causal=True),
    treeattn.Rules(causal=True, window=(5, 0)),
    treeattn.Rules(causal=True, softcap=20.0),
    treeattn.Rules(window=(5, 2)),
]


def one_token_of_all_layers(cache, dense, tokens, counts, rules, begins):
    for layer in range(LAYERS):
        q, k, v = dense.new(tokens, HEADS), dense.new(tokens), dense.new(tokens)
        for row, held in enumerate(dense.held[layer]):
            held += list(zip(k[row], v[row], strict=True))[: int(counts[row])]
        given = None if (counts == tokens).all() else counts
        out, lse = cache.step(layer, q, k, v, counts=given, rules=rules, begins=begins)
        dense.check(layer, q, counts, out, lse, rules)
        if given is None and dense.draw.random() < 0.3:
            again = cache.step(layer, q, rules=rules, begins=begins)
            np.testing.assert_allclose(again[0], out, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "latent"])
def test_types_of_caches_are_exact(comm, kind):
    """What is appended, saved and loaded, by a query that appends nothing."""
    latent, bits = kind == "latent", kind.startswith("float8")
    dtype = "float32" if latent else kind
    scales = {"k_scale": [0.5, 2.0], "v_scale": 0.25} if bits else {}
    shape = {"layers": 1, "kv_heads": 2, "head_dim": 24, "v_dim": 16, "dtype": dtype, **scales}
    draw, elements = np.random.default_rng(8), CACHE_DTYPES[dtype]
    q = draw.standard_normal((2, 6, 4, 24)).astype("f4" if bits else elements)
    k, v = (draw.standard_normal((2, 11, 2, width)).astype(elements) for width in (24, 16))

    def check(cache, tokens):
        asked = q.view("u2") if kind == "bfloat16" else q  # its bits
        out, lse = cache.step(0, asked, scale=0.2, rules=treeattn.Rules())
        exact = [array[:, :tokens].astype(np.float64) for array in (k, v)]
        if latent:
            exact[1] = exact[0][..., :16]
        if bits:
            exact = [exact[0] * np.array([0.5, 2.0])[:, None], exact[1] * 0.25]
        seen = np.ones((2, 6, tokens), bool)
        wanted = reference.attention(q.astype(np.float64), *exact, scale=0.2, seen=seen)
        for got, right in zip((out, lse), wanted, strict=True):
            np.testing.assert_allclose(got, right, rtol=0, atol=2e-5)

    def model(nodes):
        cache = nodes.cache(batch=2, capacity=40, latent=latent, **shape)
        folder = tempfile.mkdtemp()
        for begin, end in ((0, 7), (7, 8), (8, 11)):
            new = k[:, begin:end], None if latent else v[:, begin:end]
            cache.append(0, *(one.view("u1") if bits else one for one in new))
            check(cache, end)
        assert cache.totals.tolist() == [[11, 11]]
        cache.save(f"{folder}/cache")
        check(nodes.load(f"{folder}/cache"), 11)
        shutil.rmtree(folder)

    meet(comm, model)


@pytest.mark.parametrize("seed", range(4))
def test_drawn_calls_are_exact(comm, seed):
    """Prompts in pieces, tokens, sequences of unlike lengths, padding, beams, crops, resets; two caches."""

    def model(nodes):
        dense = [Dense(batch, seed + batch) for batch in (1, 3)]
        caches = [nodes.cache(batch=batch, capacity=200, **SHAPE) for batch in (1, 3)]
        draw, rules = np.random.default_rng(seed), RULES[seed]
        for number in range(14):
            at = int(draw.integers(2))
            cache, mine = caches[at], dense[at]
            batch, least = cache.batch, int(cache.totals.min())
            what = draw.choice(["step", "step", "step", "chunk", "crop", "beams", "reset"])
            begins = mine.begins if mine.begins.any() else None
            if what == "step" or not number:
                counts = np.ones(batch, np.int64)
                if draw.random() < 0.3 and least:
                    counts[:] = draw.integers(0, 2, batch)
                one_token_of_all_layers(cache, mine, 1, counts, rules, begins)
            elif what == "chunk":
                tokens = int(draw.integers(2, 14))
                counts = np.full(batch, tokens)
                if draw.random() < 0.5:
                    counts = draw.integers(0, tokens + 1, batch)
                if not least and batch > 1:
                    mine.begins[:] = draw.integers(0, 2, batch)
                    begins = mine.begins if mine.begins.any() else None
                one_token_of_all_layers(cache, mine, tokens, counts, rules, begins)
            elif what == "crop":
                totals = np.array([int(draw.integers(0, total + 1)) for total in cache.totals[0]])
                cache.rollback(totals)
                for layer in mine.held:
                    for row, held in enumerate(layer):
                        del held[totals[row] :]
            elif what == "beams":
                rows = draw.integers(0, batch, batch if draw.random() < 0.7 else batch + 1)
                cache.select(rows)
                mine.held = [[list(layer[row]) for row in rows] for layer in mine.held]
                mine.begins = mine.begins[rows]
            else:
                cache.reset()
                mine.held = [[[] for _ in layer] for layer in mine.held]
                mine.begins[:] = 0
            assert [[len(held) for held in layer] for layer in mine.held] == cache.totals.tolist()

    node = meet(comm, model)
    assert node is None or node.steps > 0


@pytest.mark.parametrize("scheme", ["hierarchical", "recursive_doubling", *ROOTED])
def test_a_step_is_two_messages_for_each_node(comm, scheme):
    """Down q, k and v with some bytes of what to do, up the partials; counted on every rank."""
    sent_here, steps = [], 10

    def model(nodes):
        cache = nodes.cache(capacity=100, **SHAPE)
        dense = Dense(1, 0)
        cache.step(0, dense.new(1, HEADS), dense.new(1), dense.new(1))
        before = np.array([nodes.messages, nodes.bytes])
        for _ in range(steps):
            cache.step(0, dense.new(1, HEADS), dense.new(1), dense.new(1))
        sent_here.extend([nodes.messages, nodes.bytes] - before)
        assert cache._attention[0]._decoder.sent == []
        assert nodes.size == comm.size - 1

    node = meet(comm, model, scheme=scheme)
    (attention,) = node.caches[0].views if node else (None,)
    up = [] if node is None else attention._decoder.sent
    calls = 3  # the cache, the view, the end
    down = sent_here[0] if node is None else node.tree.messages * steps // (steps + 1 + calls)
    assert sum(comm.allgather(down)) == steps * (comm.size - 1)
    assert sum(comm.allgather(len(up))) == comm.size - 1
    assert all(size == HEADS * (HEAD_DIM + 2) * 4 for _, size in up)
    if node is None:
        own = HEADS * HEAD_DIM * 4 + 2 * KV_HEADS * HEAD_DIM * 4
        assert 0 < sent_here[1] / sent_here[0] - own < 32


def test_what_does_not_fit_is_refused_before_anything_is_sent(comm):
    def model(nodes):
        unplanned = [
            ({"head_dim": 7}, "head_dim 7 is not supported"),
            ({"dtype": "float8_e4m3fn"}, "a cache of float8_e4m3fn needs k_scale: a number"),
            ({"dtype": "int8"}, "dtype 'int8' is not supported"),
            ({"capacity": 0}, "capacity must be a positive whole number"),
            ({"layers": 0}, "layers must be a positive whole number"),
            ({"layers": object}, "said to cache nodes: <class 'object'> is no number"),
        ]
        for changes, message in unplanned:
            with pytest.raises(ArgumentError, match=message):
                nodes.cache(**{"capacity": 4, **SHAPE, **changes})
        small = nodes.cache(capacity=np.int64(4), **SHAPE | {"dtype": np.float32})
        dense = Dense(1, 0)
        q, k = dense.new(3, HEADS), dense.new(3)
        small.step(1, q, k, k)
        before = nodes.messages
        refused = [
            ({"layer": 1, "q": q, "k": k, "v": k}, "6 tokens of a sequence: .* room for 4"),
            ({"layer": 2, "q": q, "k": k, "v": k}, "layer 2: the cache has 2"),
            ({"layer": 0, "q": q, "k": k}, "k and v come together"),
            ({"layer": 0, "q": q}, "a sequence has fewer in layer 0"),
            ({"layer": 0, "q": q, "k": k[:, :2], "v": k}, r"k has shape \[1, 2, 2, 16\] and v"),
            ({"layer": 0, "q": q, "k": k[:, :2], "v": k[:, :2]}, "k is of 2 tokens, and q of 3"),
            ({"layer": 0, "q": q[..., :8], "k": k, "v": k}, "q has shape"),
            ({"layer": 0, "q": q[:, :, :3], "k": k, "v": k}, "cannot be grouped over 2 KV heads"),
            ({"layer": 0, "q": q.astype("f8"), "k": k, "v": k}, "q is float64, expected float32"),
            ({"layer": 0, "q": None, "k": k, "v": k}, "q is missing"),
            ({"layer": 0, "q": q, "k": k, "v": k, "counts": [4]}, "counts .* from 0 to 3 are needed"),
            ({"layer": 0, "q": q, "k": k, "v": k, "begins": [1, 2]}, "begins .* 1 whole numbers"),
        ]
        for given, message in refused:
            with pytest.raises(ArgumentError, match=message):
                small.step(**given)
        with pytest.raises(ArgumentError, match="cannot go back to"):
            small.rollback([4])
        with pytest.raises(ArgumentError, match="numbers of the 1 sequences"):
            small.select([1])
        with pytest.raises(ArgumentError, match="2 sequences of 3 tokens: there is room for 2 each"):
            small.select([0, 0])
        assert nodes.messages == before
        assert small.totals.tolist() == [[0], [3]]
        small.step(1, q[:, :1], k[:, :1], k[:, :1])
        nodes.close()
        with pytest.raises(StateError, match="have ended"):
            small.step(1, q[:, :1])

    meet(comm, model)


@pytest.mark.parametrize(
    ("scheme", "error", "message"),
    [
        ("ring", RestrictionError, "cache nodes take a tree"),
        ("mpi_allreduce", RestrictionError, "mpi_allreduce is no schedule: cache nodes take a tree"),
        ("nothing", ScheduleError, "there is no scheme 'nothing'"),
    ],
)
def test_what_is_no_tree_is_refused_on_all(comm, several, scheme, error, message):
    if scheme == "ring" and comm.size < 3:
        scheme = "reduce_scatter_gather"
    with pytest.raises(error, match=message):
        cache_nodes.serve(comm) if comm.rank else cache_nodes.connect(comm, scheme=scheme)


def test_what_is_saved_is_continued_by_any_job(comm):
    """Read by the nodes again, and by ranks that are none; what fails is told, and the nodes go on."""
    folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    dense = Dense(2, 3)

    def model(nodes):
        cache = nodes.cache(batch=2, capacity=60, **SHAPE)
        one_token_of_all_layers(cache, dense, 11, np.array([11, 7]), RULES[0], None)
        with pytest.raises(ArgumentError, match="about: cannot be written as JSON"):
            cache.save(f"{folder}/cache", {"of": object()})
        cache.save(f"{folder}/cache", {"of": "a test", "on": datetime.date(2026, 1, 2)})
        again = nodes.load(f"{folder}/cache", capacity=40)
        assert (again.capacity, again.totals.tolist()) == (40, [[11, 7]] * LAYERS)
        one_token_of_all_layers(again, dense, 1, np.array([1, 1]), RULES[0], None)
        with pytest.raises(ArgumentError, match="no saved cache"):
            nodes.load(folder)
        with pytest.raises(ArgumentError, match="capacity must be a positive whole number"):
            nodes.load(f"{folder}/cache", capacity=0)
        cache.step(0, dense.new(1, HEADS)[[0, 0]], dense.new(1), dense.new(1))
        with pytest.raises(ArgumentError, match="layer 1 holds"):
            cache.save(f"{folder}/cache")
        assert sorted(os.listdir(folder)) == ["cache"]

    meet(comm, model)
    comm.barrier()
    cache = treeattn.ShardedCache.load(f"{folder}/cache", comm)
    assert [layer.totals.tolist() for layer in cache.layers] == [[11, 7]] * LAYERS
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(folder)

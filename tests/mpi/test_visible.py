"""Drawn problems over any sharding, against a dense float64 oracle that looks at every token."""

import contextlib
import os
from dataclasses import replace

import numpy as np
import pytest

import treeattn
from tests.support import arguments
from tests.support.problems import draw
from tests.support.ranks import assert_same_bits
from tests.support.schemes import REPLICATED
from treeattn import Reduction, reference
from treeattn.backends.cpu import compile

#: How many drawn cases; `make fuzz-visible` asks for more than a run of the tests has time for.
CASES = int(os.environ.get("TREEATTN_VISIBLE_CASES", "40"))


@pytest.fixture
def drawn(comm):
    """Called with a seed: a case of rules, pages, drafts, with 8 bits, latent or values of another width."""

    def drawn(seed):
        case = draw(seed, comm.size)
        case = case.latent() if seed % 7 == 3 else case.of_width(40) if seed % 7 == 5 else case
        return case.in_8_bits(seed) if seed % 5 == 1 else case

    return drawn


@pytest.fixture
def check(comm):
    """Called with a case and a scheme: the decode is exact, and the same on all ranks."""

    def check(case, scheme):
        out, lse = treeattn.decode(comm=comm, scheme=scheme, **arguments.call(**case.shard(comm.rank)))
        wanted_out, wanted_lse, out_bound, lse_bound = case.expected()
        where = f"{scheme}, {case.rules}, q {case.q.shape} {case.q.dtype}, k {case.k.shape}"
        np.testing.assert_allclose(out, wanted_out, rtol=0, atol=out_bound, err_msg=where)
        np.testing.assert_allclose(lse, wanted_lse, rtol=0, atol=lse_bound, err_msg=where)
        assert_same_bits(comm, out, lse)

    return check


@pytest.mark.parametrize("block", range(4))
def test_drawn_cases_are_exact_and_equal_on_all_ranks(drawn, check, block):
    for seed in range(block, CASES, 4):
        check(drawn(seed), REPLICATED[seed % len(REPLICATED)])


def test_drawn_cases_without_a_compiler(comm, drawn, check, monkeypatch):
    monkeypatch.setattr(compile, "loaded", lambda: (None, "not wanted"))
    for seed in (3, 5, 6):
        with pytest.warns(RuntimeWarning, match="NumPy") if comm.rank == 0 else contextlib.nullcontext():
            check(drawn(seed), "hierarchical")


@pytest.mark.parametrize("block", range(4))
def test_decoders_have_the_bits_of_drawn_calls(comm, drawn, block):
    """Over a cache that grows and shrinks, in whole steps and in halves."""
    for seed in range(block, CASES // 2, 4):
        case, scheme = drawn(seed), REPLICATED[seed % len(REPLICATED)]
        how, held = Reduction(scheme, executor=(None, "mpi", "program")[seed % 3]), case.shard(comm.rank)
        plan = {name: held[name] for name in ("k_scale", "v_scale") if name in held} | case.rules
        plan |= {"cache_dtype": str(case.k.dtype), "page_size": case.page_size or None}
        plan |= {"heads": case.q.shape[2], "kv_heads": case.k.shape[2], "head_dim": case.q.shape[3]}
        plan |= {"v_dim": case.v.shape[3], "batch": len(case.q), "dtype": str(case.q.dtype)}
        with treeattn.Decoder(
            comm, **arguments.plan(**plan), queries=case.q.shape[1], scale=case.scale, scheme=how
        ) as decoder:
            for number, share in enumerate((0.3, 1, 0.6, 1)):
                given = arguments.call(**case.part(case.q.shape[1], share).shard(comm.rank))
                step = {name: given[name] for name in given if name not in ("rules", "scale")}
                if number % 2 and case.scales is not None and not case.v_dim:
                    bits = {name: getattr(given["k"], name).view(np.uint8) for name in "kv"}
                    step["k"] = replace(given["k"], **bits)
                if number % 2:
                    decoder.begin(**step)
                    decoder.test()
                    got = decoder.finish()
                else:
                    got = decoder(**step)
                wanted = treeattn.decode(comm=comm, scheme=how, **given)
                assert [one.tobytes() for one in got] == [one.tobytes() for one in wanted], (seed, how)


@pytest.mark.parametrize("rules", [{"causal": True}, {"causal": True, "window": (16, None), "leading": 4}])
def test_positions_by_a_rule_of_the_plan(comm, rules):
    """Interleaved: token t lies on rank t mod p, whatever the length."""
    rng = np.random.default_rng(3)
    k, v = (rng.standard_normal((1, 40, 2, 64)).astype(np.float32) for _ in "kv")
    own = [np.ascontiguousarray(one[:, comm.rank :: comm.size]) for one in (k, v)]
    plan = {"heads": 2, "kv_heads": 2, "head_dim": 64, "dtype": "float32", "positions": "interleaved"}
    with treeattn.Decoder(comm, **arguments.plan(**plan, **rules)) as decoder:
        for total in (1, 2, 17, 18, 40):
            q = rng.standard_normal((1, 1, 2, 64)).astype(np.float32)
            length = np.array([len(range(comm.rank, total, comm.size))])
            out, _ = decoder(q, *own, length, q_positions=[total - 1])
            seen = reference.seen(np.arange(total), [[total - 1]], **rules)
            wanted, _ = reference.attention(q, k[:, :total], v[:, :total], scale=0.125, seen=seen)
            np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-5)

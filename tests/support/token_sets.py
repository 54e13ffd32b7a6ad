"""Drawn attention problems, and their tokens dealt out to ranks in every way: for results that depend on the
set of tokens alone."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from tests.support.pages import in_pages
from treeattn import bins
from treeattn.attention.mask import Rules
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.positions import as_runs
from treeattn.backends import cpu
from treeattn.backends.cpu import compile
from treeattn.backends.cpu.bins import attend
from treeattn.shards import parse_layout

#: Drawn problems of a test: `make test-bits` sets it.
CASES = int(os.environ.get("TREEATTN_BITS_CASES", "0"))
LAYOUTS = ("contiguous", "interleaved", "zigzag", "uneven", "random")
KINDS = ("plain", "huge", "tiny", "mixed", "grid", "sink", "equal", "inf", "nan", "far")
TYPES = (np.float32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)


@dataclass
class Problem:
    """Whole sequences; the last `drafts` tokens are drafts. The rest is as of `treeattn.decode`."""

    kind: str
    q: Any
    k: Any
    v: Any
    scale: float
    scales: tuple[Any, Any] = (None, None)
    rules: Rules = field(default_factory=Rules)
    q_positions: Any = None
    mask: Any = None
    draft_positions: Any = None

    @property
    def drafts(self):
        return 0 if self.mask is None else self.mask.shape[2]

    @property
    def context(self):
        return self.k.shape[1] - self.drafts

    @property
    def ruled(self):
        return bool(self.rules.names) or self.mask is not None

    @property
    def v_dim(self):
        return self.v.shape[3]


def drawn(rng, *, tokens=None, ruled=None):
    """A problem of any shape, types, rules and kind of numbers."""
    head_dim = int(rng.choice([8, 40, 64, 72, 128]))
    kv_heads, group = int(rng.integers(1, 3)), int(rng.choice([1, 1, 2, 3, 5]))
    batch, queries = int(rng.integers(1, 3)), int(rng.choice([1, 1, 2, 5]))
    if tokens is None:
        tokens = int(
            rng.choice([0, 1, 2, 31, 32, 33, int(rng.integers(3, 300)), int(rng.integers(300, 700))])
        )
    kind = str(rng.choice(KINDS))
    q = rng.standard_normal((batch, queries, kv_heads * group, head_dim), np.float32)
    q *= np.float32(2.0 ** rng.integers(-6, 7))
    drafts = queries if rng.random() < 0.3 and tokens >= queries else 0
    k, v = _numbers(rng, kind, (batch, tokens, kv_heads, head_dim))
    scales: tuple[Any, Any] = (None, None)
    dtype = TYPES[int(rng.choice(len(TYPES), p=[0.4, 0.3, 0.1, 0.1, 0.1]))]
    with np.errstate(all="ignore"):
        k, v = k.astype(dtype), v.astype(dtype)
    if k.dtype.itemsize == 1:
        scales = tuple((2.0 ** rng.uniform(-3, 3, kv_heads)).astype(np.float32) for _ in "kv")
    if rng.random() < 0.2 and scales[0] is None:
        v = k[..., : max(8, head_dim // 16 * 8)]
    problem = Problem(kind, q, k, v, float(rng.uniform(0.05, 0.5)), scales)
    if ruled is not False and (ruled or rng.random() < 0.6):
        _rule(rng, problem, drafts)
    return problem


def _numbers(rng, kind, shape):
    k, v = (rng.standard_normal(shape, np.float32) for _ in "kv")
    tokens = shape[1]
    if kind == "huge":
        v *= np.float32(2.0**120)
    if kind == "tiny":
        v *= np.float32(2.0**-145)
    if kind == "mixed":
        v = np.ldexp(v, rng.integers(-60, 60, v.shape)).astype(np.float32)
    if kind == "grid":  # products that tie
        v = np.ldexp(np.float32(1), rng.integers(-50, 40, v.shape)).astype(np.float32)
        k = np.round(k * 2) / 2
    if kind == "equal" and tokens:
        k[:] = k[:, :1]
    if kind in ("sink", "inf", "nan") and tokens:
        at = rng.integers(tokens)
        if kind == "sink":
            k[:, at] *= 30
        else:
            (k, v)[int(rng.integers(2))][:, at] = np.float32(kind)
    if kind == "far":
        k *= np.float32(2.0**20)
    return k, v


def _rule(rng, problem, drafts):
    """Any rules, and a mask of the last tokens."""
    batch, queries, heads, _ = problem.q.shape
    context = problem.k.shape[1] - drafts
    window = None
    if rng.random() < 0.5:
        window = int(rng.integers(0, 200)), None if rng.random() < 0.7 else int(rng.integers(0, 50))
    problem.rules = Rules(
        causal=bool(rng.random() < 0.5),
        window=window,
        leading=int(rng.integers(0, 5)) if window else 0,
        softcap=float(rng.uniform(1, 40)) if rng.random() < 0.3 else None,
        alibi=rng.uniform(0, 0.5, heads) if rng.random() < 0.3 else None,
        sink_logits=rng.uniform(-5, 5, heads) if rng.random() < 0.3 else None,
    )
    problem.q_positions = np.sort(rng.integers(0, max(context, 1) + 3, (batch, queries)), axis=1)
    if drafts:
        problem.mask = rng.random((batch, queries, drafts)) < 0.6
        problem.draft_positions = np.tile(np.arange(context, context + drafts), (batch, 1))


def shards(rng, problem, layout, size, block=1):
    """Which tokens each rank holds: of the context, and of the drafts, in the order of its memory."""
    tokens = problem.context
    if block > 1:  # whole blocks, in their order
        owner = rng.integers(0, size, -(-tokens // block))
        held = np.arange(tokens) // block
        last = np.arange(size) == owner[-1] if len(owner) else np.zeros(size, bool)
        return [
            (np.flatnonzero(owner[held] == rank), np.arange(problem.drafts if last[rank] else 0))
            for rank in range(size)
        ]
    if layout == "random":  # any set, in any order where nobody asks for positions
        owner = rng.integers(0, size, tokens) if rng.random() < 0.7 else np.full(tokens, rng.integers(size))
        own = [np.flatnonzero(owner == rank) for rank in range(size)]
        if not problem.ruled:
            own = [rng.permutation(tokens) for tokens in own]
    elif layout == "uneven":
        own = np.split(np.arange(tokens), np.sort(rng.integers(0, tokens + 1, size - 1)))
    else:
        runs = [parse_layout(layout).runs(tokens, rank, size) for rank in range(size)]
        own = [np.concatenate([np.arange(tokens)[run] for run in ranks]) for ranks in runs]
    holder = rng.integers(0, size, problem.drafts)
    return [(tokens, np.flatnonzero(holder == rank)) for rank, tokens in enumerate(own)]


def isas():
    """What there is to compute with here, "numpy" last."""
    return (*compile.available_isas(), "numpy")


def records_of(problem, own, isa, monkeypatch, *, rng=None, threads=1, sinks=False, whole_blocks=False):
    """The records of a shard [batch, heads, queries, width]; with `rng` in pages, or of other strides."""
    context, drafts = own
    at = np.concatenate([context, problem.context + drafts]).astype(np.int64)
    k, v = problem.k[:, at], problem.v[:, at]
    batch, queries, heads, _ = problem.q.shape
    records = bins.identity((batch, heads, queries), problem.v_dim)
    tables = lengths = block_table = None
    if problem.ruled:
        tables = MaskTables(problem.rules, batch, queries)
        mask = None if problem.mask is None else problem.mask[:, :, drafts]
        stands = None if mask is None else problem.draft_positions[:, drafts]
        tables.update(as_runs(context), len(at), None, problem.q_positions, mask, stands)
    if rng is not None and rng.random() < 0.3:
        page_size, lengths = int(rng.integers(1, 40)), np.full(batch, len(at), np.int64)
        (k, block_table), (v, _) = (in_pages(one, page_size) for one in (k, v))
        if tables is not None:
            rows = block_table.shape[1] * k.shape[1]
            tables.update(as_runs(context), rows, lengths, problem.q_positions, mask, stands)
    elif rng is not None and rng.random() < 0.3:
        k, v = (np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (k, v))
    given = {"scale": problem.scale, "tables": tables, "whole_blocks": whole_blocks}
    if isa == "numpy":
        given |= {"lengths": lengths, "block_table": block_table}
        attend(problem.q, k, v, records, *problem.scales, **given)
    else:
        monkeypatch.setenv("TREEATTN_ISA", isa)
        given |= {"threads": threads, "k_scale": problem.scales[0], "v_scale": problem.scales[1]}
        cpu.PlannedAttention(records, **given)(problem.q, k, v, lengths, block_table)
    if sinks and problem.rules.sink_logits is not None:
        for head, logit in enumerate(np.asarray(problem.rules.sink_logits, np.float32)):
            sink = bins.record_of_sink(logit, problem.v_dim)
            bins.merge(records[:, head], np.broadcast_to(sink, records[:, head].shape))
    return records


def results(records):
    """out and lse of records, as bytes."""
    batch, heads, queries, _ = records.shape
    v_dim = (records.shape[3] - bins.EXTRA) // 2
    out, lse = (
        np.empty((batch, queries, heads, v_dim), np.float32),
        np.empty((batch, heads, queries), np.float32),
    )
    cpu.planned_finish(records, out, lse)()
    return out.tobytes() + lse.tobytes()

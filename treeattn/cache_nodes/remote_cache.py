"""A cache on the nodes, as the model process sees it: what it asks is checked before anything is sent."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from treeattn.attention import arrays
from treeattn.attention.arguments import Rules
from treeattn.attention.arrays import AnyArray, Pair
from treeattn.attention.shape import CACHE_DTYPES, bits_of, check_axes, check_latent, values_of
from treeattn.cache.placement import check_each, check_rows, whole_numbers
from treeattn.cache.saved import as_json
from treeattn.cache_nodes.message import LayerStep, bytes_of
from treeattn.cache_nodes.tree import NodeLink
from treeattn.cache_nodes.view import CachePlan, View, ViewAttention
from treeattn.errors import ArgumentError
from treeattn.partial import Array

_MOST_QUERIES = 512  # in one step: a longer prompt goes in pieces of so many, then of smaller powers of two
_CAUSAL = Rules(causal=True)


class RemoteCache:
    """Keys and values that lie on the cache nodes; made by `CacheNodes.cache`. Nothing of them is here.

    Attributes
    ----------
    totals : int64 [layers, batch]
        Tokens that each sequence has in each layer.
    capacity : int
        Of the longest sequence.
    """

    def __init__(
        self,
        link: NodeLink,
        number: int,
        plan: CachePlan,
        batch: int,
        capacity: int,
        attention: list[ViewAttention],
    ) -> None:
        """number: of the caches on these nodes. attention: that of each view, for whoever closes them."""
        self._link, self._number, self._plan, self.capacity = link, number, plan, capacity
        self._shape = functools.lru_cache(maxsize=64)(plan.shape)
        self._most = capacity * batch  # tokens of all sequences that there is room for
        self.totals = np.zeros((plan.layers, batch), np.int64)
        self._views: dict[View, int] = {}
        self._attention = attention

    @property
    def batch(self) -> int:
        """How many sequences it holds."""
        return int(self.totals.shape[1])

    def step(
        self,
        layer: int,
        q: AnyArray,
        k: AnyArray | None = None,
        v: AnyArray | None = None,
        *,
        counts: ArrayLike | None = None,
        begins: ArrayLike | None = None,
        scale: float | None = None,
        rules: Rules | None = None,
    ) -> Pair:
        """Append the new tokens of a layer and attend to all of it: 2 (p - 1) messages over p processes.

        Parameters
        ----------
        layer : int
        q : [batch, tokens, heads, head_dim]
            Of the new tokens; more than 512, or no power of two of them, go in several steps where causal.
        k, v : [batch, tokens, kv_heads, head_dim], [.., v_dim], optional
            Of the new tokens, of a latent cache k alone; without them q attends to what is there, as the last
            tokens of it.
        counts : [batch], optional
            How many of the tokens each sequence gets, if not all; results of the others mean nothing.
        begins : [batch], optional
            Where each sequence begins (left padding): tokens before are not seen.
        scale, rules
            As of `decode`; the rules are `Rules(causal=True)` unless given.

        Returns
        -------
        out : [batch, tokens, heads, v_dim]
        lse : [batch, heads, tokens]
            As `decode` gives them, until the next step.

        Raises
        ------
        ArgumentError
            What does not fit, or exceeds the capacity: before anything is sent.
        """
        if q is None:
            raise ArgumentError("q is missing: a step attends, append(..) alone does not")
        self._check_scale(scale)
        given = self._checked(layer, q, k, v)
        queries, heads = given[0].shape[1:3]
        tokens = queries if len(given) > 1 else 0
        counted = None if counts is None else self._per_sequence("counts", counts, tokens)
        first = None if begins is None else self._per_sequence("begins", begins, None)
        self._check_room(layer, counted, tokens)
        rules = Rules.of(_CAUSAL if rules is None else rules, heads)
        apart = len(given) > 1 and rules.causal  # else queries see what comes behind them, too
        pieces = list(_pieces(queries)) if apart else [slice(0, queries)]
        results = []
        for piece in pieces:
            some = tuple(array[:, piece] for array in given)
            part = None if counted is None else np.clip(counted - piece.start, 0, piece.stop - piece.start)
            got = self._step(layer, some, part, first, scale, rules)
            if len(pieces) == 1:
                return got
            results.append([array.copy() for array in got])  # the next step takes their memory
        out, lse = zip(*results, strict=True)
        return np.concatenate(out, 1), np.concatenate(lse, 2)

    def append(
        self, layer: int, k: AnyArray, v: AnyArray | None = None, *, counts: ArrayLike | None = None
    ) -> None:
        """The new tokens of a layer without a query: p - 1 messages. Arguments and errors as of `step`."""
        given = self._checked(layer, None, k, v)
        tokens = given[0].shape[1]
        counted = None if counts is None else self._per_sequence("counts", counts, tokens)
        self._check_room(layer, counted, tokens)
        self._send(layer, None, tokens, counted, None, given)
        self.totals[layer] += tokens if counted is None else counted

    def _step(
        self,
        layer: int,
        given: tuple[Array, ...],
        counts: Array | None,
        begins: Array | None,
        scale: float | None,
        rules: Rules,
    ) -> Pair:
        link, (queries, heads) = self._link, given[0].shape[1:3]
        shape = self._shape(self.batch, queries, heads)
        view = View(shape, shape.logit_scale(scale), _of_the_last(rules) if queries == 1 else rules)
        number = self._views.get(view)
        if number is None:
            link.call("plan_view", cache=self._number, view=view)
            self._attention.append(ViewAttention(view, link.comm, link.tree.schedule))
            number = self._views[view] = len(self._attention) - 1
        tokens = queries if len(given) > 1 else 0
        link.busy = True
        self._send(layer, number, tokens, counts, begins, given)
        attention, totals = self._attention[number], self.totals[layer]
        k, v = attention.nothing
        got = attention(given[0], k, v, None, (), totals - (queries - tokens), begins)
        totals += tokens if counts is None else counts
        link.busy = False
        return got

    def _send(
        self,
        layer: int,
        view: int | None,
        tokens: int,
        counts: Array | None,
        begins: Array | None,
        given: tuple[Array, ...],
    ) -> None:
        some, first = (None if one is None else one.tolist() for one in (counts, begins))
        given_bytes = list(map(bytes_of, given))
        self._link.send(LayerStep(self._number, layer, view, tokens, some, first, given_bytes))

    def rollback(self, totals: ArrayLike) -> None:
        """Forget the tokens from `totals` [batch] on, in all layers. Raises `ArgumentError` for more than
        there are."""
        wanted = self._per_sequence("totals", totals, None)
        if (wanted > self.totals).any():
            raise ArgumentError(
                f"cannot go back to {wanted.tolist()} tokens: {self.totals.min(axis=0).tolist()} are there"
            )
        self._link.call("rollback", cache=self._number, totals=wanted)
        self.totals[...] = wanted

    def save(self, directory: str | Path, about: Mapping[str, Any] | None = None) -> None:
        """Write all layers, as `ShardedCache.save`: each node writes what it holds. `CacheNodes.load` and
        `ShardedCache.load` read it, on any number of ranks. Raises what that raises; the nodes go on."""
        kept = json.loads(as_json(dict(about or {})))
        self._link.call("save", cache=self._number, directory=str(directory), about=kept)
        self._link.done()

    def reset(self) -> None:
        """Forget all tokens of all sequences."""
        self.rollback(np.zeros(self.batch, np.int64))

    def select(self, rows: ArrayLike) -> None:
        """Go on with the sequences `rows`, integers [new batch], in this order, as beams do; one may come
        several times, or not at all. Raises `ArgumentError` for a sequence that is not there, or for more
        of them than there is room for."""
        rows = whole_numbers("rows", rows)
        check_rows(rows, self.batch)
        capacity = self._most // len(rows)
        if (self.totals[:, rows] > capacity).any():
            raise ArgumentError(
                f"{len(rows)} sequences of {int(self.totals.max())} tokens: there is room for {capacity} each"
            )
        self._link.call("select", cache=self._number, rows=rows)
        self.totals, self.capacity = self.totals[:, rows], capacity

    def _checked(
        self, layer: int, q: AnyArray | None, k: AnyArray | None, v: AnyArray | None
    ) -> tuple[Array, ...]:
        """Those that are given, as NumPy arrays that fit this cache. Raises `ArgumentError`, and `StateError`
        where the nodes have ended."""
        self._link.check_open()
        plan = self._plan
        if not (isinstance(layer, int | np.integer) and 0 <= layer < plan.layers):
            raise ArgumentError(f"layer {layer!r:.40}: the cache has {plan.layers}, from 0 on")
        if plan.latent and v is not None:
            raise ArgumentError("v is not needed: the values are the first channels of k, pass None")
        if not plan.latent and (k is None) != (v is None):
            raise ArgumentError("k and v come together, or neither of them")
        named = [
            (name, np.ascontiguousarray(arrays.on_host(name, array)))  # as they travel
            for name, array in (("q", q), ("k", k), ("v", v))
            if array is not None
        ]
        for name, array in named:
            check_axes(name, array)
        given = tuple(_elements(array, plan.dtype) for _, array in named)
        queries, heads = given[0].shape[1:3]
        shape = self._shape(self.batch, queries, plan.kv_heads if q is None else heads)
        if q is not None:
            shape.check_query(given[0])
        if k is not None:
            keys, *values = given if q is None else given[1:]
            shape.check_cache(keys, values_of(keys, values[0] if values else None, plan.v_dim, 1.0))
            if keys.shape[1] != queries:
                raise ArgumentError(f"k is of {keys.shape[1]} tokens, and q of {queries}")
        if k is None and (self.totals[layer] < queries).any():
            raise ArgumentError(
                f"q is of the last {queries} tokens, and a sequence has fewer in layer {layer}"
            )
        return given

    def _check_scale(self, scale: float | None) -> None:
        if self._plan.latent:
            check_latent(self._plan.v_dim, self._plan.head_dim, scale)

    def _per_sequence(self, name: str, given: ArrayLike, most: int | None) -> Array:
        numbers = whole_numbers(name, given)
        check_each(name, numbers, self.batch, most)
        return numbers

    def _check_room(self, layer: int, counts: Array | None, tokens: int) -> None:
        after = self.totals[layer] + (tokens if counts is None else counts)
        if (after > self.capacity).any():
            raise ArgumentError(
                f"{int(after.max())} tokens of a sequence: the cache nodes have room for {self.capacity}: "
                "take more nodes, or plan fewer sequences"
            )


def _elements(array: Array, dtype: str) -> Array:
    """An array that carries the bits of `dtype` as integers, as torch hands out 8 bits, seen as such."""
    wanted = CACHE_DTYPES[dtype]
    return array.view(wanted) if array.dtype != wanted and str(array.dtype) == bits_of(dtype) else array


@functools.lru_cache(maxsize=64)
def _of_the_last(rules: Rules) -> Rules:
    """What they are to a query that stands behind all keys: one that sees them all takes a shorter way."""
    alone = rules.causal and rules.window is None and rules.alibi is None
    return replace(rules, causal=False) if alone else rules


def _pieces(queries: int) -> Iterator[slice]:
    """A prompt in pieces, so that the plans of all prompts are few."""
    begin = 0
    while begin < queries:
        size = min(_MOST_QUERIES, 1 << ((queries - begin).bit_length() - 1))
        yield slice(begin, begin + size)
        begin += size

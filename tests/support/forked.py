"""Every public verb in a forked process, which none of the communicators of its parent serves."""

from __future__ import annotations

import inspect
import os
import signal

import numpy as np

import treeattn
from treeattn import energy, token_tree

Q, K = np.ones((1, 2, 2, 8), "f"), np.ones((1, 3, 2, 8), "f")
SHAPE = {"heads": 2, "kv_heads": 2, "head_dim": 8, "dtype": "float32"}
TREE = token_tree.TokenTree.from_paths([[1, 2]])
LIKELY = np.full((1, 2, 4), 0.25)

#: Verb -> a call of it with ``comm=`` or without.
VERBS = {
    treeattn.Decoder: lambda **comm: treeattn.Decoder(**SHAPE, **comm),
    treeattn.Merger: lambda **comm: treeattn.Merger(lse_shape=(2,), head_dim=8, **comm),
    treeattn.Prefill: lambda **comm: treeattn.Prefill(tokens=2, **SHAPE, **comm),
    treeattn.ShardedCache: lambda **comm: treeattn.ShardedCache(capacity=8, kv_heads=2, head_dim=8, **comm),
    treeattn.decode: lambda **comm: treeattn.decode(Q, K, K, **comm),
    treeattn.merge: lambda **comm: treeattn.merge(Q[0, 0], Q[0, 0, :, 0], **comm),
    treeattn.prefill: lambda **comm: treeattn.prefill(Q, Q, Q, **comm),
    energy.gradient: lambda **comm: energy.gradient(None, Q, K, K, **comm),
    energy.log_likelihood: lambda **comm: energy.log_likelihood(Q, Q, Q, K, K, **comm),
    energy.moments: lambda **comm: energy.moments(Q, K, K, **comm),
    energy.total: lambda **comm: energy.total(None, Q, K, K, **comm),
    energy.value: lambda **comm: energy.value(None, Q, K, K, **comm),
    token_tree.Verifier: lambda **comm: token_tree.Verifier(nodes=2, **SHAPE, **comm),
    token_tree.accept_greedy: lambda **comm: token_tree.accept_greedy(TREE, [[1, 2]], **comm),
    token_tree.accept_sample: lambda **comm: token_tree.accept_sample(
        TREE, LIKELY, np.random.default_rng(), **comm
    ),
    token_tree.accept_speculative: lambda **comm: token_tree.accept_speculative(
        TREE, LIKELY, LIKELY, np.random.default_rng(), **comm
    ),
    token_tree.verify: lambda **comm: token_tree.verify(Q, K, K, Q, Q, TREE, **comm),
}


def communicating():
    """What `treeattn` and its packages make public that takes ``comm=``."""
    public = [getattr(treeattn, name) for name in treeattn.__all__]
    public += [getattr(package, name) for package in public if inspect.ismodule(package)
               for name in package.__all__]  # fmt: skip
    return [
        verb
        for verb in public
        if callable(verb)
        and not (isinstance(verb, type) and issubclass(verb, Exception))
        and {"comm", "options"} & inspect.signature(verb).parameters.keys()
    ]


def made(comm):
    """Objects of every public class that keeps a communicator, and calls that need the other ranks."""
    decoder = treeattn.Decoder(comm, **SHAPE)
    merger = treeattn.Merger(comm, lse_shape=(2,), head_dim=8)
    prefill = treeattn.Prefill(comm, tokens=2, **SHAPE)
    cache = treeattn.ShardedCache(comm, capacity=8, kv_heads=2, head_dim=8)
    verifier = token_tree.Verifier(comm, nodes=2, **SHAPE)
    calls = [
        lambda: decoder(Q[:, :1], K, K),
        lambda: decoder.begin(Q[:, :1], K, K),
        lambda: merger(Q[0, 0], Q[0, 0, :, 0]),
        lambda: verifier(Q, K, K, Q, Q, TREE),
        lambda: cache.save("nowhere"),
        lambda: treeattn.ShardedCache.load("nowhere"),
    ]
    if comm.size > 1:
        calls.append(lambda: prefill(Q, Q, Q))
    return [decoder, merger, prefill, verifier], calls


def in_a_fork(*calls):
    """Fail unless each call raises `StateError` in one and the same forked process, which has so long."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(next((number for number, call in enumerate(calls, 1) if not _refused(call)), 0))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, f"call {code} was not refused"


def _refused(call):
    try:
        call()
    except treeattn.StateError as error:
        return "another process's: no communicator outlives a fork" in str(error)
    except BaseException as error:
        print(repr(error), flush=True)
    return False


def check(comm, world):
    """world: that of the job, which ``comm=None`` means."""
    missing = [verb for verb in communicating() if verb not in VERBS]
    assert not missing, f"without a call here: {missing}"
    for call in VERBS.values():
        call(comm=comm)  # it can be made, where nothing was forked
        in_a_fork(call, lambda call=call: call(comm=comm), lambda call=call: call(comm=world))
    living, calls = made(comm)
    in_a_fork(*calls)
    for owner in living:
        owner.close()

"""Every public verb that takes ``comm=``, and a call of it."""

import inspect

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


def check_complete():
    """Fail where a public verb has no call here."""
    missing = [verb for verb in communicating() if verb not in VERBS]
    assert not missing, f"without a call here: {missing}"


#: Objects that keep a communicator: how one is made, and its calls; the first is a step, or changes a cache.
OBJECTS = {
    "a decoder": (
        lambda comm: treeattn.Decoder(comm, **SHAPE),
        lambda made: [
            lambda: made(Q[:, :1], K, K), lambda: made.local(Q[:, :1], K, K),
            lambda: made.begin(Q[:, :1], K, K), made.finish, made.fold, made.close,
        ],
    ),
    "a merger": (
        lambda comm: treeattn.Merger(comm, lse_shape=(1, 3, 2), head_dim=8),
        lambda made: [lambda: made(K, K[..., 0]), made.close],
    ),
    "a prefill": (
        lambda comm: treeattn.Prefill(comm, tokens=2, **SHAPE, positions="interleaved"),
        lambda made: [lambda: made(Q, Q, Q), made.close],
    ),
    "a verifier": (
        lambda comm: token_tree.Verifier(comm, nodes=2, **SHAPE),
        lambda made: [lambda: made(Q, K, K, Q, Q, TREE), made.close],
    ),
    "a cache": (
        lambda comm: treeattn.ShardedCache(
            comm, capacity=64, kv_heads=2, head_dim=8, dtype="float32", layers=2
        ),
        lambda made: [
            lambda: made.append(K, K), lambda: made.layers[1].append(K, K), lambda: made.rollback([0]),
            lambda: made.select([0]),
        ],
    ),
}  # fmt: skip

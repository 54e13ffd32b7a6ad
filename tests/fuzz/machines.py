"""Models that drawn rules go through on every rank of a job.

Each rule does the same on all ranks, which draw alike, and is right or wrong on all of them.
"""

import functools
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.support.caches import layout_of
from tests.support.models import write_model
from tests.support.ranks import assert_same_bits
from tests.support.schemes import REPLICATED
from treeattn import Decoder, ShardedCache, reference
from treeattn.llama import Llama, Session
from treeattn.llama.drafts import draft_tree
from treeattn.mpi import communicators
from treeattn.token_tree import TokenTree, Verifier

HEADS, DIM, NODES = 2, 16, 6


def machine(model, comm):
    """A state machine over the rules of `model`, which is made as ``model(comm, seed)``."""

    class Machine(RuleBasedStateMachine):
        @initialize(seed=st.integers(0, 2**32 - 1))
        def make(self, seed):
            self.model = model(comm, seed)

        def teardown(self):
            if hasattr(self, "model"):
                self.model.close()

    def step(name):
        def run(self):
            getattr(self.model, name)()

        run.__name__ = name
        return rule()(run)

    return type(model.__name__, (Machine,), {name: step(name) for name in model.rules})


class Serving:
    """Cache, decoder and verifier over all ranks: two layers of a batch of sequences, each whole in NumPy."""

    rules = "append", "rollback", "select", "decode", "verify"

    def __init__(self, comm, seed):
        self.comm, self.draw = comm, np.random.default_rng(seed)
        self.batch, kv_heads = int(self.draw.integers(1, 4)), int(self.draw.integers(1, HEADS + 1))
        values = self.draw.choice(["whole", "whole", "narrow", "latent"])
        self.latent, self.v_dim = values == "latent", DIM if values == "whole" else 8
        kind = self.draw.choice(["contiguous", "interleaved", "zigzag", "sizes", "owners"])
        plan = {"batch": self.batch, "kv_heads": kv_heads, "head_dim": DIM, "dtype": "float64"}
        plan_trees = plan | {"heads": 2 * kv_heads, "scale": 0.3, "scheme": str(self.draw.choice(REPLICATED))}
        layout = layout_of(kind, comm.size, 60, self.draw)
        room = 5 if kind == "interleaved" else 60  # it grows
        given = {"v_dim": self.v_dim, "latent": self.latent, "layers": 2, "drafts": NODES}
        self.cache = ShardedCache(comm, capacity=room, layout=layout, **given, **plan)
        self.decoder = Decoder(comm, cache=self.cache.format, **plan_trees)
        self.owner = str(self.draw.choice(["single", "position", "round_robin", "where they will lie"]))
        self.verifier = Verifier(comm, nodes=NODES, **plan_trees)
        self.width = (kv_heads, DIM if self.latent else DIM + self.v_dim)
        self.whole = [[np.zeros((0, *self.width)) for _ in range(self.batch)] for _ in "ab"]

    def close(self):
        self.decoder.close()
        self.verifier.close()

    def layers(self):
        return zip(self.cache.layers, self.whole, strict=True)

    def both(self, tokens):
        """Keys, and values where there are any of their own."""
        return tokens[..., :DIM].copy(), None if self.latent else tokens[..., DIM:].copy()

    def append(self):
        room = 60 - self.cache.layers[0].totals
        counts = self.draw.integers(0, np.minimum(room, 9) + 1)
        for layer, sequences in self.layers():
            new = self.draw.standard_normal((self.batch, int(counts.max()), *self.width))
            layer.append(*self.both(new), counts)
            for row, count in enumerate(counts):
                sequences[row] = np.concatenate([sequences[row], new[row, :count]])

    def rollback(self):
        totals = self.draw.integers(0, self.cache.layers[0].totals + 1)
        for layer, sequences in self.layers():
            layer.rollback(totals)
            sequences[:] = [one[:total] for one, total in zip(sequences, totals, strict=True)]

    def select(self):
        rows = self.draw.integers(0, self.batch, self.batch)
        for layer, sequences in self.layers():
            layer.select(rows)
            sequences[:] = [sequences[row] for row in rows]

    def decode(self):
        q = self.draw.standard_normal((self.batch, 1, 2 * self.width[0], DIM))
        for layer, sequences in self.layers():
            self.compare(self.decoder(q, layer.shard), q, sequences)

    def verify(self):
        """A tree of which a path stays, where there is room."""
        parents = [[-1, *(int(self.draw.integers(n)) for n in range(1, NODES))] for _ in range(self.batch)]
        lengths = self.draw.integers(0, NODES + 1, self.batch)
        tree = TokenTree.from_parents(np.zeros((self.batch, NODES), int), parents, lengths)
        path = np.full((self.batch, NODES), -1)
        for row, total in enumerate(self.cache.layers[0].totals):
            if lengths[row]:
                slots = tree.path(row, int(self.draw.integers(lengths[row])))[: max(0, 60 - total)]
                path[row, : len(slots)] = slots
        q, owner = self.draw.standard_normal((self.batch, NODES, 2 * self.width[0], DIM)), self.owner
        if owner == "where they will lie":
            full = self.cache.layers[0].totals.max() > 60 - NODES
            owner = "single" if full else self.cache.owners(self.cache.draft_positions(tree))
        for layer, sequences in self.layers():
            new = self.draw.standard_normal((self.batch, NODES, *self.width))
            drafts = self.both(new)
            if self.v_dim == DIM:
                context = layer.k, layer.v, *drafts, tree, layer.lengths
                found = self.verifier(q, *context, shard_lengths=layer.shard_lengths, owner=owner)
                self.compare(found, q, sequences, new, tree)
            layer.propose(*drafts, tree)
            layer.commit(path)
            sequences[:] = [
                np.concatenate([one, new[row, path[row][path[row] >= 0]]])
                for row, one in enumerate(sequences)
            ]

    def compare(self, found, q, sequences, drafts=None, tree=None):
        out, _ = found
        assert_same_bits(self.comm, *found)
        for row, tokens in enumerate(sequences):
            seen = np.ones((1, q.shape[1], len(tokens)), bool)
            if tree is not None:
                seen = np.concatenate([seen, tree.mask[row][None]], 2) & tree.real[row][None, :, None]
                tokens = np.concatenate([tokens, drafts[row]])
            k, v = tokens[None, ..., :DIM], tokens[None, ..., :8] if self.latent else tokens[None, ..., DIM:]
            wanted, _ = reference.attention(q[row : row + 1], k, v, scale=0.3, seen=seen)
            np.testing.assert_allclose(out[row : row + 1], wanted, rtol=0, atol=1e-11)


@functools.cache
def llama():
    """A tiny one."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), "tied")
        return Llama(Path(folder))


class Writing:
    """A session that writes, drafts and takes back; and the whole text as the prompt of one rank."""

    rules = "step", "tree", "back"

    def __init__(self, comm, seed):
        self.comm, self.draw = comm, np.random.default_rng(seed)
        self.text = self.tokens(int(self.draw.integers(1, 20)))
        how = {
            "layout": str(self.draw.choice(["zigzag", "contiguous"])),
            "scheme": str(self.draw.choice(REPLICATED)),
        }
        self.session = Session(comm, llama(), self.text, capacity=90, drafts=4, **how)
        self.compare(self.session.prefill())

    def close(self):
        self.session.close()

    def tokens(self, count):
        return self.draw.integers(0, 256, count).tolist()

    def step(self):
        if len(self.text) < 90:
            self.text += self.tokens(1)
            self.compare(self.session.step(self.text[-1]))

    def tree(self):
        new, kept = self.tokens(3), int(self.draw.integers(1, 4))
        if len(self.text) < 87:
            logits = self.session.verify(draft_tree(new[0], [new[1:]], 4))[kept - 1]
            self.session.commit(np.arange(kept)[None])
            self.text += new[:kept]
            self.compare(logits)

    def back(self):
        self.text = self.text[: int(self.draw.integers(1, len(self.text) + 1))]
        self.session.rollback(len(self.text))

    def compare(self, logits):
        wanted = None
        if self.comm.rank == 0:
            with Session(communicators.alone(), llama(), self.text, capacity=90) as whole:
                wanted = whole.prefill()
        wanted = self.comm.bcast(wanted)
        assert_same_bits(self.comm, logits)
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())

"""A serving job by drawn steps: cache, decoder, verifier and session against dense models: `make fuzz`."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from tests.fuzz.settings import FUZZ, new_seed
from tests.support.caches import layout_of
from tests.support.models import write_model
from tests.support.ranks import assert_same_bits
from treeattn import Decoder, ShardedCache, reference
from treeattn.collectives import build, names
from treeattn.llama import Llama, Session
from treeattn.llama.drafts import draft_tree
from treeattn.token_tree import TokenTree, Verifier

pytestmark = pytest.mark.mpi

HEADS, DIM, NODES = 2, 16, 6
REPLICATED = [name for name in names("schedule") if build(name, 4).result == "replicated"]


class Serving:
    """Two layers of a batch of sequences over all ranks, and every sequence whole in NumPy."""

    def __init__(self, comm, seed):
        self.comm, self.draw = comm, np.random.default_rng(seed)
        self.batch, kv_heads = int(self.draw.integers(1, 4)), int(self.draw.integers(1, HEADS + 1))
        kind = self.draw.choice(["contiguous", "interleaved", "zigzag", "sizes", "owners"])
        plan = {"batch": self.batch, "kv_heads": kv_heads, "head_dim": DIM, "dtype": "float64"}
        plan_trees = plan | {"heads": 2 * kv_heads, "scale": 0.3, "scheme": str(self.draw.choice(REPLICATED))}
        layout = layout_of(kind, comm.size, 60, self.draw)
        self.cache = ShardedCache(comm, capacity=60, layout=layout, layers=2, drafts=NODES, **plan)
        self.decoder = Decoder(comm, cache=self.cache.format, **plan_trees)
        owner = str(self.draw.choice(["single", "position", "round_robin"]))
        self.verifier = Verifier(comm, nodes=NODES, owner=owner, **plan_trees)
        self.width = (kv_heads, 2 * DIM)
        self.whole = [[np.zeros((0, *self.width)) for _ in range(self.batch)] for _ in "ab"]

    def close(self):
        self.decoder.close()
        self.verifier.close()

    def layers(self):
        return zip(self.cache.layers, self.whole, strict=True)

    def append(self):
        room = 60 - self.cache.layers[0].totals
        counts = self.draw.integers(0, np.minimum(room, 9) + 1)
        for layer, sequences in self.layers():
            new = self.draw.standard_normal((self.batch, int(counts.max()), *self.width))
            layer.append(new[..., :DIM].copy(), new[..., DIM:].copy(), counts)
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
        q = self.draw.standard_normal((self.batch, NODES, 2 * self.width[0], DIM))
        for layer, sequences in self.layers():
            new = self.draw.standard_normal((self.batch, NODES, *self.width))
            drafts = new[..., :DIM].copy(), new[..., DIM:].copy()
            context = layer.k, layer.v, *drafts, tree, layer.lengths
            found = self.verifier(q, *context, shard_lengths=layer.shard_lengths)
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
            k, v = tokens[None, ..., :DIM], tokens[None, ..., DIM:]
            wanted, _ = reference.attention(q[row : row + 1], k, v, scale=0.3, seen=seen)
            np.testing.assert_allclose(out[row : row + 1], wanted, rtol=0, atol=1e-11)


@pytest.mark.timeout(0)
def test_serving_is_dense_attention(comm):
    for seed in comm.bcast(new_seed()) + np.arange(6 * FUZZ):
        serving = Serving(comm, seed)
        steps = [serving.append, serving.rollback, serving.select, serving.decode, serving.verify]
        try:
            for number in serving.draw.choice(len(steps), 12, p=[0.3, 0.1, 0.1, 0.2, 0.3]):
                steps[number]()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        serving.close()


@pytest.mark.timeout(0)
def test_a_session_is_the_model_over_the_whole_text(comm, tmp_path):
    """Steps, trees of which a path stays, texts taken back, against one prefill of one rank over the text."""
    directory = comm.bcast(tmp_path) / "model"
    if comm.rank == 0:
        write_model(directory, "tied")
    comm.Barrier()
    model, alone = Llama(directory), Llama(directory)
    for seed in comm.bcast(new_seed()) + np.arange(2 * FUZZ):
        draw = np.random.default_rng(seed)
        text = draw.integers(0, 256, draw.integers(1, 20)).tolist()
        how = {
            "prefill": str(draw.choice(["ring", "gather"])),
            "layout": str(draw.choice(["zigzag", "contiguous"])),
        }
        how["scheme"] = str(draw.choice(REPLICATED))
        with Session(comm, model, text, capacity=90, drafts=4, **how) as session:
            logits = session.prefill()
            for kind in draw.choice(["step", "tree", "back"], 6, p=[0.4, 0.4, 0.2]):
                if kind == "back":
                    text = text[: int(draw.integers(1, len(text) + 1))]
                    session.rollback(len(text))
                    continue
                new = draw.integers(0, 256, 3).tolist()
                if kind == "step":
                    text.append(new[0])
                    logits = session.step(new[0])
                else:
                    kept = int(draw.integers(1, 4))
                    logits = session.verify(draft_tree(new[0], [new[1:]], 4))[kept - 1]
                    session.commit(np.arange(kept)[None])
                    text += new[:kept]
                with Session(MPI.COMM_SELF, alone, text, capacity=90) as whole:
                    wanted = whole.prefill()
                np.testing.assert_allclose(
                    logits, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max(), err_msg=str(seed)
                )
                assert_same_bits(comm, logits)

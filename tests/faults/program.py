"""Each class once, on all ranks; rank 1 comes to grief where the words say: HOW PHASE FOLDER."""

import os
import signal
import subprocess
import sys

import numpy as np

import treeattn
from treeattn import cache_nodes
from treeattn.cache_nodes.node import Node
from treeattn.llama import Llama, Session
from treeattn.token_tree import TokenTree, Verifier, accept_greedy

how, phase, folder = sys.argv[1:]


def communicator():
    """Of MPI, or torch's where torchrun started this."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        from mpi4py import MPI

        return MPI.COMM_WORLD, MPI.COMM_WORLD.rank
    import torch.distributed

    torch.distributed.init_process_group("gloo")
    return None, torch.distributed.get_rank()


comm, rank = communicator()


def before(here: str) -> None:
    if rank != 1 or here != phase:
        return
    if how == "raise":
        raise RuntimeError("what the program raises on one rank")
    if how == "leave":
        sys.exit(0)
    if how == "cut":  # the link of a node of the emulated cluster
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    else:
        os.kill(os.getpid(), getattr(signal, how))


def drawn(*shape: int):
    return np.random.default_rng(rank).standard_normal(shape).astype(np.float32)


plan = {"kv_heads": 2, "head_dim": 16, "dtype": "float32"}
q, k, v = np.ones((1, 1, 4, 16), np.float32), drawn(1, 50, 2, 16), drawn(1, 50, 2, 16)

before("planning")
with treeattn.Decoder(comm, heads=4, scheme="binary_tree", **plan) as decoder:
    before("a step")
    decoder(q, k, v)
    decoder.begin(q, k, v)
    before("between begin and finish")
    decoder.finish()
    before("decode")
    out, lse = treeattn.decode(q, k, v, comm=comm)
    before("merge")
    treeattn.merge(out, lse.transpose(0, 2, 1), comm=comm)
    before("prefill")
    shards = drawn(1, 20, 4, 16), drawn(1, 20, 2, 16), drawn(1, 20, 2, 16)
    treeattn.prefill(*shards, comm=comm)
    cache = treeattn.ShardedCache(comm, capacity=90, **plan)
    before("append")
    cache.append(np.ones((1, 30, 2, 16), np.float32), np.ones((1, 30, 2, 16), np.float32))
    before("a step of a cache")
    decoder(q, cache.k, cache.v, cache.lengths)
    before("save")
    cache.save(f"{folder}/{how}-{phase}".replace(" ", "-"))
    before("load")
    treeattn.ShardedCache.load(f"{folder}/{how}-{phase}".replace(" ", "-"), comm)
    tree = TokenTree.from_parents([[1, 2, 3]], [[-1, 0, 0]])
    with Verifier(comm, heads=4, nodes=3, **plan) as verifier:
        before("verify")
        ones = np.ones((1, 3, 4, 16), np.float32)
        verifier(ones, k, v, ones[:, :, :2], ones[:, :, :2], tree)
    before("accept")
    accept_greedy(tree, [[1, 2, 3]], comm=comm)
    if comm is not None:  # cache nodes are MPI's; rank 1 is one
        before("cache nodes")
        if rank:

            def taken(node: Node, take=Node.take) -> None:
                if node.caches and not node.steps:  # the first message has planned a cache
                    if not node.caches[0].views:
                        before("a plan of cache nodes")
                    else:
                        before("a step of cache nodes")
                take(node)

            Node.take = taken
            cache_nodes.serve(comm)
        else:
            with cache_nodes.connect(comm) as nodes:
                nodes.cache(layers=1, capacity=9, **plan).step(0, q, k[:, :1], v[:, :1])
    before("a session")
    with Session(comm, Llama(folder), [1, 2, 3], capacity=9) as session:
        session.prefill()
        before("a token")
        session.step(4)
    before("close")
before("the end of the process")

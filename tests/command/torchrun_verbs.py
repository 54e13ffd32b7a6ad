"""What takes ``comm=`` over the ranks of torchrun, against the oracle: a program of test_torchrun.py."""

import tempfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import treeattn
from tests.support.models import write_model
from tests.support.torchrun import without_mpi
from treeattn.llama import Llama, Session
from treeattn.llama.generate import generate
from treeattn.mpi.communicators import intracomm
from treeattn.reference import attention

BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 16
SHAPE = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "batch": BATCH, "dtype": "float32"}


def drawn(*shape):
    return np.random.default_rng(shape[1]).standard_normal(shape).astype(np.float32)


def close(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(one), other, atol=1e-5)


def refusals():
    """Every rank raises the same."""
    q, k = np.ones((1, 1, 1, 8), "f"), np.ones((1, 3, 1, 8), "f")
    for executor in ("mpi", "program"):
        with pytest.raises(treeattn.TransportError, match="take executor='torch' or None"):
            treeattn.decode(q, k, k, scheme=treeattn.Reduction(executor=executor))
    for scheme in ("mpi_allreduce", "kv_ring", "query_ring"):
        with pytest.raises(treeattn.RestrictionError, match="made of MPI's own calls.*recursive_doubling"):
            treeattn.decode(q, k, k, scheme=scheme)
    with pytest.raises(treeattn.ArgumentError, match="rank 1: "):
        treeattn.decode(q, k if dist.get_rank() == 0 else k[..., :4], k)
    with pytest.raises(treeattn.ArgumentError, match="scheme differs between ranks"):
        treeattn.decode(q, k, k, scheme=("ring", "binary_tree")[dist.get_rank()])
    with pytest.raises(treeattn.ArgumentError, match="comm must be .* or a process group of torch"):
        treeattn.decode(q, k, k, comm="gloo")
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(treeattn.ArgumentError, match=r"group of a dimension, such as mesh.get_group\(0\)"):
        treeattn.decode(q, k, k, comm=mesh)
    assert treeattn.decode(q, k, k, comm=mesh.get_group(0))[0].mean() == 1
    first = dist.new_group([0])
    if dist.get_rank():
        with pytest.raises(treeattn.ArgumentError, match="this rank is no member of the group that comm is"):
            treeattn.decode(q, k, k, comm=first)


def destroyed(groups):
    """Of which the first has been communicated over, and the second has not."""
    one = np.ones((1, 1, 1, 8), "f")
    for group in groups:
        with pytest.raises(treeattn.StateError, match="a process group that was destroyed: make one"):
            treeattn.decode(one, one, one, comm=group)


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    q, k, v = drawn(BATCH, 1, HEADS, DIM), drawn(BATCH, 41, KV_HEADS, DIM), drawn(BATCH, 41, KV_HEADS, DIM)
    wanted = attention(q, k, v, scale=DIM**-0.5)
    shard = slice(rank * 41 // size, (rank + 1) * 41 // size)
    mine = k[:, shard], v[:, shard]

    close(treeattn.decode(q, *mine), wanted)
    close(treeattn.decode(*map(torch.from_numpy, (q, *map(np.ascontiguousarray, mine)))), wanted)
    close(treeattn.decode(q if rank else None, *mine, q_root=1, comm=dist.group.WORLD), wanted)
    alone = dist.new_group([rank], use_local_synchronization=True)
    close(treeattn.decode(q, k, v, comm=alone), wanted)
    part, lse = treeattn.decode(q, *mine, comm=alone)
    close(treeattn.merge(part, np.ascontiguousarray(lse.transpose(0, 2, 1)))[:1], wanted[:1])

    bits = set()
    for executor in (None, "slots", "torch"):
        how = treeattn.Reduction("recursive_doubling", executor=executor)
        with treeattn.Decoder(scheme=how, **SHAPE) as decoder:
            assert decoder.executor == (executor or "slots")
            for _ in range(3):
                out, lse = decoder(q, *mine)
            decoder.begin(q, *mine)
            out, lse = decoder.finish()
            close((out, lse), wanted)
            bits.add((out.tobytes(), lse.tobytes()))
    assert len(bits) == 1
    with treeattn.Decoder(scheme=treeattn.Reduction("binary_tree", groups=2), **SHAPE) as decoder:
        for _ in range(20):
            decoder.begin(q, *mine)
            close(decoder.finish(), wanted)

    rows, stands = drawn(1, 41, HEADS, DIM), np.arange(41)[shard]
    whole, _ = treeattn.prefill(rows, k[:1], v[:1], comm=alone)
    out, _ = treeattn.prefill(rows[:, shard], mine[0][:1], mine[1][:1], positions=stands)
    close([out], [whole[:, shard]])

    cache = treeattn.ShardedCache(capacity=64, batch=BATCH, kv_heads=KV_HEADS, head_dim=DIM, dtype="float32")
    for at in range(41):
        cache.append(k[:, at : at + 1], v[:, at : at + 1])
    close(treeattn.decode(q, cache.k, cache.v, lengths=cache.lengths), wanted)
    refusals()
    model, texts = Llama(write_model(Path(tempfile.mkdtemp()) / "tied", "tied")), []
    for drafts in 0, 5:
        with Session(None, model, [3, 4, 5] * 3, capacity=20, drafts=drafts) as session:
            texts.append(generate(session, 10, drafter=lambda *_: [[3, 4]]).tokens)
    assert texts[0] == texts[1]
    if find_spec("transformers"):
        from tests.support.sharded_models import check_family, check_tensor_parallel

        comm = intracomm(None)
        check_family(comm, "Mistral")
        check_tensor_parallel(comm, "Llama", comm.bcast("" if rank else tempfile.mkdtemp()))
    without_mpi()
    dist.barrier()
    groups = alone, dist.new_group([0, 1]), dist.group.WORLD
    for group in groups[:2]:
        dist.destroy_process_group(group)
    destroyed(groups[:2])
    dist.destroy_process_group()
    destroyed(groups)


if __name__ == "__main__":
    main()

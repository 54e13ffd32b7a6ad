"""Ranks of process groups on emulated nodes: prints, on rank 0, who shares one, and checks a decode."""

import json
import sys

import numpy as np
import torch.distributed as dist

import treeattn
from treeattn.mpi import communicators
from treeattn.reference import attention

dist.init_process_group("gloo")
comm = communicators.intracomm(None)
draw = np.random.default_rng(5)
q, k, v = (draw.standard_normal((1, n, 4, 16)).astype(np.float32) for n in (1, 40, 40))
wanted = attention(q, k, v, scale=16**-0.5)
mine = slice(comm.rank * 40 // comm.size, (comm.rank + 1) * 40 // comm.size)
shape = {"heads": 4, "kv_heads": 4, "head_dim": 16, "dtype": "float32"}
found = {"nodes": comm.nodes}
for executor in (None, "torch"):
    how = treeattn.Reduction("hierarchical", executor=executor)
    with treeattn.Decoder(scheme=how, **shape) as decoder:
        for _ in range(3):
            out, lse = decoder(q, k[:, mine], v[:, mine])
        found.setdefault("executors", []).append(decoder.executor)
        found.setdefault("bits", []).append(out.tobytes().hex())
    np.testing.assert_allclose(out, wanted[0], atol=1e-5)
found["mpi"] = "mpi4py" in sys.modules
if comm.rank == 0:
    print(json.dumps(found), flush=True)
dist.barrier()
dist.destroy_process_group()

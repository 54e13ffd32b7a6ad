"""Everyone sends its records to everyone, and each rank merges all p values on its own.

One round: the lowest latency there is for a few ranks that can all talk at once, and p - 1 times the bytes.
Every rank merges in rank order, or bits would differ: class C from three ranks on.

Cost: alpha + (p-1) n beta

Source: NCCL's advice for unusual operators (NVIDIA/nccl issue 633); the one-shot all-reduce of vLLM and
TensorRT-LLM.
"""

from __future__ import annotations

from treeattn.collectives.schedule import Schedule, Transfer, refuse_above_limit


def all_gather_merge(size: int) -> Schedule:
    """One round: all to all, then each rank merges in rank order."""
    refuse_above_limit("all_gather_merge", size, size * (size - 1))
    everyone = tuple(Transfer(src, dst) for src in range(size) for dst in range(size) if src != dst)
    return Schedule("all_gather_merge", size, 1, (everyone,) if everyone else ())

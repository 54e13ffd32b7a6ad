"""Digests that a recording holds: of the query, of blocks of the cache, of what each head gave."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from treeattn.cli.problem import Problem
from treeattn.collectives.runtime.communicator import MpiCommunicator
from treeattn.partial import Array
from treeattn.report import Report

BLOCK = 256  # tokens with a digest of their own


def fingerprint(world: MpiCommunicator, problem: Problem) -> dict[str, Any]:
    """Of the query, and of each 256 tokens of the cache, whoever holds them. Collective."""
    own: dict[int, int] = {}
    tensors: list[Any] = [problem.k] if problem.latent else [problem.k, problem.v]
    rows = [tensor if problem.paged is None else problem.paged.rows(tensor) for tensor in tensors]
    for index, token in enumerate(np.asarray(problem.own).tolist()):
        content = b"".join(np.ascontiguousarray(row[:, index]).view(np.uint8).tobytes() for row in rows)
        digest = hashlib.blake2b(content + token.to_bytes(8, "little"), digest_size=8).digest()
        own[token // BLOCK] = own.get(token // BLOCK, 0) + int.from_bytes(digest, "little")
    everyone = world.allgather(own)
    sums = (sum(one.get(at, 0) for one in everyone) for at in range(-(-problem.tokens // BLOCK)))
    query = hashlib.sha256(np.ascontiguousarray(problem.q).view(np.uint8).tobytes()).hexdigest()
    return {"query": query, "blocks": [f"{total % (1 << 64):016x}" for total in sums]}


def show_digests(made: Report, rows: list[dict[str, Any]]) -> None:
    """A line for each result that the rows have: one, where bits are of the tokens alone."""
    for digest in sorted({row["sha256"] for row in rows}):
        made.text(f"SHA-256 of out and lse, on any ranks and machine: {digest}")


def head_digests(out: Array, lse: Array) -> list[str]:
    """Of each query head's result."""
    return [
        hashlib.sha256(out[:, :, head].tobytes() + lse[:, head].tobytes()).hexdigest()[:16]
        for head in range(lse.shape[1])
    ]

"""``treeattn inspect``: what a model and its cache need on each rank, before any rank is started."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from treeattn.attention.shape import DTYPES
from treeattn.backends.cuda import kernel_head_dim
from treeattn.cli.options import CLUSTER, DEVICE, FILE, RANKS, Output, number, output_options, read
from treeattn.collectives.clusters import placement
from treeattn.collectives.clusters.description import Cluster
from treeattn.errors import ArgumentError, RestrictionError
from treeattn.llama.config import Config, read_config
from treeattn.llama.tensor_parallel import sharded_bytes
from treeattn.llama.weights import Weights
from treeattn.report import Column, Report, count
from treeattn.selection import select
from treeattn.study.decode_step import Shape, attention_time, kv_ring_time, reduction_time
from treeattn.topology import described

_SCHEMES = "binary_tree,recursive_doubling,hierarchical,ring"


@click.command("inspect")
@click.option("--model", "directory", required=True, type=FILE, help="As of generate.")
@click.option(
    "--ctx", "tokens", callback=read(number), default="128Ki", metavar="N", help="Tokens of context."
)
@click.option("--ranks", type=RANKS, default=8)
@DEVICE
@click.option("--schemes", default=_SCHEMES, metavar="S[,S..]")
@CLUSTER
@output_options(wide=False)
def command(
    directory: Path,
    tokens: int,
    ranks: int,
    device: str,
    schemes: str,
    cluster: str | None,
    output: Output,
) -> None:
    """Show what MODEL needs for a context on so many ranks: memory, and what is sent for one token.

    Reads config.json and the headers of the weights; starts no MPI. With --cluster attention is priced too,
    with its communication, by simulation. Heads of a cache on a GPU are filled up to those of its kernels.
    """
    config = read_config(directory)
    if not tokens:
        raise ArgumentError(f"--ctx {tokens}: give the tokens of a context, at least one")
    weights = Weights(directory, config)
    output.open()
    named = described(cluster)
    machine = None if named is None else named.cluster
    held = config if device == "cpu" else replace(config, head_dim=kernel_head_dim(config.head_dim))
    itemsize = DTYPES[weights.dtype if device == "cpu" else "float32"].itemsize
    longest, notes, rows = config.max_position_embeddings, [], []
    if tokens > longest:
        notes.append(f"the model was made for at most {longest:,} tokens, generate takes no more")
    for scheme in schemes.split(","):
        try:
            rows.append(_traffic(held, scheme, ranks, tokens, itemsize, machine))
        except RestrictionError as error:  # which others need not share
            notes.append(f"{scheme} is left out: {error}")
    if device == "cpu":
        rows.append(_ring(held, tokens, ranks, itemsize, machine))
    memory = _memory(config, held, tokens, ranks, itemsize)
    facts = {"device": device, "head_dim": held.head_dim, "notes": notes}
    made = Report(memory | {"ctx": tokens, "ranks": ranks, "schemes": rows} | facts)
    made.line(f"{config.layers} layers, {config.heads} heads ({config.kv_heads} KV) x {config.head_dim}")
    if held is not config:
        made.line(f"cache, blocks and messages of a GPU have heads x {held.head_dim}")
    for label, nbytes in zip(("weights", "sharded", "cache", "prefill"), memory.values(), strict=True):
        made.line(f"{label:8} {nbytes:>16,} bytes a rank")
    made.line(f"\nsent for one token of a context of {tokens:,}, all layers:\n")
    columns: list[Column[dict[str, Any]]] = [
        Column("scheme", words=True),
        Column("rounds", form=count),
        Column("messages", form=count),
        Column("bytes, all ranks", "bytes", count),
    ]
    if machine is not None:
        columns.append(Column(f"attention on {machine.name}, ms: simulated", "attention_ms", ".3f"))
    made.table(rows, columns)
    if named is not None:
        made.line(f"simulated: on {named.shown}")
    for note in notes:
        made.text(f"note: {note}")
    output.report(made)


def _memory(config: Config, held: Config, tokens: int, ranks: int, itemsize: int) -> dict[str, int]:
    """Count bytes of the fullest rank: weights, its share of the cache, what a ring prefill holds for its
    tokens. held: with heads as caches have them; itemsize: of weights and caches."""
    share = math.ceil(tokens / ranks)
    return {
        "weight_bytes": sharded_bytes(config, 1, itemsize),
        "sharded_weight_bytes": sharded_bytes(config, ranks, itemsize),
        "cache_bytes": share * itemsize * held.kv_per_token,
        "prefill_bytes": share * config.ring_bytes(held.head_dim, ranks, itemsize),
    }


def _traffic(
    config: Config, scheme: str, ranks: int, tokens: int, itemsize: int, cluster: Cluster | None
) -> dict[str, Any]:
    """Count what a schedule sends for one token, the same for every context; price attention with it."""
    selection, nodes = select(scheme), None
    if cluster is not None and selection.needs_nodes:
        nodes = placement.node_groups(cluster, placement.block(cluster, ranks))
    schedule = selection.build(ranks, nodes)
    priced: dict[str, Any] = {}
    if cluster is not None:
        places, shape = placement.block(cluster, ranks), _shape(config, tokens, itemsize)
        step = attention_time(cluster, ranks, shape) + reduction_time(cluster, places, schedule, shape)
        priced["attention_ms"] = config.layers * step / 1e3
    sent = list(schedule.traffic(config.heads))
    width = 4 * (config.head_dim + 2)
    return {
        "scheme": scheme,
        "rounds": config.layers * len(schedule.rounds),
        "messages": config.layers * len(sent),
        "bytes": config.layers * width * sum(message.records for message in sent),
        **priced,
    }


def _ring(config: Config, tokens: int, ranks: int, itemsize: int, cluster: Cluster | None) -> dict[str, Any]:
    """Count what Ring Attention sends: every rank passes on every block but its own, keys and values."""
    milliseconds = None
    if cluster is not None:
        step = kv_ring_time(cluster, placement.block(cluster, ranks), _shape(config, tokens, itemsize))
        milliseconds = config.layers * step / 1e3
    return {
        "scheme": "kv_ring",
        "rounds": config.layers * (ranks - 1),
        "messages": config.layers * ranks * (ranks - 1),
        "bytes": tokens * (ranks - 1) * itemsize * config.kv_per_token,
        "attention_ms": milliseconds,
    }


def _shape(config: Config, tokens: int, itemsize: int) -> Shape:
    return Shape(tokens, config.heads, config.kv_heads, config.head_dim, bytes=itemsize)

"""``treeattn inspect``: what a model and its cache need on each rank, before any rank is started."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from treeattn import files
from treeattn.backends.cuda import kernel_head_dim
from treeattn.cli.console import console, count, number, table
from treeattn.collectives import traffic
from treeattn.collectives.clusters import description, placement
from treeattn.collectives.clusters.description import Cluster
from treeattn.decoder.plan import select
from treeattn.errors import ArgumentError, RestrictionError
from treeattn.llama.config import Config, read_config
from treeattn.llama.prefill import ring_floats
from treeattn.llama.weights import Weights, shapes, sharded_bytes
from treeattn.study import environment
from treeattn.study.decode_step import Shape, attention_time, kv_ring_time, reduction_time

__all__ = ["command"]

_SCHEMES = "binary_tree,recursive_doubling,hierarchical,ring"


@click.command("inspect")
@click.option("--model", "directory", required=True, type=click.Path(path_type=Path))
@click.option("--ctx", default="128Ki", show_default=True, metavar="N", help="Tokens of context.")
@click.option("--ranks", type=click.IntRange(1), default=8, show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True,
              help="Where ranks compute: a GPU fills heads up to those of its kernels.")  # fmt: skip
@click.option("--schemes", default=_SCHEMES, show_default=True, metavar="S[,S..]")
@click.option("--cluster", "cluster_name", metavar="NAME|FILE.toml", help="Predict times on this machine.")
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def command(
    directory: Path,
    ctx: str,
    ranks: int,
    device: str,
    schemes: str,
    cluster_name: str | None,
    json_path: Path | None,
) -> None:
    """Show what MODEL needs for a context on so many ranks: memory, and what is sent for one token.

    Reads config.json and the headers of the weights; starts no MPI. With --cluster attention is priced too,
    with its communication, by simulation.
    """
    config, tokens = read_config(directory), number("--ctx", ctx)
    if not tokens:
        raise ArgumentError(f"--ctx {ctx}: give the tokens of a context, at least one")
    Weights(directory, config)
    write = files.output_writer(json_path)
    cluster = None if cluster_name is None else description.load(cluster_name)
    held = config if device == "cpu" else replace(config, head_dim=kernel_head_dim(config.head_dim))
    notes, rows = _beyond(config, tokens), []
    for scheme in schemes.split(","):
        try:
            rows.append(_traffic(held, scheme, ranks, tokens, cluster))
        except RestrictionError as error:  # which others need not share
            notes.append(f"{scheme} is left out: {error}")
    if device == "cpu":
        rows.append(_ring(held, tokens, ranks, cluster))
    facts = _memory(config, held, tokens, ranks) | {"ctx": tokens, "ranks": ranks, "schemes": rows}
    facts |= {"device": device, "head_dim": held.head_dim, "notes": notes}
    write(environment.as_json(facts))
    screen = console()
    screen.print(f"{config.layers} layers, {config.heads} heads ({config.kv_heads} KV) x {config.head_dim}")
    if held is not config:
        screen.print(f"cache, blocks and messages of a GPU have heads x {held.head_dim}")
    for label, name in (("weights", "weight_bytes"), ("sharded", "sharded_weight_bytes"),
                        ("cache", "cache_bytes"), ("prefill", "prefill_bytes")):  # fmt: skip
        screen.print(f"{label:8} {facts[name]:>16,} bytes a rank")
    screen.print(f"\nsent for one token of a context of {tokens:,}, all layers:\n")
    columns: dict[str, Any] = {
        "scheme": lambda row: row["scheme"],
        "rounds": lambda row: count(row["rounds"]),
        "messages": lambda row: count(row["messages"]),
        "bytes, all ranks": lambda row: count(row["bytes"]),
    }
    if cluster is not None:
        columns[f"attention on {cluster.name}, ms: simulated"] = lambda row: f"{row['attention_ms']:.3f}"
    table(screen, columns, rows)
    for note in notes:
        print(f"note: {note}")


def _beyond(config: Config, tokens: int) -> list[str]:
    """What to say of a context that the model does not have."""
    longest = config.max_position_embeddings
    if tokens <= longest:
        return []
    return [f"the model was made for at most {longest:,} tokens, generate takes no more"]


def _memory(config: Config, held: Config, tokens: int, ranks: int) -> dict[str, Any]:
    """Bytes of the fullest rank: weights in float32, its share of the cache, what a ring prefill holds for
    its tokens. held: with heads as caches have them."""
    share = math.ceil(tokens / ranks)
    return {
        "weight_bytes": 4 * sum(math.prod(shape) for shape in shapes(config).values()),
        "sharded_weight_bytes": sharded_bytes(config, ranks),
        "cache_bytes": share * held.kv_bytes_per_token,
        "prefill_bytes": 4 * share * ring_floats(config, held.head_dim, ranks),
    }


def _traffic(config: Config, scheme: str, ranks: int, tokens: int, cluster: Cluster | None) -> dict[str, Any]:
    """What a schedule sends for one token, the same for every context; how long attention takes with it."""
    selection, nodes = select(scheme), None
    if cluster is not None and selection.needs_nodes:
        nodes = placement.node_groups(cluster, placement.block(cluster, ranks))
    schedule = selection.build(ranks, nodes)
    priced: dict[str, Any] = {}
    if cluster is not None:
        places, shape = placement.block(cluster, ranks), _shape(config, tokens)
        step = attention_time(cluster, ranks, shape) + reduction_time(cluster, places, schedule, shape)
        priced["attention_ms"] = config.layers * step / 1e3
    sent = list(traffic.messages(schedule, config.heads))
    width = 4 * (config.head_dim + 2)
    return {
        "scheme": scheme,
        "rounds": config.layers * len(schedule.rounds),
        "messages": config.layers * len(sent),
        "bytes": config.layers * width * sum(message.records for message in sent),
        **priced,
    }


def _ring(config: Config, tokens: int, ranks: int, cluster: Cluster | None) -> dict[str, Any]:
    """Ring Attention: every rank passes on every block but its own, keys and values."""
    moved, milliseconds = tokens * (ranks - 1), None
    if cluster is not None:
        step = kv_ring_time(cluster, placement.block(cluster, ranks), _shape(config, tokens))
        milliseconds = config.layers * step / 1e3
    return {
        "scheme": "kv_ring",
        "rounds": config.layers * (ranks - 1),
        "messages": config.layers * ranks * (ranks - 1),
        "bytes": moved * config.kv_bytes_per_token,
        "attention_ms": milliseconds,
    }


def _shape(config: Config, tokens: int) -> Shape:
    return Shape(tokens, config.heads, config.kv_heads, config.head_dim, bytes=4)

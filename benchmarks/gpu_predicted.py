"""What launches on a GPU should take, before any ran: python benchmarks/gpu_predicted.py [--json FILE]

For bfloat16, head_dim 128 and one sequence unless a row says otherwise, on an H100 and an H200. Beside one
another, in microseconds: `floor`, the cache at the GPU's copy rate; `model`, what chooses splits
(treeattn.backends.cuda.splits) with the constants that are shipped, an H100's, and with an H200's copy rate;
`merge`, what of it the merge of splits takes; `issue`, the main loop's instructions
(tests/compile_matrix/costs.json, sm_90) at all issue slots, without and with the branches for masks, which
tokens that all rows see do not take; `copies`, what of it copies into shared memory take, for latent heads of
16 bits: bulk copies (cp.async.bulk) could save no more; `products`, the multiply-adds of these rows at the
tensor cores' nominal rate; `l2`, what all tiles read at the rate of the L2 cache; and `read`, what a reading
of the former kernels' machine code expected.

Then a reduction of 8 KB over peer memory of 8 GPUs: the program of each rank, instruction by instruction,
with the round trips of `Links`, where the kernel's tables lie in memory and where in its parameters; and a
step. The first GPU decides which was right.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import harness

from treeattn import collectives
from treeattn.backends.cuda import splits, variants
from treeattn.collectives import program
from treeattn.collectives.check import prove

COSTS = Path(__file__).parents[1] / "tests" / "compile_matrix" / "costs.json"
MULTIPROCESSORS, SHARED, CLOCK = 132, 227 << 10, 1.755e9
PRODUCTS = 989e12  # operations a second, of 16 bits, dense: NVIDIA's data sheet
COPIED = {"H100": 3.0e12, "H200": 4.3e12}  # bytes a second, read and written
RECORDS, RANKS = 16, 8  # of 130 floats: 8 KB


class Links(NamedTuple):
    """Microseconds of what a reduction waits for, as a reading of the machine code assumed them.

    touch: a table that lies in memory, for the first time. copy: records into a window. number: of a round,
    behind a fence. trip: to another GPU and back. reload: of where a window lies, in each look at a number.
    """

    launch: float = 2.3
    steps: float = 0.7
    program: float = 0.8
    sources: float = 0.75
    windows: float = 0.7
    copy: float = 0.6
    number: float = 0.9
    trip: float = 1.0
    reload: float = 0.5
    finish: float = 1.5


LINKS = {"memory": Links(), "parameters": Links(program=0, sources=0, windows=0, reload=0)}
# Scheme -> what was read, from and to, with the tables in memory and in parameters.
REDUCTIONS = {
    "all_gather_merge": ((11, 13), (9, 11)),
    "recursive_doubling": ((20, 23), (15, 17)),
    "binary_tree": ((30, 36), (22, 26)),
}


class Row(NamedTuple):
    """A launch; read: microseconds on an H100 and an H200, from and to."""

    what: str
    heads: int
    kv_heads: int
    tokens: int
    read: tuple[tuple[float, float], tuple[float, float]] | None = None
    dtype: str = "bfloat16"
    nodes: int = 0  # of a tree of draft tokens
    latent: bool = False


ROWS = (
    Row("16/16 heads, 64k", 16, 16, 65536, ((185, 192), (130, 136))),
    Row("16/16 heads, 256k", 16, 16, 262144, ((723, 735), (505, 515))),
    Row("32/8 heads, 64k", 32, 8, 65536, ((94, 99), (67, 71))),
    Row("32/8 heads, 256k", 32, 8, 262144, ((362, 370), (255, 262))),
    Row("32/8 heads, 8k", 32, 8, 8192, ((16.5, 18.5), (13, 15))),
    Row("32/8 heads, 1k", 32, 8, 1024, ((7.5, 9.5), (7, 9))),
    *(
        Row(f"e4m3, {group} heads a group, 64k", 8 * group, 8, 65536, read, "float8_e4m3fn")
        for group, read in (
            (1, ((47, 47), (45, 45))),
            (4, ((74, 75), (74, 75))),
            (8, ((149, 149), (148, 149))),
        )
    ),
    Row("latent, 16 heads, 64k", 16, 1, 65536, ((38, 46), (31, 37)), latent=True),
    Row("latent, 16 heads, 8k", 16, 1, 8192, latent=True),
    Row("latent, 128 heads, 64k", 128, 1, 65536, ((120, 150), (110, 150)), latent=True),
    Row("latent of 8 bits, 16 heads, 64k", 16, 1, 65536, None, "float8_e4m3fn", latent=True),
    Row("a tree of 64 nodes, 32/8 heads, 64k", 32, 8, 65536, ((750, 900), (720, 850)), nodes=64),
)


def predicted(row: Row, costs: dict[str, Any]) -> dict[str, Any]:
    """A line of the table."""
    group = row.heads // row.kv_heads
    rows, head_dim = max(1, row.nodes) * group, variants.LATENT[0] if row.latent else 128
    width = variants.LATENT[1] if row.latent else head_dim
    q_type = "float16" if row.latent and rows <= 16 else "bfloat16"  # of the kernels whose costs are known
    variant = variants.choose_variant(
        *(q_type, row.dtype if row.dtype != "bfloat16" else q_type, head_dim, rows),
        tensor_cores=True,
        shared_limit=SHARED,
        tokens=variants.Tokens(visible=bool(row.nodes)),
        latent=row.latent,
    )
    cost = costs[variant.expression]
    resident = min(65536 // (cost["registers"] * variant.threads), (SHARED + 1024) // (cost["shared"] + 1024))
    tiles = math.ceil(rows / variant.rows)
    token_bytes = (1 if row.latent else 2) * head_dim * (1 if row.dtype != "bfloat16" else 2)
    load = splits.Load(
        tiles=row.kv_heads * tiles,
        rows=min(rows, variant.rows),
        tokens=row.tokens,
        head_dim=width,
        token_bytes=token_bytes,
        step=variant.step,
        in_flight=variant.in_flight,
        slots=resident * MULTIPROCESSORS,
        multiprocessors=MULTIPROCESSORS,
        sharing=tiles,
        merging=variants.merge_blocks(variant, width, rows) * row.kv_heads * tiles,
    )
    cut = splits.choose_splits(load)

    model = {
        name: round(float(splits.predict(load, cut.number, cut.fan, constants(name))), 1) for name in COPIED
    }
    size = row.kv_heads * row.tokens * token_bytes
    turns = load.tiles * math.ceil(row.tokens / variant.step) * variant.threads // 128
    loops = [costs[variant.expression.replace(", VisibleTokens", "")]["loop"], cost["loop"]]
    issue = [round(turns * loop / MULTIPROCESSORS / CLOCK * 1e6, 1) for loop in loops]
    merged = splits.merge_time(load, cut.number, cut.fan, constants("H100"))
    return {
        "what": row.what,
        "kernel": variant.expression,
        "splits": cut.number,
        "floor": {name: round(size / rate * 1e6, 1) for name, rate in COPIED.items()},
        "model": model,
        "merge": round(float(merged), 1),
        "issue": issue,
        "copies": round(copying(costs) * cost["loop_bytes"] / cost["loop"] * issue[1], 1)
        if row.latent and row.dtype == "bfloat16"
        else None,
        "products": round(2 * row.kv_heads * rows * row.tokens * (head_dim + width) / PRODUCTS * 1e6, 1),
        "l2": round(tiles * size / 1e6 * splits.shipped().l2_megabyte, 1),
        "read": None if row.read is None else dict(zip(COPIED, row.read, strict=True)),
    }


def copying(costs: dict[str, Any]) -> float:
    """Instructions of a warp for each byte that it copies: what two kernels differ in whose warps have the
    same work on a tile of latent keys, but for copying it, in which twice as many share."""
    few, many = (
        costs[f"attention_mma<bfloat16, bfloat16, 576, 512, Warps<{warps}, 1, 2>, 32, {stages}>"]
        for warps, stages in ((2, 2), (4, 3))
    )
    return float(few["loop"] - many["loop"]) / (few["loop_bytes"] - many["loop_bytes"])


def constants(gpu: str) -> splits.Constants:
    """Of the model on a GPU."""
    shipped = splits.shipped()
    return shipped._replace(megabyte=shipped.megabyte * COPIED["H100"] / COPIED[gpu])


def reduced(scheme: str, links: Links) -> float:
    """Microseconds of a step of `transport="peer"`, all ranks starting at once, until the last one ends.

    A fold has all sources under way before it waits for the first: one trip. Who waits for a number sees it
    in the look after the one that missed it, half of which has passed.
    """
    schedule = collectives.build(scheme, RANKS)
    proof, ranks = prove(schedule), range(RANKS)
    programs = [program.plan(schedule, proof, rank, RECORDS, node=tuple(ranks)) for rank in ranks]
    rounds = [dict(each.by_round()) for each in programs]
    now = [links.launch + links.steps + links.program + links.sources + links.windows] * RANKS
    announced: dict[tuple[int, int], float] = {}
    look = links.trip + links.reload
    for number in range(1, programs[0].rounds + 1):
        every = [(rank, i) for rank in ranks for i in rounds[rank].get(number, ())]
        for rank, i in every:  # what a rank of a round announces, it announces before it waits
            if isinstance(i, program.Publish):
                now[rank] += links.number
                announced[rank, number] = now[rank]
            elif isinstance(i, program.Copy) and i.into.buffer != program.OWN:
                now[rank] += links.copy
        for rank, i in every:
            if isinstance(i, program.Await):
                comes = max(announced[peer, number] for peer in i.ranks)
                now[rank] = max(now[rank], comes + look / 2) + look
            elif isinstance(i, program.Copy | program.Fold) and i.into.buffer == program.OWN:
                now[rank] += links.trip
    return round(max(now) + links.finish, 1)


def main() -> None:
    """Print the table, or write it."""
    options = harness.options(__doc__)
    costs = json.loads(COSTS.read_text())["90"]
    found: dict[str, Any] = {
        "source": "predicted, nothing of it measured",
        "rows": [predicted(row, costs) for row in ROWS],
        "reductions": [
            {
                "what": f"8 KB over {RANKS} GPUs, {scheme}",
                "model": {where: reduced(scheme, links) for where, links in LINKS.items()},
                "read": dict(zip(LINKS, read, strict=True)),
            }
            for scheme, read in REDUCTIONS.items()
        ],
    }
    shard = next(row for row in found["rows"] if row["what"] == "32/8 heads, 8k")
    reduction = found["reductions"][0]["model"]["parameters"]
    found["step"] = {
        "what": f"64k tokens over {RANKS} GPUs, 32/8 heads: 8k each, all_gather_merge",
        "model": {name: round(time + reduction, 1) for name, time in shard["model"].items()},
    }
    options.write(found)
    for row in (*found["rows"], *found["reductions"], found["step"]):
        print(row)


if __name__ == "__main__":
    main()

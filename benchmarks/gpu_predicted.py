"""What launches on a GPU should take, before any ran: python benchmarks/gpu_predicted.py [--json FILE]

For bfloat16, head_dim 128 and one sequence unless a row says otherwise, on an H100 and an H200. Beside one
another, in microseconds: `floor`, the cache at the GPU's copy rate; `model`, what chooses splits
(treeattn.backends.cuda.splits) with the constants that are shipped; `issue`, the main loop's instructions
(tests/compile_matrix/costs.json, sm_90) at all issue slots, an upper bound where it has branches for masks;
`l2`, tiles of rows that read the same tokens at 5.5 TB/s; and `read`, what a reading of the former kernels'
machine code expected. The first GPU decides which was right.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from treeattn.backends.cuda import splits, variants
from treeattn.files import output_writer

COSTS = Path(__file__).parents[1] / "tests" / "compile_matrix" / "costs.json"
MULTIPROCESSORS, SHARED, CLOCK, L2 = 132, 227 << 10, 1.755e9, 5.5e12
COPIED = {"H100": 3.0e12, "H200": 4.3e12}  # bytes a second, read and written


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
    Row("latent, 128 heads, 64k", 128, 1, 65536, ((120, 150), (110, 150)), latent=True),
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
    resident = min(65536 // (cost["registers"] * 128), (SHARED + 1024) // (cost["shared"] + 1024))
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
    )
    cut = splits.choose_splits(load)
    size = row.kv_heads * row.tokens * token_bytes
    turns = load.tiles * math.ceil(row.tokens / variant.step)
    return {
        "what": row.what,
        "kernel": variant.expression,
        "splits": cut.number,
        "floor": {name: round(size / rate * 1e6, 1) for name, rate in COPIED.items()},
        "model": round(float(splits.predict(load, cut.number, cut.fan, splits.shipped())), 1),
        "issue": round(turns * cost["loop"] / MULTIPROCESSORS / CLOCK * 1e6, 1),
        "l2": round(tiles * size / L2 * 1e6, 1),
        "read": None if row.read is None else dict(zip(COPIED, row.read, strict=True)),
    }


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write it here")
    options = parser.parse_args()
    costs = json.loads(COSTS.read_text())["90"]
    found: dict[str, Any] = {
        "source": "predicted, nothing of it measured",
        "rows": [predicted(row, costs) for row in ROWS],
    }
    output_writer(options.json)((json.dumps(found, indent=1) + "\n").encode())
    for row in found["rows"]:
        print(row)


if __name__ == "__main__":
    main()

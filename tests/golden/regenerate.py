"""Draw every scheme on 7 ranks of 3 nodes, and hash all on 1 to 33: ``python tests/golden/regenerate.py``.

The tests compare with these files; look at the difference before committing it.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
NODES = (3, 2, 2)


def drawings() -> dict[str, str]:
    """File name -> content, of every schedule in the catalogue."""
    from treeattn.collectives import build, needs_nodes
    from treeattn.collectives.catalog import CATALOG
    from treeattn.collectives.drawings import text as draw

    made = {}
    for name in [row.name for row in CATALOG.values() if row.generator]:
        schedule = build(name, 7, nodes=NODES) if needs_nodes(name) else build(name, 7)
        made[f"{name}.txt"] = draw.text(schedule, NODES)
        made[f"{name}.svg"] = draw.svg(schedule, NODES)
        made[f"{name}.goal"] = draw.goal(schedule, merge_nanoseconds=10)
    to_root = build("hierarchical", 7, nodes=NODES, result="root")
    made["hierarchical_root.txt"] = draw.text(to_root, NODES)
    made["hierarchical_root.svg"] = draw.svg(to_root, NODES)
    return made


def digests() -> str:
    """A line for each variant of each scheme: its name, and the digest of its schedules of every size."""
    from tests.unit.collectives.catalog_variants import VARIANTS, digest, label, served

    return "".join(f"{label(variant)} {digest(served(variant))}\n" for variant in VARIANTS)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parents[1]))
    (HERE / "schedules.sha256").write_text(digests())
    for old in [path for path in HERE.iterdir() if path.suffix in (".txt", ".svg", ".goal")]:
        old.unlink()
    for file_name, content in drawings().items():
        (HERE / file_name).write_text(content)
    print(f"wrote {len(list(HERE.iterdir())) - 1} files to {HERE}")

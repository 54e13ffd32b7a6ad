"""The complete binary tree: the children of rank i are 2 i + 1 and 2 i + 2.

`k_ary_tree` of radix 2 under its own name. On 5 ranks: round 1: 3->1, 4->1; round 2: 1->0, 2->0;
round 3: 0=>1, 0=>2; round 4: 1=>3, 1=>4.

Cost: about 4 log2(p) (alpha + n beta)

Source: as `k_ary_tree`.
"""

from __future__ import annotations

from dataclasses import replace

from treeattn.collectives.schedule import Schedule
from treeattn.collectives.schemes.k_ary_tree import k_ary_tree


def binary_tree(size: int) -> Schedule:
    """Complete binary tree, level by level to rank 0 and back."""
    return replace(k_ary_tree(size, radix=2), name="binary_tree")

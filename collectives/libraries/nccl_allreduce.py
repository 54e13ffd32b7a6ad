"""Partials folded by NCCL's own all-reduce, which knows maxima and sums but no operator of a user.

So this is another algorithm than the merge: `rescaled_sum`, in two calls or in the paper's three.
"""

from __future__ import annotations

from treeattn.collectives.libraries.rescaled_sum import over_nccl

plan = over_nccl

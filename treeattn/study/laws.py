"""The paper's laws: how memory, traffic and steps of a decoding step grow, to hold measurements against.

Shyam et al., "Tree Attention", arXiv 2408.04093v4, sections 5.1, 6.2 and 6.3. One query per sequence. The
paper's b, t, d, n_h and p are here `batch`, `tokens` of one rank's shard (t = N / p), heads * head_dim,
`heads` and `ranks`. As there, volumes and memory are numbers of tensor elements: multiply by the bytes
of one, which are 4 for our records, and 2 or 4 for a cache.

The paper has as many KV heads as query heads. Nothing here was measured. What a program sends or holds may
differ from its law; the unit tests show where our schedules do.
"""

from __future__ import annotations

from fractions import Fraction


def shard_elements(batch: int, tokens: int, heads: int, head_dim: int) -> int:
    """Elements of one rank's keys and values, 2 b t d: equation 11."""
    return 2 * batch * tokens * heads * head_dim


def ring_peak_memory(batch: int, tokens: int, heads: int, head_dim: int) -> int:
    """Elements that one rank of a ring of keys and values holds at most, 4 b t d + 2 b d: equation 8.

    Its own keys and values and its neighbour's, the query and the result.
    """
    shard = shard_elements(batch, tokens, heads, head_dim)
    return 2 * shard + 2 * batch * heads * head_dim


def tree_peak_memory(batch: int, tokens: int, heads: int, head_dim: int) -> int:
    """Elements that one rank of a tree reduction holds at most, 2 b t d + 2 b d + 2 b n_h: equation 9.

    Its own keys and values, the query, and a partial (numerator, denominator, maximum).
    """
    shard = shard_elements(batch, tokens, heads, head_dim)
    return shard + 2 * batch * heads * head_dim + 2 * batch * heads


def ring_volume(batch: int, tokens: int, heads: int, head_dim: int, hops: int) -> int:
    """Elements that one rank sends while the shards travel around a ring, 2 b t d for each hop: equation 10.

    The paper has p hops; p - 1 are enough to show every shard to every rank. It calls this the volume
    "between devices": of all ranks together it is p times as much.
    """
    return hops * shard_elements(batch, tokens, heads, head_dim)


def tree_volume(batch: int, heads: int, head_dim: int, ranks: int) -> Fraction:
    """Elements that each rank sends to reduce its partials, 2 (p - 1) / p (b d + 2 b n_h): equation 14.

    Numerator, denominator and maximum of a head (equation 13) are one record of head_dim + 2 elements of an
    allreduce, which sends 2 (p - 1) / p of its elements (equation 12) on average over the ranks: trees send
    as much, unevenly, and schedules of few rounds send more. The paper has three allreduces, which changes
    the number of messages, not the volume. A fraction, since it is exact.
    """
    return Fraction(2 * (ranks - 1) * batch * heads * (head_dim + 2), ranks)


def reduction_steps(tokens: int, ranks: int) -> int:
    """Merges one after the other that fold `tokens` values on `ranks` ranks: Theorem 1, O(N / p + log p).

    `tokens` of all ranks together, one of each at least. Each rank folds its own, ceil(N / p) - 1 merges,
    then the ranks' values meet in pairs, ceil(log2 p) merges. With as many ranks as tokens only the
    logarithm is left.
    """
    return -(-tokens // ranks) - 1 + (ranks - 1).bit_length()

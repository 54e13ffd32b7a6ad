"""Every rank sends one message a round, for ceil(log2 p) rounds: the fewest there are, whatever p is.

Each rank r keeps what it has gathered, of the k ranks after it, apart from what it brought itself. Who
receives what the rank k ahead has gathered knows of 2 k ranks; with what that rank's neighbour ahead holds
in all, its own included, of 2 k + 1. The binary digits of p - 1, from the first, say which: after ceil(log2
p) rounds every rank has gathered all p - 1 others, each once, where plain doubling (dissemination) would
count some twice.

Rank r merges in the order r, r + 1, .., around the ring: every rank in another order, so that bits differ
between ranks, at powers of two as well (class none). Differing bits mean differing sampled tokens: a decode
takes it with ``reproducible=`` alone, whose records have the same bits in any order. Two merges for each
arrival.

Messages: p ceil(log2 p) of n bytes.

Cost: ceil(log2 p) (alpha + n beta)

Source: Bar-Noy, Kipnis, Schieber, "An optimal algorithm for computing census functions in message-passing
systems", Parallel Processing Letters 3 (1993).
"""

from __future__ import annotations

from treeattn.collectives.schedule import Round, Schedule, Transfer


def census(size: int) -> Schedule:
    """One message a round from every rank, ceil(log2 p) rounds; runs with reproducible= alone."""
    rounds: list[Round] = []
    known = 0  # ranks after it of which each rank has gathered the records
    for digit in f"{size - 1:b}" if size > 1 else "":
        inclusive = digit == "1"
        ahead = known + inclusive
        rounds.append(
            tuple(Transfer((rank + ahead) % size, rank, inclusive=inclusive) for rank in range(size))
        )
        known += ahead
    return Schedule("census", size, 1, tuple(rounds))

"""The planned verb: everything that can be done once is done once."""

from __future__ import annotations

from treeattn.attention.arguments import CacheFormat, Rules, read_positions
from treeattn.attention.shape import Shape, check_latent
from treeattn.backends.device import find
from treeattn.collectives.runtime.communicator import Given
from treeattn.collectives.schedule import Schedule
from treeattn.decoder.mask_plan import DeclaredPositions
from treeattn.decoder.plan import LocalPlan
from treeattn.decoder.planned import PlannedDecode
from treeattn.decoder.reducers import selected
from treeattn.decoder.request import Reduction, Request, telling_arguments
from treeattn.errors import ArgumentError
from treeattn.mpi import communicators
from treeattn.mpi.communicators import Agreement


class Decoder(PlannedDecode):
    """A planned `decode`: everything that can be done once is done once. Creating it is collective.

    Shapes and types are fixed here; the shard's tokens may change with every call (a growing cache is passed
    as a longer array, or as the same array with larger `lengths`).

    Parameters
    ----------
    comm, scheme, scale, rules, reproducible
        As for `decode`.
    heads, kv_heads, head_dim, batch, queries : int
        The shape of q, and the KV heads, of which heads is a multiple.
    dtype : str
        Of q: "bfloat16", "float16", "float32", or on the CPU "float64".
    device : {"cpu", "cuda"}
        Where to compute; "cuda" is CuPy's current device.
    cache : CacheFormat, optional
        What is known of the cache: types and scales, pages, the width of values, positions.

    Attributes
    ----------
    plan : Plan
        What was decided; ``print(decoder.plan)`` says every stage, buffer and message, and why.
    schedule, certificate
        What was planned and proved; None where no schedule is run.
    transport, executor : str
        How records travel, and what runs the schedule; `fallback`: why nothing faster does.

    Raises
    ------
    ArgumentError, ScheduleError, RestrictionError, BackendError, TransportError
        The same on every rank.

    Notes
    -----
    `local`, `reduce` and `finish` are the three parts of a call, for those who overlap or time them. Where a
    ring computes while it communicates (`kv_ring`, `query_ring`), or a step goes by groups of heads, `local`
    only takes the arrays, and `reduce` does the work. `begin` returns while the reduction is under way, and
    `finish` then ends it.

    Examples
    --------
    >>> q, k = np.ones((1, 1, 4, 8), np.float32), np.zeros((1, 3, 2, 8), np.float32)
    >>> with treeattn.Decoder(heads=4, kv_heads=2, head_dim=8, dtype="float32") as decoder:
    ...     for tokens in 1, 2, 3:  # a cache that grows
    ...         out, lse = decoder(q, k, k, lengths=[tokens])
    >>> round(float(lse[0, 0, 0]), 4)  # ln 3
    1.0986
    """

    @telling_arguments
    def __init__(
        self,
        comm: Given = None,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        batch: int = 1,
        queries: int = 1,
        dtype: str = "bfloat16",
        scheme: str | Schedule | Reduction | None = None,
        scale: float | None = None,
        rules: Rules | None = None,
        device: str = "cpu",
        cache: CacheFormat | None = None,
        reproducible: str | None = None,
    ) -> None:
        comm, held = communicators.intracomm(comm), CacheFormat() if cache is None else cache
        with Agreement(comm, "Decoder") as agreed:  # whoever is at another call duplicates nothing
            if not isinstance(held, CacheFormat):
                raise ArgumentError(f"cache must be a treeattn.CacheFormat, not {cache!r:.60}")
            latent = held.v_dim is not None and held.v_dim <= head_dim
            if latent:
                check_latent(held.v_dim, head_dim, scale)
            stored = held.dtype, held.k_scale, held.v_scale, held.v_dim or 0, held.page_size
            shape = Shape(batch, queries, heads, kv_heads, head_dim, dtype, *stored)
            where, how = find(device, reproducible, comm.size), Reduction.of(scheme)
            asked = shape, how, selected(how, comm, where.name), scale, where, None
            declared = DeclaredPositions(read_positions(held.positions))
            request = Request(*asked, Rules.of(rules, heads), reproducible, declared)
            local = LocalPlan(agreed, request)
        super().__init__(local.complete(), latent=latent)

"""Tables 1 and 2 of the paper: Llama models, prefill and ten tokens, ring against tree.

Run here: a small model of drawn weights, whose times are those of any weights, prefill and decode apart; both
rows have the same prefill, as in the paper. The paper's settings are priced on simulated clusters.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treeattn.collectives.clusters import description
from treeattn.collectives.runtime.communicator import MpiCommunicator
from treeattn.errors import BackendError
from treeattn.llama.config import Config, Rope
from treeattn.llama.generate import generate
from treeattn.llama.model import Llama
from treeattn.llama.session import Session
from treeattn.llama.thread_limits import ThreadLimits
from treeattn.llama.weights import RandomWeights
from treeattn.study.decode_step import Shape, attention_cost, kv_ring_cost, reduction_cost
from treeattn.study.paper.experiment import MACHINE, Cell, Experiment, Table, first_ranks, placed

#: The paper's name of a machine -> its description.
MACHINES = {"8 H100": MACHINE, "4 MI300X": "mi300x", "2 RTX 4090": "dual-4090"}
PEAK_SHARE = 0.4  # of a GPU's arithmetic that a prefill reaches: assumed
DECODED = 9  # of ten tokens the first comes from the prefill
BYTES = 2


@dataclass(frozen=True, slots=True)
class Series:
    """One machine's rows: tokens -> seconds with the tree and with the ring, as the paper prints them.

    heads: of the query, which the published ring sends keys and values repeated for. parameters: of the
    model; peak: dense bfloat16 FLOP/s of a GPU on paper. link: what joins two of its GPUs, with GB/s each way
    and their source.
    """

    table: int
    machine: str
    model: str
    gpus: int
    layers: int
    heads: int
    head_dim: int
    parameters: float
    peak: float
    link: str
    tokens: tuple[int, ...]
    tree: tuple[float, ...]
    ring: tuple[float, ...]


LONG = (32_000, 64_000, 128_000, 256_000)
PUBLISHED = (
    Series(
        1, "8 H100", "Llama 3.1 8B", 8, 32, 32, 128, 8.03e9, 989e12,
        "NVLink 4: 371 to 377 in copies (NVIDIA/nccl#1264)",
        LONG, (0.60, 1.08, 2.68, 2.89), (2.57, 4.42, 6.38, 8.19),
    ),
    Series(
        1, "4 MI300X", "Llama 3.1 8B", 4, 32, 32, 128, 8.03e9, 1307e12,
        "one xGMI link: 48 in copies (AMD ROCm blog)",
        LONG, (1.05, 2.36, 6.43, 15.30), (3.57, 7.33, 16.40, 35.12),
    ),
    Series(
        2, "2 RTX 4090", "Llama 3.2 1B", 2, 16, 32, 64, 1.24e9, 165e12,
        "PCIe 4 x16: 26 on paper",
        (8_000, 16_000, 20_000, 32_000), (0.34, 0.58, 0.74, 1.01), (1.38, 2.77, 3.47, 5.45),
    ),
)  # fmt: skip


def implied(series: Series) -> tuple[float, float]:
    """(seconds, GB/s each way) that ring minus tree is: a constant, and, from the slope over the tokens, in
    each decoded token and layer p - 1 hops of a shard's keys and values, repeated for every query head."""
    late = [ring - tree for ring, tree in zip(series.ring, series.tree, strict=True)]
    slope, constant = statistics.linear_regression(series.tokens, late)
    per_token = 2 * series.heads * series.head_dim * BYTES / series.gpus
    return constant, DECODED * series.layers * (series.gpus - 1) * per_token / slope / 1e9


def model(series: Sequence[Series]) -> list[Table]:
    """The paper's tables, the bandwidth that they imply, and simulated steps."""
    headings = (
        "table", "machine", "model", "tokens", "tree, s: paper", "ring, s: paper",
        "ring / tree: paper",
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = [
        (one.table, one.machine, one.model, tokens, tree, ring, ring / tree)
        for one in series
        for tokens, tree, ring in zip(one.tokens, one.tree, one.ring, strict=True)
    ]
    found = ("GB/s each way: model, from the paper's times", "constant part, s: model", "the link, GB/s")
    links: list[tuple[Cell, ...]] = [(one.machine, *reversed(implied(one)), one.link) for one in series]
    return [
        Table("as the paper prints them", headings, rows),
        Table("ring minus tree as the time of one link", ("machine", *found), links),
        *simulated(series),
    ]


def simulated(series: Sequence[Series]) -> list[Table]:
    """Seconds by which the ring is later than the tree, of nine tokens in all layers, the ring with keys and
    values repeated for every query head, as published; and prefill and decode apart."""
    late: list[tuple[Cell, ...]] = []
    apart: list[tuple[Cell, ...]] = []
    for one in series:
        cluster = description.load(MACHINES[one.machine])
        schedule, places = placed(cluster, "hierarchical", one.gpus)
        assert cluster.memory is not None
        weights = DECODED * 2 * one.parameters / (1e9 * cluster.memory)  # every GPU reads all of them
        for tokens, tree, ring in zip(one.tokens, one.tree, one.ring, strict=True):
            shape = Shape(tokens, one.heads, one.heads, one.head_dim)
            attention = attention_cost(cluster, one.gpus, shape)
            steps = (
                (attention + reduction_cost(cluster, places, schedule, shape)).time,
                kv_ring_cost(cluster, places, shape).time,
            )
            by_tree, by_ring = (DECODED * one.layers * step / 1e6 for step in steps)
            late.append((one.machine, one.model, tokens, ring - tree, by_ring - by_tree))
            first = _prefill(one, tokens)
            decoded = (weights + by_tree, weights + by_ring)
            apart.append(
                (one.machine, tokens, first, *decoded, *(first + each for each in decoded), tree, ring)
            )
    headings = ("machine", "model", "tokens", "ring minus tree, s: paper", "ring minus tree, s: simulated")
    columns = (
        "machine", "tokens", "prefill, s: model", "nine tokens by tree, s: simulated",
        "nine tokens by ring, s: simulated", "all by tree, s", "all by ring, s", "all by tree, s: paper",
        "all by ring, s: paper",
    )  # fmt: skip
    return [
        Table("simulated: what the ring takes longer, prefill left out", headings, late),
        Table("simulated: prefill and decode apart", columns, apart),
    ]


def _prefill(one: Series, tokens: int) -> float:
    """Seconds of the arithmetic alone: every weight and every pair of tokens, dealt out evenly."""
    linear = 2 * one.parameters * tokens
    attention = 2 * one.layers * one.heads * one.head_dim * tokens**2  # QK and PV, half of the pairs
    return (linear + attention) / (one.gpus * PEAK_SHARE * one.peak)


SMALL = Config(
    hidden_size=256, intermediate_size=512, layers=2, heads=4, kv_heads=2, head_dim=64, vocab_size=512,
    rms_norm_eps=1e-5, max_position_embeddings=1 << 20, tied=True, attention_bias=False, mlp_bias=False,
    eos=(), rope=Rope("default", 10000.0),
)  # fmt: skip
SCHEMES = ("hierarchical", "kv_ring")


def measure(comm: MpiCommunicator, tokens: Sequence[int], repeats: int, ranks: int) -> list[Table]:
    """Prefill and nine more tokens of the small model, by tree and by ring in turn."""
    size = min(comm.size, ranks)
    if size == 1:
        return []
    rows: list[tuple[Cell, ...]] = []
    with first_ranks(comm, size) as part:
        if part is not None:
            cores, threads = _shared(part)
            llama = Llama(RandomWeights(SMALL))
            rows = [_row(part, llama, count, repeats) for count in tokens]
            if cores is not None:
                cores.restore()
    if comm.rank:
        return []
    title = (
        f"run here: {size} ranks, {SMALL.layers} layers of {SMALL.heads} heads ({SMALL.kv_heads} KV) x "
        f"{SMALL.head_dim}, drawn weights; means of {repeats} repeats, +- their standard error; {threads}"
    )
    headings = ("tokens", "prefill, s: here", "+- (standard error)", "nine tokens by tree, s: here",
                "+- (standard error) ", "nine tokens by ring, s: here", "+- (standard error)  ",
                "ring / tree: here")  # fmt: skip
    return [Table(title, headings, rows)]


def _shared(comm: MpiCommunicator) -> tuple[ThreadLimits | None, str]:
    """Give ranks their share of the cores; what came of it."""
    try:
        cores = ThreadLimits(comm)
    except BackendError as error:
        return None, str(error)
    threads = cores.blas_threads
    return cores, "as the environment says" if threads is None else f"BLAS threads of a rank: {threads}"


def _row(comm: MpiCommunicator, llama: Llama, tokens: int, repeats: int) -> tuple[Cell, ...]:
    """Of rank 0's times. Collective."""
    prompt = np.random.default_rng(tokens).integers(0, SMALL.vocab_size, tokens).tolist()
    first: list[float] = []
    later: dict[str, list[float]] = {scheme: [] for scheme in SCHEMES}
    for _ in range(repeats):
        for scheme in SCHEMES:
            with Session(comm, llama, prompt, capacity=tokens + DECODED + 1, scheme=scheme) as session:
                made = generate(session, DECODED + 1)
            first.append(made.first_token_s)
            later[scheme].append(sum(made.step_s))
    tree, ring = (later[scheme] for scheme in SCHEMES)
    ratio = statistics.mean(ring) / statistics.mean(tree)
    return (tokens, *_mean(first), *_mean(tree), *_mean(ring), ratio)


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """With its standard error, of values that are independent."""
    spread = statistics.stdev(values) if len(values) > 1 else float("nan")
    return statistics.mean(values), spread / len(values) ** 0.5


EXPERIMENT = Experiment(
    title="Llama models: prefill and ten tokens, ring against tree",
    where="tables 1 and 2",
    model=model,
    measure=measure,
    paper={"series": PUBLISHED},
    small={"tokens": (2048, 8192), "repeats": 10, "ranks": 4},
)

"""Faults to plant into the real kernels: what goes wrong where threads, blocks or ranks do not wait.

That each number is right is asked of the kernels themselves (test_attention.py, test_visible.py). These
faults may leave all numbers right on some machine, on some day: the emulator or a sanitizer has to see them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_SOURCES = {
    "fma": "partial_attention.cu",
    "mma": "attention_mma.cu",
    "cluster": "attention_cluster.cu",
    "rows": "attention_rows.cu",
    "merge": "merge_splits.cu",
    "pull": "pull_partials.cu",
}


class Fault(NamedTuple):
    """`old` occurs once in the kernel's text; `new` is wrong. kind: the work that shows it (work.py). file:
    what a sanitizer names, "": the kernel's own; sanitizer: which one sees it, "": the emulator alone."""

    kernel: str
    old: str
    new: str
    kind: str = "plain"
    file: str = ""
    sanitizer: str = "thread"

    @property
    def named(self) -> str:
        """The source that a report names."""
        return self.file or _SOURCES[self.kernel]


#: Barriers that are left out: kernel, what its comment says, kind and file.
_BARRIERS = {
    "no_barrier": ("fma", "the groups' states are there"),
    "no_query_barrier": ("fma", "q is there"),
    "no_arrival_barrier": ("fma", "all of the block's partials", "plain", "combine.cuh"),
    "no_verdict_barrier": ("fma", "the verdict", "plain", "combine.cuh"),
    "no_states_barrier": ("fma", "all states", "plain", "combine.cuh"),
    "no_weights_barrier": ("fma", "all weights", "plain", "combine.cuh"),
    "no_sums_barrier": ("fma", "all sums", "plain", "combine.cuh"),
    "no_pipeline_barrier": ("mma", "everyone's copies of this tile"),
    "stages_reused_early": ("mma", "the tiles are free"),
    "no_query_barrier_mma": ("mma", "q is there"),
    "no_views_barrier": ("mma", "the views are there", "tables", "tokens.cuh", "address"),
    "no_widened_barrier": ("mma", "the tile is widened", "cache"),
    "rows_merged_early": ("mma", "the sums of the rows before", "tall", "combine.cuh"),
    "no_tile_barrier_rows": ("rows", "queries and everyone's copies", "many"),
    "stages_reused_early_rows": ("rows", "queries and tiles are free", "many"),
    "rows_stored_early": ("rows", "all rows are there", "many"),
    "no_views_barrier_rows": ("rows", "the views are there", "many", "tokens.cuh", "address"),
    "no_tile_barrier": ("mma", "everyone's copies of this tile", "latent"),
    "no_query_barrier_latent": ("mma", "q is there", "latent"),
    "no_parts_barrier": ("mma", "all parts of the scores", "latent"),
    "columns_stored_early": ("mma", "the warps' partials are there", "latent"),
    "stages_reused_early_latent": ("mma", "the tiles are free", "latent"),
    "no_query_barrier_many": ("mma", "q is there", "many_latent"),
    "stored_early_cluster": ("cluster", "the warps' partials are there", "clusters", "attention.cuh"),
    "no_states_barrier_apart": ("merge", "all states", "apart", "combine.cuh"),
    "no_weights_barrier_apart": ("merge", "all weights", "apart", "combine.cuh"),
    "no_sums_barrier_apart": ("merge", "all sums", "apart", "combine.cuh"),
    "announced_early": ("pull", "the block's copies are made", "pull"),
    "finished_early": ("pull", "everyone has read the step, and", "pull", "finish.cuh"),
}

_NUMBER = "store_release(number_of(a, a.rank), step"
_LOOK = "load_acquire(number_of(a, rank))"
_MEET = "meet_cluster(); // "
_FREE = "  __syncthreads(); // the tiles are free"
_OWN = "if (threadIdx.x == RECORD_MAX) own"
FAULTS = {
    **{
        name: Fault(kernel, f"__syncthreads(); // {comment}", "//", *rest)
        for name, (kernel, comment, *rest) in _BARRIERS.items()
    },
    "no_fence": Fault(
        *("fma", "  __threadfence();\n  const unsigned before", "  const unsigned before"),
        file="combine.cuh",
    ),
    "short_wait": Fault("mma", "copy_async_wait<STAGES - 2>();", "copy_async_wait<STAGES - 1>();"),
    "short_wait_latent": Fault("mma", "wait<STAGES - 2>", "wait<STAGES - 1>", "latent"),
    "stage_filled_too_early": Fault("mma", "sources, stages.before(stage))", "sources, stage)", "latent"),
    "relaxed_number": Fault(
        "pull", _NUMBER, _NUMBER.replace("store_release", "emulator::store_relaxed"), "pull"
    ),
    "relaxed_look": Fault("pull", _LOOK, _LOOK.replace("load_acquire", "emulator::load_relaxed"), "pull"),
    "stale_number": Fault("pull", "wanted = step * a.numbers", "wanted = (step - 1) * a.numbers", "pull"),
    "one_set": Fault("pull", "step % 2 * a.set", "0 * a.set", "pull"),
    "push": Fault("pull", _OWN, f"const_cast<float *>(at(0))[RECORD_MAX] = own_maximum; {_OWN}", "pull"),
    # Ranks that do not wait as they should, which test_peer.py shows.
    "not_awaited": Fault("pull", "i.operation == AWAIT || i", "i", "pull", sanitizer=""),
    "step_not_counted": Fault("pull", "step + a.ends", "step + 0", "pull", sanitizer=""),
    "part_counted": Fault("pull", "step + a.ends", "step + 1", "pull", sanitizer=""),
    # Blocks of a cluster that do not wait for each other, do not come, or read another than they mean.
    **{
        name: Fault("cluster", old, new, "clusters", "cluster.cuh", sanitizer)
        for name, old, new, sanitizer in (
            ("not_begun", f"{_MEET}all blocks' partials", "//", ""),
            ("ended_early", f"{_MEET}nobody reads", "//", ""),
            ("half_comes", f"{_MEET}nobody reads", f"if (threadIdx.x < 128) {_MEET}", ""),
            ("empty_block_leaves", _FREE, f"  if (state.maximum[0] < -1e38f) return;\n{_FREE}", ""),
            ("another_cluster", "own.numerators + e, block)", "own.numerators + e, block + 1)", ""),
            ("one_block", "own.numerators + e, block)", "own.numerators + e, 0)", ""),
            ("relaxed_cluster", "emulator::meet_cluster();", "emulator::meet_cluster(false);", "thread"),
        )
    },
    # Of these the first writes, and the second reads, vectors where none can lie.
    "misaligned_scratch": Fault(
        "fma",
        "*numerators = from.numerators + first_part * PITCH + first_column + column;",
        "*numerators = reinterpret_cast<const Floats *>(&from.numerators[column].element[1]);",
        file="ptx.cuh",
        sanitizer="address",
    ),
    "query_always_by_vectors": Fault(
        "fma", "if (a.q_aligned) {", "if (true) {", file="attention.cuh", sanitizer="address"
    ),
}


def planted(fault: Fault) -> Callable[[str], str]:
    """The edit that plants a fault; texts of other kernels stay as they are."""

    def edit(text: str) -> str:
        if f"kernels/cuda/{_SOURCES[fault.kernel]}" not in text:
            return text
        assert text.count(fault.old) == 1, f"{fault.old!r} must occur once"
        return text.replace(fault.old, fault.new)

    return edit


def weakly_ordered(text: str) -> str:
    """The kernel that pulls, with what it stores for other devices delayed and reordered: weak_memory.h. All
    has landed at the end of a launch."""
    if "kernels/cuda/pull_partials.cu" not in text:
        return text
    copied, offset = "into[{0}] = held[c];", "first + c * (int)blockDim.x"
    for old, new in (
        (copied.format(offset), f"weak::store(into + {offset}, held[c]);"),
        ("emulator::store_release(at, value);", "weak::store_release(at, value);"),
        ("if (threadIdx.x == 0) a.steps[", "weak::fence_system();\n  if (threadIdx.x == 0) a.steps["),
    ):
        assert text.count(old) == 1, f"{old!r} must occur once"
        text = text.replace(old, new)
    return (Path(__file__).parent / "weak_memory.h").read_text(encoding="utf-8") + text


def faults_source() -> str:
    """The kernels of faults.cu, to follow a text that includes ptx.cuh."""
    text = (Path(__file__).parent / "faults.cu").read_text(encoding="utf-8")
    return f'#line 1 "faults.cu"\n{text}'

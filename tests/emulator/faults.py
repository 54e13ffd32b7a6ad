"""Faults to plant into the real kernels: a text that is there, what takes its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Fault(NamedTuple):
    """`old` occurs once in the kernel's text; `new` is wrong. kind: the work that shows it, as
    test_faults.py names it."""

    kernel: str
    old: str
    new: str
    kind: str = "plain"


_SOURCES = {
    "fma": "partial_attention.cu",
    "mma": "attention_mma.cu",
    "rows": "attention_rows.cu",
    "merge": "merge_splits.cu",
    "pull": "pull_partials.cu",
}

FAULTS = {
    "no_barrier": Fault("fma", "__syncthreads(); // the groups' states are there", ""),
    "no_pipeline_barrier": Fault("mma", "__syncthreads(); // everyone's copies of this tile", "// "),
    "short_wait": Fault("mma", "copy_async_wait<STAGES - 2>();", "copy_async_wait<STAGES - 1>();"),
    "relaxed_number": Fault(
        "pull",
        "store_release(number_of(a, a.rank), step",
        "emulator::store_relaxed(number_of(a, a.rank), step",
    ),
    "relaxed_look": Fault(
        "pull", "load_acquire(number_of(a, rank))", "emulator::load_relaxed(number_of(a, rank))"
    ),
    "announced_early": Fault("pull", "__syncthreads(); // the block's copies are made", ""),
    "one_set": Fault("pull", "step % 2 * a.set", "0 * a.set"),
    "not_awaited": Fault("pull", "i.operation == AWAIT || i", "i"),
    "stale_number": Fault(
        "pull", "wanted = step * a.numbers + round", "wanted = (step - 1) * a.numbers + round"
    ),
    "step_not_counted": Fault("pull", "step + a.ends", "step + 0"),
    "part_counted": Fault("pull", "step + a.ends", "step + 1"),
    "finished_early": Fault("pull", "__syncthreads(); // everyone has read the step, and", "//"),
    "push": Fault(
        "pull",
        "if (threadIdx.x == RECORD_MAX) own",
        "const_cast<float *>(at(0))[RECORD_MAX] = own_maximum; if (threadIdx.x == RECORD_MAX) own",
    ),
    "stages_reused_early": Fault("mma", "__syncthreads(); // the tiles are free", ""),
    "no_query_barrier": Fault("fma", "__syncthreads(); // q is there", ""),
    "no_query_barrier_mma": Fault("mma", "__syncthreads(); // q is there", ""),
    "query_always_by_vectors": Fault("fma", "if (a.q_aligned) {", "if (true) {"),
    "query_of_another_row": Fault(
        "fma", "load_query(a, w, ROWS, piece_row,", "load_query(a, w, ROWS, piece_row / 2,"
    ),
    # The merge of splits.
    "no_fence": Fault("fma", "  __threadfence();\n  const unsigned before", "  const unsigned before"),
    "no_arrival_barrier": Fault("fma", "__syncthreads(); // all of the block's partials", "// "),
    "no_verdict_barrier": Fault("fma", "__syncthreads(); // the verdict", "// "),
    "no_states_barrier": Fault("fma", "__syncthreads(); // all states", "// "),
    "no_weights_barrier": Fault("fma", "__syncthreads(); // all weights", "// "),
    "no_sums_barrier": Fault("fma", "__syncthreads(); // all sums", "// "),
    "one_too_few": Fault("fma", "== (unsigned)count - 1u", "== (unsigned)count - 2u"),
    "counter_left": Fault("fma", "if (last) *counter = 0u;", ""),
    "wrong_split": Fault(
        "fma", "(batch, numerators, reader, stride, end)", "(batch, numerators, reader + 1, stride, end)"
    ),
    "split_read_twice": Fault("mma", "first + BATCH * stride, stride, end)", "first, stride, end)", "parts"),
    "wrong_weight": Fault(
        "fma", "add_scaled(sum, weights[at], batch[u])", "add_scaled(sum, weights[row], batch[u])"
    ),
    "row_ended_late": Fault("fma", "row_end += from.count;", "row_end += from.count + 1;"),
    "groups_mixed": Fault("fma", "groups ? w.splits : g.first", "groups ? 0 : g.first"),
    "first_level_again": Fault("fma", "    from = to;", ""),
    "one_counter_for_all": Fault("fma", "counters + g.number;", "counters;"),
    "finished_at_another_head": Fault(
        "fma", "* a.heads + row.head) * HEAD_DIM", "* a.heads) * HEAD_DIM", "finished"
    ),
    "lse_of_another_row": Fault("fma", "a.lse[number] =", "a.lse[row.head] =", "finished"),
    "numerator_not_divided": Fault("mma", "quotient.of(value.element[i])", "value.element[i]", "finished"),
    # The main loop of the tensor-core kernel.
    "turn_into_another_stage": Fault(
        "mma", "rows_ahead, stages.before(stage), turn)", "rows_ahead, stage, turn)", "finished"
    ),
    "turn_left_out": Fault(
        "mma",
        "turn < (step + 1) * TURNS / STEPS;",
        "turn < (step + 1) * TURNS / STEPS - (step == 1);",
        "finished",
    ),
    "rows_do_not_move": Fault("mma", "rows[s] += ROWS * (s ? a.v : a.k).row_stride;", "", "finished"),
    "chain_forgotten": Fault("mma", "scores[e / 4][e % 4] += chain[e / 4][e % 4];", "{}", "finished"),
    "rescaled_for_one_row": Fault(
        "mma", "factor[0] != 1.0f || factor[1] != 1.0f", "factor[0] != 1.0f", "finished"
    ),
    "row_widened_again": Fault("mma", "(first + i / (SOURCES * LOADS)) * ROWS", "first * ROWS", "cache"),
    "drafts_asked_for_late": Fault(
        "mma", "min(at.end, at.start + TILE) > views", "at.start > views", "tables"
    ),
    # What queries see.
    "end_seen": Fault("fma", "token < bound[3])", "token <= bound[3])", "tables"),
    "begin_missed": Fault("fma", "token >= bound[2] &&", "token > bound[2] &&", "tables"),
    "second_interval_skipped": Fault("fma", "|| (token >= bound[2] &&", "&& (token >= bound[2] ||", "tables"),
    "mask_of_another_query": Fault("fma", "mask + query *", "mask + (query ^ 1) *", "tables"),
    "mask_of_another_word": Fault("fma", "view.mask[draft / 32]", "view.mask[0]", "tables"),
    "edge_not_looked_at": Fault(
        "fma",
        "place.start + STEP <= views.tile.whole_end",
        "place.start <= views.tile.whole_end",
        "tables",
    ),
    "hidden_multiplied": Fault("fma", "if (Tokens::CHOSEN && hidden", "if (false && hidden", "tables"),
    "span_begun_late": Fault(
        "fma", "at = {next.begin, next.end};", "at = {next.begin + 1, next.end};", "tables"
    ),
    "span_skipped": Fault(
        "fma",
        "a.mask.spans[++span];\n      at",
        "a.mask.spans[span += left > 1 ? 2 : 1];\n      at",
        "tables",
    ),
    "split_begins_late": Fault("fma", "first - found.first_step)", "first - found.first_step + 1)", "tables"),
    "span_of_another_split": Fault("fma", "first_step <= first", "first_step < first", "tables"),
    "view_of_another_tile": Fault("fma", "a.by_kv_heads) + w.tile]", "a.by_kv_heads)]", "tables"),
    "step_of_run_ignored": Fault("fma", "(token - found[0]) * found[2]", "token - found[0]", "tables"),
    "first_run_only": Fault("fma", "run + 1 < above", "false", "tables"),
    "draft_stands_in_run": Fault(
        "fma", "if (draft >= 0) return lookup", "if (false) return lookup", "tables"
    ),
    "no_views_barrier": Fault("mma", "__syncthreads(); // the views are there", "", "tables"),
    "drafts_read_unseen": Fault(
        "mma", "if (!any_sees(views, min", "if (false && !any_sees(views, min", "tables"
    ),
    "end_seen_mma": Fault("mma", "token < bound[3])", "token <= bound[3])", "tables"),
    "edge_not_looked_at_mma": Fault("mma", "if (see_all<STEP>(views, place)) return;", "return;", "tables"),
    "row_of_another_half": Fault("mma", "rows[e % 4 / 2]", "rows[0]", "tables"),
    "bias_of_another_half": Fault("mma", "views.rows[rows[half]]", "views.rows[rows[0]]", "tables"),
    # Caches of 8 bits, in pages.
    "scale_of_another_head": Fault("fma", "* a.k_scales[w.kv_head]", "* a.k_scales[0]", "cache"),
    "value_scale_of_another_head": Fault("fma", "* a.v_scales[w.kv_head]", "* a.v_scales[0]", "cache"),
    "unit_forgotten": Fault("fma", "UNIT<float8_e4m3fn> = 256.0f", "UNIT<float8_e4m3fn> = 128.0f", "cache"),
    "invalid_number_widened": Fault("fma", "if (!(invalid & 0x00800080u)) return;", "return;", "cache"),
    "bytes_exchanged": Fault(
        "fma", "to[i / 2 * 4 + i % 2 + 2] =", "to[i / 2 * 4 + (i + 1) % 2 + 2] =", "cache"
    ),
    "page_of_another_sequence": Fault("fma", "(long long)blockIdx.z * a.pages.count", "0", "cache"),
    "page_begun_late": Fault(
        "fma", "a.pages.size) * in.row_stride", "a.pages.size + 1) * in.row_stride", "cache"
    ),
    "pages_of_the_last_step": Fault(
        "fma",
        "find_pages<L::TOKENS>(a, pages, token + moved,",
        "find_pages<L::TOKENS>(a, pages, token,",
        "cache",
    ),
    "unused_page_read": Fault(
        "mma", "PAGED ? pages[i] >= 0", "PAGED ? (pages[i] = max(pages[i], 0)) >= 0", "cache"
    ),
    "copies_do_not_move": Fault("mma", "(at.start + first) * (s ?", "(first) * (s ?", "tables"),
    "no_widened_barrier": Fault("mma", "__syncthreads(); // the tile is widened", "", "cache"),
    "scale_of_another_head_mma": Fault("mma", "* a.k_scales[w.kv_head]", "* a.k_scales[0]", "cache"),
    "value_scale_of_another_head_mma": Fault("mma", "* a.v_scales[w.kv_head]", "* a.v_scales[0]", "cache"),
    # Many rows.
    "rows_of_another_warp": Fault(
        "mma", "first_row + lane / 4, first_row + lane / 4 + 8", "lane / 4, lane / 4 + 8", "tall"
    ),
    "query_of_another_warp": Fault("mma", "0, first_row + lane % 16)", "0, lane % 16)", "tall"),
    "rows_merged_early": Fault("mma", "__syncthreads(); // the sums of the rows before", "//", "tall"),
    "parts_of_another_row": Fault("mma", "first_part = first_row * from.count", "first_part = 0", "tall"),
    "row_stored_again": Fault("mma", "to, part, first_row + in_pass,", "to, part, in_pass,", "tall"),
    "rows_left_out": Fault("mma", "ROWS > 16 && row < w.tile_rows", "ROWS > 16 && row < 32", "tall"),
    # More than 64 rows: 32 of a warp.
    "no_tile_barrier_rows": Fault("rows", "__syncthreads(); // queries and everyone's copies", "//", "many"),
    "short_wait_rows": Fault("rows", "wait<STAGES - 2>", "wait<STAGES - 1>", "many"),
    "stage_filled_too_early_rows": Fault("rows", "sources, stages.before(stage))", "sources, stage)", "many"),
    "stages_reused_early_rows": Fault("rows", "__syncthreads(); // queries and tiles are free", "", "many"),
    "rows_stored_early": Fault("rows", "__syncthreads(); // all rows are there", "", "many"),
    "no_views_barrier_rows": Fault("rows", "__syncthreads(); // the views are there", "", "many"),
    "query_of_another_fragment": Fault("rows", "warp_queries + m * 16 * PADDED", "warp_queries", "many"),
    "scores_of_another_fragment": Fault(
        "rows", "first_row + m * 16 + lane / 4 + 8}", "first_row + lane / 4}", "many"
    ),
    "weights_of_another_fragment": Fault(
        "rows", "(weights[m], scores[m], eight)", "(weights[m], scores[0], eight)", "many"
    ),
    "row_of_another_fragment": Fault(
        "rows", "= first_row + m * 16 + lane / 4 + half * 8", "= first_row + lane / 4 + half * 8", "many"
    ),
    # Channels shared out among warps: latent attention.
    "no_tile_barrier": Fault("mma", "__syncthreads(); // everyone's copies of this tile", "// ", "latent"),
    "short_wait_latent": Fault("mma", "wait<STAGES - 2>", "wait<STAGES - 1>", "latent"),
    "no_query_barrier_latent": Fault("mma", "__syncthreads(); // q is there", "", "latent"),
    "stage_filled_too_early": Fault("mma", "sources, stages.before(stage))", "sources, stage)", "latent"),
    "no_parts_barrier": Fault("mma", "__syncthreads(); // all parts of the scores", "//", "latent"),
    "part_forgotten": Fault(
        "mma", "i < Shape::CHANNELS; ++i) add_scaled", "i < Shape::CHANNELS - 1; ++i) add_scaled", "latent"
    ),
    "columns_stored_early": Fault("mma", "__syncthreads(); // the warps' partials are there", "", "latent"),
    "stages_reused_early_latent": Fault("mma", "__syncthreads(); // the tiles are free", "", "latent"),
    # Many rows and channels, and the merge of their splits in a launch of its own.
    "no_query_barrier_many": Fault("mma", "__syncthreads(); // q is there", "", "many_latent"),
    "scores_of_another_row": Fault("mma", "parts + ((warp - channels) *", "parts + (0 *", "many_latent"),
    "merged_row_of_another_block": Fault("merge", "blockIdx.x / (HEAD_DIM / CHANNELS),", "0,", "apart"),
    "slice_merged_again": Fault("merge", "slice * R::COLUMNS,", "slice / 2 * R::COLUMNS,", "apart"),
    "last_split_forgotten": Fault(
        "merge", "w.splits = a.scratch.fan;", "w.splits = a.scratch.fan - 1;", "apart"
    ),
    "no_states_barrier_apart": Fault("merge", "__syncthreads(); // all states", "// ", "apart"),
    "no_weights_barrier_apart": Fault("merge", "__syncthreads(); // all weights", "// ", "apart"),
    "no_sums_barrier_apart": Fault("merge", "__syncthreads(); // all sums", "// ", "apart"),
    "misaligned_scratch": Fault(
        "fma",
        "*numerators = from.numerators + first_part * PITCH + first_column + column;",
        "*numerators = reinterpret_cast<const Floats *>(&from.numerators[column].element[1]);",
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

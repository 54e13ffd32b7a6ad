"""What attention on a GPU promises beyond the contract of every backend: on the emulator, and on hardware."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.emulator.cases import Case, Inputs, is_tensor_core_case
from tests.support.attention_contract import PLAIN, AttentionContract, bits, plain
from tests.support.drawn import sample
from tests.support.pages import in_pages
from treeattn.backends import cuda
from treeattn.errors import ArgumentError

#: Few rows of few KV heads over few tokens, of which some blocks have none.
CLUSTERED = [
    Case("bfloat16", 128, group=4, batch=2, tokens=900, lengths=(900, 0)),
    Case("float16", 64, group=16, kv_heads=1, batch=2, tokens=1500, lengths=(257, 1500)),
    Case("bfloat16", 80, group=3, queries=5, kv_heads=1, batch=2, tokens=700, layout="gaps"),
    Case("bfloat16", 96, group=7, kv_heads=1, batch=2, tokens=300, lengths=(1, 300), scores=1e4),
]
FINISHED = [
    CLUSTERED[0],
    Case("float32", 80, group=3, batch=2, lengths=(150, 0), splits=3),
    Case("bfloat16", 128, group=4, queries=5, tokens=100),
    Case("bfloat16", 64, group=4, batch=2, lengths=(0, 150), splits=2),
    Case("float32", 512, batch=2, lengths=(150, 0), splits=3),
]


class GpuContract(AttentionContract):
    """A subclass names the device."""

    backend = cuda
    gate, few = 4, 2

    def runtime(self, seed: int = 0) -> Any:
        """The device; seed: of the order of its threads, where it has one."""
        raise NotImplementedError

    def roomy(self, seed: int = 0) -> Any:
        """A device that has more multiprocessors than a few clusters need."""
        return self.runtime(seed)

    def need_clusters(self, runtime: Any) -> None:
        """Skip on a device without, or without room for as many as the cases have."""
        if not runtime.clusters or runtime.multiprocessors < 64 or runtime.shared_bytes < 227 << 10:
            pytest.skip("clusters need compute capability 9.0, and these 64 multiprocessors of 227 KiB")

    def options(self, case: Case, order: int) -> dict[str, Any]:
        plan = {"num_splits": case.splits, "tensor_cores": case.tensor_cores, "kv_dtype": case.kv}
        return {**plan, "runtime": (self.roomy if case in CLUSTERED else self.runtime)(order)}

    def rounds(self, case: Case) -> bool:
        return is_tensor_core_case(case) and self.runtime().tensor_cores

    @plain
    @pytest.mark.parametrize(("given", "meant"), [(-1, 0), (-(2**31), 0), (151, 150), (2**40 + 1, 150)])
    def test_lengths_are_clamped(self, plain: Case, given: int, meant: int) -> None:
        """The host cannot look at them without waiting."""
        q, k, v, _, _ = plain.inputs()
        found, wanted = (
            self.attend(plain, Inputs(q, k, v, np.full(plain.batch, length, np.int64), None))
            for length in (given, meant)
        )
        assert k.shape[1] == 150
        assert (bits(found) == bits(wanted)).all()

    @pytest.mark.parametrize(
        ("dtype", "kv", "offset"),
        sample(
            8,
            itertools.product(["float32", "float16", "bfloat16"], ["float32", "bfloat16"], [0, 1, 2, 4, 8]),
        ),
    )
    def test_rows_of_q_may_lie_anywhere(self, dtype: str, kv: str, offset: int) -> None:
        """Where rows are not aligned to 16 bytes they are loaded element by element: the same bits."""
        case = Case(kv, 64, group=4, queries=3, kv_heads=1, tokens=40, splits=2)
        _, k, v, _, _ = case.inputs()
        q = replace(case, dtype=dtype).inputs().q
        room = np.full((1, 3, 5, 64 + 9), np.nan, q.dtype)
        moved = room[:, :, 1:, offset : offset + 64]
        moved[...] = q
        wanted, found = (self.attend(case, Inputs(one, k, v, None, None)) for one in (q, moved))
        assert np.isfinite(wanted).all()
        assert (bits(found) == bits(wanted)).all()

    def test_a_query_of_another_type_than_the_cache_takes_the_multiply_add_kernel(self) -> None:
        case = PLAIN[1]
        q, k, v, _, _ = case.inputs()
        found = self.attend(case, Inputs(q.astype(np.float32), k, v, None, None))
        assert (bits(found) == bits(self.attend(replace(case, tensor_cores=False)))).all()

    @pytest.mark.parametrize("finished", FINISHED, ids=str)
    def test_attention_finishes_as_finish_does(self, finished: Case) -> None:
        """By whoever merges a record last: the bits of `finish`, of NaN and of nothing, too."""
        case, inputs = finished, finished.inputs()
        inputs.k[0 if case.lengths != (0, 150) else 1, 5, 0, 3] = np.nan
        planned, records = self.planned(case)
        out, lse = (
            self.put(np.full((case.batch, *rest), 77, np.float32))
            for rest in ((case.queries, case.heads, case.width), (case.heads, case.queries))
        )
        finish = cuda.planned_finish(records, out, lse, runtime=self.options(case, 0)["runtime"])
        planned(*self.arrays(case, inputs), finish=finish)
        for found, wanted in zip((out, lse), self.results(self.get(records)), strict=True):
            assert np.isnan(wanted).any()
            assert (bits(self.get(found)) == bits(wanted)).all()

    @pytest.mark.parametrize("clustered", CLUSTERED, ids=str)
    def test_splits_meet_in_clusters(self, clustered: Case) -> None:
        """In one launch, with the same bits each time, and of pages."""
        case, inputs = clustered, clustered.inputs()
        self.need_clusters(self.roomy())
        planned, records = self.planned(case)
        planned(*self.arrays(case, inputs))
        assert (planned.variant.clustered, len(planned.launches)) == (True, 1)
        case.check(*self.results(self.get(records)), self.rounds(case))
        lengths = np.full(case.batch, case.tokens) if inputs.lengths is None else inputs.lengths
        (k, table), (v, _) = (in_pages(one, 128, lengths) for one in inputs[1:3])
        paged = inputs._replace(k=k, v=v, lengths=lengths)
        for order, given, pages in ((1, inputs, None), (2, inputs, None), (0, paged, table)):
            found = self.attend(case, given, order, pages)
            assert (bits(found) == bits(self.get(records))).all()

    def test_a_captured_cluster_follows_any_length(self) -> None:
        """One that is read at launch: of nothing, within the first block's tokens, and of all."""
        case = replace(CLUSTERED[1], lengths=(1500, 1500))
        runtime = self.roomy()
        self.need_clusters(runtime)
        planned, records = self.planned(case, runtime=runtime)
        q, k, v, lengths = self.arrays(case, case.inputs())
        planned(q, k, v, lengths)
        launch = runtime.capture(lambda: planned(q, k, v, lengths))
        for given in ((0, 1), (127, 128), (1024, 1025), (1500, 640)):
            self.write(lengths, np.array(given))
            launch()
            found = self.results(self.get(records))
            replace(case, lengths=given).check(*found, self.rounds(case))

    def test_a_plan_forgets_arrays_when_others_are_refused(self) -> None:
        planned, records = self.planned(PLAIN[0])
        q, k, v, _ = self.arrays(PLAIN[0], PLAIN[0].inputs())
        lengths = self.put(np.full(PLAIN[0].batch, 7))
        planned(q, k, v, lengths)
        first = self.get(records).copy()
        for refused in ((q, k[:, :3], v[:, :3]), (q, k, v)):
            with pytest.raises(ArgumentError, match="lengths are int32"):
                planned(*refused, self.put(np.zeros(PLAIN[0].batch, np.int32)))
            planned(q, k, v, lengths)
            assert (bits(self.get(records)) == bits(first)).all()

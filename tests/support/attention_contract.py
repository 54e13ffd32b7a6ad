"""What attention of every backend promises: a subclass for each backend runs the same cases."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.emulator.cases import CASES, Case, Inputs
from tests.support.drawn import FACTOR, sample
from tests.support.pages import in_pages
from tests.support.problems import assert_exact
from tests.support.records_contract import bits
from treeattn.attention.arguments import Rules
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.positions import Runs
from treeattn.errors import ArgumentError

Array = np.ndarray[Any, Any]
#: By multiply-add, and for tensor cores where a backend has them.
PLAIN = (Case("float32", 64, group=2, batch=2, splits=4), Case("bfloat16", 64, group=4, splits=2))
plain = pytest.mark.parametrize("plain", PLAIN, ids=str)
RULES = Rules(causal=True, window=(300, None), leading=5, softcap=9.0, alibi=(0.01, 0.3, -0.01, 0.0))


def zeros(*shape: int, dtype: Any = np.float32) -> Array:
    return np.zeros(shape, dtype)


class AttentionContract:
    """A subclass names the backend, what its plans are given, and how many of the cases a gate runs."""

    backend: Any
    cases: Any = CASES
    head_dims: tuple[int, ...] = (64, 80, 128)
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    #: Drawn cases, those of them that the gate runs, and those of these that are changed in many ways.
    drawn, gate, few = 40 * FACTOR, 40, 8
    widened: tuple[str, ...] = ("float8_e4m3fn", "float8_e5m2")

    def options(self, case: Case, order: int) -> dict[str, Any]:
        """Of a plan. Another order, of threads or blocks, may change no bit."""
        raise NotImplementedError

    def rounds(self, case: Case) -> bool:
        """Whether probabilities are held in 16 bits."""
        return False

    def put(self, array: Array | None) -> Any:
        """Where the backend reads arrays."""
        return array

    def get(self, array: Any) -> Array:
        """As an array of NumPy."""
        return np.asarray(array)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        made = (Case.draw(seed, self.head_dims, self.dtypes) for seed in range(self.drawn))
        for name, cases in (("case", self.cases), ("drawn", sample(self.gate, made))):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, cases, ids=str)
        if "few" in metafunc.fixturenames:
            made = (Case.draw(seed, self.head_dims, self.dtypes) for seed in range(1000, 1016))
            metafunc.parametrize("few", sample(self.few, made), ids=str)
        if "widened" in metafunc.fixturenames:
            metafunc.parametrize("widened", self.widened)

    def arrays(self, case: Case, inputs: Inputs) -> list[Any]:
        """q, k, v and lengths where the backend reads them; values of a latent cache within the keys."""
        q, k, v, lengths = map(self.put, inputs[:4])
        return [q, k, k[..., : case.v_dim] if case.v_dim else v, lengths]

    def planned(self, case: Case, tables: MaskTables | None = None, order: int = 0, **plan: Any) -> Any:
        """A plan, and the records that it writes."""
        kind = np.float64 if case.dtype == "float64" else np.float32
        records = self.put(np.full((case.batch, case.heads, case.queries, case.width + 2), 77, kind))
        plan = {"scale": case.scale, "tables": tables, **case.scales, **self.options(case, order), **plan}
        return self.backend.PlannedAttention(records, **plan), records

    def attend(
        self, case: Case, inputs: Inputs | None = None, order: int = 0, table: Any = None, **plan: Any
    ) -> Array:
        """The records of one call."""
        inputs = inputs or case.inputs()
        planned, records = self.planned(case, inputs.visible, order, **plan)
        planned(*self.arrays(case, inputs), self.put(table))
        return self.get(records).copy()

    def results(self, records: Array) -> tuple[Array, Array]:
        """out and lse of records."""
        batch, heads, queries, width = records.shape
        shapes = (batch, queries, heads, width - 2), (batch, heads, queries)
        out, lse = (self.put(np.full(shape, 77, records.dtype)) for shape in shapes)
        place = {name: one for name, one in self.options(PLAIN[0], 0).items() if name == "runtime"}
        self.backend.planned_finish(self.put(records), out, lse, **place)()
        return self.get(out), self.get(lse)

    def check(self, case: Case) -> None:
        case.check(*self.results(self.attend(case)), self.rounds(case))

    def test_cases_are_exact(self, case: Case) -> None:
        self.check(case)

    def test_drawn_cases_are_exact(self, drawn: Case) -> None:
        """NaN stands in every token that no query sees."""
        self.check(drawn)

    def test_order_layout_and_what_nobody_sees_change_no_bit(self, few: Case) -> None:
        wanted = bits(self.attend(few))
        for order in (1, 2):
            assert (bits(self.attend(few, order=order)) == wanted).all()
        for layout in {"tokens", "heads", "gaps"} - {few.layout}:
            assert (bits(self.attend(replace(few, layout=layout))) == wanted).all()
        hidden = ~few.seen().any(axis=1)
        for value in (0, np.inf):
            inputs = few.inputs()
            inputs.k[hidden], inputs.v[hidden] = value, -value
            assert (bits(self.attend(few, inputs)) == wanted).all()

    def test_pages_have_the_bits_of_a_cache_in_a_row(self, few: Case) -> None:
        """Whatever lies in the other places: bits that are NaN in every type."""
        inputs = few.inputs()
        lengths = np.full(few.batch, few.tokens) if inputs.lengths is None else inputs.lengths
        wanted = bits(self.attend(few, inputs._replace(lengths=lengths)))
        for page_size in (1, 7, 64):
            (k, table), (v, _) = (in_pages(one, page_size, lengths) for one in inputs[1:3])
            v = k[..., : few.v_dim] if few.v_dim else v
            paged = inputs._replace(k=k, v=v, lengths=lengths)
            assert (bits(self.attend(few, paged, table=table)) == wanted).all()

    def test_a_sequence_does_not_depend_on_its_batch(self, few: Case) -> None:
        q, k, v, lengths, _ = replace(few, drafts=0, lengths=(few.tokens,) * few.batch).inputs()
        whole = self.attend(few, Inputs(q, k, v, lengths, None))
        for b in range(few.batch):
            row, one = slice(b, b + 1), replace(few, batch=1)
            alone = self.attend(one, Inputs(q[row], k[row], v[row], lengths[row], None))
            assert (bits(alone) == bits(whole[row])).all()

    @plain
    def test_nan_stays_in_its_head(self, plain: Case) -> None:
        """Of a query in its row, of a key in the rows that share it, of a value in its element."""
        clean = self.results(self.attend(plain))
        for name, at, rows, columns in (
            ("q", (0, 0, 1, 5), slice(1, 2), slice(None)),
            ("k", (0, 100, 1, 5), slice(plain.group, None), slice(None)),
            ("v", (0, 100, 1, 7), slice(plain.group, None), slice(7, 8)),
        ):
            inputs = plain.inputs()
            getattr(inputs, name)[at] = np.nan
            out, lse = (array.copy() for array in self.results(self.attend(plain, inputs)))
            assert np.isnan(out[0, :, rows, columns]).all()
            assert np.isnan(lse[0, rows]).all() == (name != "v")
            out[0, :, rows, columns], lse[0, rows] = clean[0][0, :, rows, columns], clean[1][0, rows]
            # The C kernels multiply pairs of bfloat16 where all of q lets them.
            near = 2e-7 if name == "q" else 0
            np.testing.assert_allclose(out, clean[0], rtol=0, atol=near)
            np.testing.assert_allclose(lse, clean[1], rtol=0, atol=near)

    @plain
    def test_infinite_scores_and_values(self, plain: Case) -> None:
        q, k, v, _, _ = plain.inputs()
        q[..., 0] = np.abs(q[..., 0]) + q.dtype.type(1)
        k[:, 10:, 0, 0] = -np.inf  # only ten tokens are left to the first KV head, and none to the second
        k[:, :, 1, 0] = -np.inf
        out, lse = self.results(self.attend(plain, Inputs(q, k, v, None, None)))
        g = plain.group
        first = q[:, :, :g], k[:, :10, :1], v[:, :10, :1]
        assert_exact((out[:, :, :g], lse[:, :g]), *first, scale=plain.scale, rounded=self.rounds(plain))
        assert (lse[:, g:] == -np.inf).all()
        assert (out[:, :, g:] == 0).all()
        k[...], v[0, 4, 1, 2] = abs(plain.inputs().k), np.inf
        k[0, 3, 0, 0] = np.inf  # inf - inf in the softmax
        out, lse = self.results(self.attend(plain, Inputs(q, k, v, None, None)))
        assert np.isnan(out[0, :, :g]).all()
        assert np.isnan(lse[0, :g]).all()
        assert (out[0, :, g:, 2] == np.inf).all()
        assert np.isfinite(np.delete(out[0, :, g:], 2, axis=-1)).all()

    def test_a_row_whose_mask_hides_everything_is_the_identity(self) -> None:
        for dtype in ("float32", "bfloat16"):
            case = Case(dtype, 64, queries=4, kv_heads=1, tokens=20, drafts=20, splits=2)
            inputs = case.inputs()
            assert inputs.visible is not None
            inputs.visible.mask[0, 2] = 0
            records = self.attend(case, inputs)
            assert records[0, 0, 2, 0] == -np.inf
            assert (records[0, 0, 2, 1:] == 0).all()
            assert np.isfinite(records[0, 0, [0, 1, 3]]).all()

    def test_every_number_is_widened(self, widened: str) -> None:
        """One token has the weight 1, its values come out as they are; a key times 1 is the score."""
        narrow = np.dtype(widened).itemsize == 1
        codes = np.arange(256 if narrow else 1 << 16, dtype=f"u{np.dtype(widened).itemsize}").view(widened)
        v = codes.reshape(-1, 1, 1, 64)
        for dtype in ("float32", "float16"):
            given = {"dtype": dtype, "head_dim": 64, "group": 4, "kv_heads": 1, "tokens": 1, "splits": 1}
            case = Case(batch=len(v), kv=widened if narrow else None, **given)
            q = zeros(len(v), 1, 4, 64, dtype=dtype if narrow else widened)
            out, _ = self.results(self.attend(case, Inputs(q, np.zeros_like(v), v, None, None)))
            factor = case.scales["v_scale"][0] if narrow else np.float32(1)
            with np.errstate(invalid="ignore"):  # NaN that signals
                wanted = np.broadcast_to(factor * v.astype(np.float32), out.shape)
            np.testing.assert_array_equal(out, wanted)
            if narrow:
                case, q = replace(case, batch=256), zeros(256, 1, 4, 64, dtype=dtype)
                k, at = (
                    zeros(256, 1, 1, 64, dtype=widened),
                    (np.arange(256), 0, slice(None), np.arange(256) % 64),
                )
                q[at], k[at] = 1, codes[:, None]
                _, lse = self.results(
                    self.attend(case, Inputs(q, k, np.zeros_like(k), None, None), scale=1.0)
                )
                scores = case.scales["k_scale"][0] * codes.astype(np.float32)
                wanted = np.where(np.isposinf(scores), np.nan, scores)  # inf - inf in the softmax
                np.testing.assert_array_equal(lse[:, 3, 0], wanted)

    @plain
    def test_types_by_their_bits_and_queries_of_another_type(self, plain: Case) -> None:
        q, k, v, _, _ = replace(plain, dtype="bfloat16").inputs()
        wide = replace(plain, tensor_cores=False)
        wanted = self.attend(wide, Inputs(q, k, v, None, None))
        raw = Inputs(*(x.view(np.uint16) for x in (q, k, v)), None, None)
        assert (bits(self.attend(wide, raw)) == bits(wanted)).all()
        results = self.results(self.attend(plain, Inputs(q.astype(np.float32), k, v, None, None)))
        assert_exact(results, q, k, v, scale=plain.scale)

    def test_bits_of_8_are_what_they_are_said_to_be(self) -> None:
        for kind in ("float8_e4m3fn", "float8_e5m2"):
            case = Case("float16", 64, group=2, kv=kind, splits=2)
            inputs = case.inputs()
            raw = inputs._replace(k=inputs.k.view(np.uint8), v=inputs.v.view(np.uint8))
            assert (bits(self.attend(case, raw, kv_dtype=kind)) == bits(self.attend(case, inputs))).all()

    @plain
    def test_a_plan_follows_its_arrays_and_lengths(self, plain: Case) -> None:
        """Longer and shorter ones, and lengths that were written in place meanwhile."""
        q, k, v, _, _ = plain.inputs()
        lengths = np.zeros(plain.batch, np.int64)
        planned, records = self.planned(plain)
        held = self.arrays(plain, Inputs(q, k, v, lengths, None))
        for tokens in (150, 7, 149, 150):
            for length in {0, 3, 64, 150, tokens}:
                lengths[:] = min(length, tokens)
                self.write(held[3], lengths)
                planned(held[0], held[1][:, :tokens], held[2][:, :tokens], held[3])
                wanted = self.attend(plain, Inputs(q, k[:, :tokens], v[:, :tokens], lengths, None))
                assert (bits(self.get(records)) == bits(wanted)).all()

    def write(self, into: Any, values: Array) -> None:
        """Into an array that is where `put` put it."""
        into[...] = values

    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    def test_a_plan_follows_its_tables(self, dtype: str) -> None:
        """Other runs, lengths and positions, and a mask of other drafts, each time."""
        case = Case(dtype, 64, group=4, kv_heads=1, queries=5, batch=2, tokens=400, splits=3)
        q, k, v, _, _ = case.inputs()
        kept = MaskTables(RULES, 2, 5)
        planned, records = self.planned(case, kept)
        held = self.arrays(case, Inputs(q, k, v, None, None))
        for number in range(5):
            fresh = MaskTables(RULES, 2, 5)
            for tables in (kept, fresh):
                self.look(tables, number)
            planned(*held[:3])
            wanted = self.attend(case, Inputs(q, k, v, None, fresh))
            assert (bits(self.get(records)) == bits(wanted)).all()

    def look(self, tables: MaskTables, number: int) -> None:
        """The tables of step `number`, over 400 tokens of two sequences and for five queries."""
        rng = np.random.default_rng(number)
        drafts = int(rng.integers(1, 90))
        runs = Runs([(0, 2, 50 * (number + 1)), (4000, 1, 400 - 50 * (number + 1))])
        tables.update(
            *(runs, 400, rng.integers(drafts, 401, 2), rng.integers(3900, 5000, (2, 5))),
            mask=rng.random((2, 5, drafts)) < 0.5,
            draft_positions=rng.integers(4000, 5000, (2, drafts)),
        )

    def test_a_plan_follows_its_block_table(self) -> None:
        """Written in place, as a serving engine does it; another one; a longer one; none."""
        case = Case("float32", 64, group=2, batch=2, tokens=48, splits=2)
        rng = np.random.default_rng(0)
        q, k, v = (rng.standard_normal(n).astype(np.float32) for n in ((2, 1, 4, 64), *((9, 16, 2, 64),) * 2))
        planned, records = self.planned(case)
        *arrays, lengths = self.arrays(case, Inputs(q, k, v, np.array([20, 32]), None))
        table = np.array([[3, 0], [5, 1]], np.int32)
        held = self.put(table)

        def step(held: Any, table: Array | None) -> None:
            planned(*arrays, lengths, held)
            one = Inputs(q, k, v, np.array([20, 32]), None)
            assert (bits(self.get(records)) == bits(self.attend(case, one, table=table))).all()

        step(held, table)
        table[0, 1] = 7
        self.write(held, table)
        step(held, table)
        longer = np.array([[3, 0, 8], [5, 1, -1]], np.int32)
        step(self.put(longer), longer)
        step(held, table)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"k": zeros(1, 9, 2, 128)[..., ::2]}, "last axis of k must be contiguous"),
            ({"q": zeros(1, 1, 2, 64, dtype=np.int8)}, "q (is )?int8"),
            ({"records": zeros(1, 2, 1, 132)[..., ::2]}, "C-contiguous"),
            ({"records": zeros(2, 1, 66)}, r"head_dim \+ 2\] is needed"),
            ({"records": zeros(1, 2, 1, 66, dtype=np.float16)}, "float32"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(ArgumentError, match=message):
            self.refused(**change)

    def refused(self, **change: Any) -> None:
        """Attention over nine tokens, but for what is changed."""
        given = {"q": zeros(1, 1, 2, 64), "k": zeros(1, 9, 2, 64), "v": zeros(1, 9, 2, 64), **change}
        records = self.put(given.pop("records", zeros(1, 2, 1, 66)))
        arrays = [self.put(given.pop(name)) for name in "qkv"]
        called = [given.pop(name, None) for name in ("lengths", "block_table")]
        place = {name: one for name, one in self.options(PLAIN[0], 0).items() if name == "runtime"}
        self.backend.PlannedAttention(records, **{"scale": 1.0, **place, **given})(*arrays, *called)

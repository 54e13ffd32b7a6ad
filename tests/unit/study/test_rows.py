"""The file of results: every reader finds the same table in it, and a run that was cut off goes on."""

import json
from contextlib import closing
from pathlib import Path

import made_results
import pandas
import pytest
from msgspec import structs

from treeattn.errors import ArgumentError
from treeattn.study.compare.rows import SUM, Key, Row, Writer, read

SAMPLE = Path(__file__).resolve().parents[2] / "data" / "compare.jsonl"


@pytest.fixture
def path(tmp_path):
    return made_results.write(tmp_path / "r.jsonl", made_results.keys(tokens=[0, 64]), 2)


def test_pandas_reads_a_table_with_every_column(path):
    frame = pandas.read_json(path, lines=True)
    assert list(frame.columns) == list(Row.__struct_fields__)
    assert len(frame) == len(read(path)) == 16
    assert (frame["bytes"] == 16 * 130 * 4).all()


def test_what_was_written_is_read_again(path, tmp_path):
    rows = read(path)
    with closing(Writer(tmp_path / "again.jsonl")) as writer:
        for row in rows:
            writer.append(row)
    assert read(tmp_path / "again.jsonl") == rows == read(path, path)  # each block once


def test_a_last_line_that_was_cut_off_is_left_out_and_taken_away(path):
    whole, rows = path.read_bytes(), read(path)
    path.write_bytes(whole + b'{"what":"reduce","sch')
    assert read(path) == rows
    with closing(Writer(path)) as writer:
        assert writer.held == rows
        assert path.read_bytes() == whole
        writer.append(structs.replace(rows[0], repetition=9))
    assert len(read(path)) == len(pandas.read_json(path, lines=True)) == len(rows) + 1


@pytest.mark.parametrize("line", [b"no JSON", b"{}", b'{"what": 3}', b"[" * 10_000, b""])
def test_a_line_of_something_else_is_named_and_nothing_is_touched(path, line):
    held = path.read_bytes() + line + b"\n"
    path.write_bytes(held)
    for reader in (read, Writer):
        with pytest.raises(ArgumentError, match=r"r\.jsonl:17: not a row of treeattn compare"):
            reader(path)
    assert path.read_bytes() == held


def test_places_that_cannot_be(tmp_path):
    with pytest.raises(ArgumentError, match="cannot be read"):
        read(tmp_path / "none")
    with pytest.raises(ArgumentError, match="cannot be written"):
        Writer(tmp_path / "no folder" / "r")


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [({}, None), ({"same_bits": False}, "different bits"), ({"as_scheduled": False}, "other messages"),
     ({"error_out": 1e-3}, "above the bound"), ({"error_lse": None}, "above the bound")],
)  # fmt: skip
def test_what_is_wrong_with_a_result(changed, wrong):
    (key,) = made_results.keys(["chain"], [0])
    found = made_results.row(key, **changed).wrong
    assert found is None if wrong is None else wrong in found


def test_not_a_number_is_wrong_also_in_a_file(tmp_path):
    path = made_results.write(tmp_path / "r", made_results.keys(["chain"], [0]), 1, error_out=float("nan"))
    assert json.loads(path.read_bytes())["error_out"] is None
    (row,) = read(path)
    assert row.wrong == "the error is above the bound"


def test_the_sample_of_a_real_run():
    rows = read(SAMPLE)
    assert {row.what for row in rows} == {"reduce", "decode"}
    assert {SUM, "binary_tree"} <= {row.scheme for row in rows}
    assert not any(row.wrong for row in rows)
    for row in rows:
        if row.what == "reduce":
            assert row.algbw == pytest.approx(row.bytes / row.time_us / 1e3, abs=1e-6)
            assert row.busbw == pytest.approx(row.algbw * 1.5, abs=2e-6)  # 2 (p - 1) / p of 4 ranks
        else:
            assert row.algbw is None


def test_a_case_holds_every_transport():
    keys = [made_results.keys(["ring"], [64], device="cuda", transport=t)[0] for t in ("host", "nccl")]
    assert len({key.case for key in keys}) == 1
    assert [key.label for key in keys] == ["ring [host]", "ring [nccl]"]
    assert structs.replace(keys[0], device="cpu", transport="mpi").label == "ring"
    assert structs.replace(keys[1], scheme=SUM).label == "ncclAllReduce(sum)"
    assert isinstance(made_results.row(keys[0]).key, Key)
    assert made_results.row(keys[0]).key == keys[0]

"""Settings of the kernels that were measured: kept for a processor, compiled in, and refused when damaged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from treeattn import partial
from treeattn.backends import cpu
from treeattn.backends.cpu import compile, tuned
from treeattn.errors import BackendError
from treeattn.study.roofline import tune as tuning

pytestmark = pytest.mark.skipif(cpu.compiled_kernels_problem() is not None, reason="no C compiler")

ISA = compile.available_isas()[0]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TREEATTN_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("isa", compile.available_isas())
def test_the_defaults_of_the_sources_are_among_what_is_tried(isa):
    default = compile.default_settings(isa)
    assert default.keys() == tuned.SETTINGS.keys()
    for name, numbers in default.items():
        assert len(numbers) == len(tuned.TYPES)
        assert set(numbers) <= set(tuned.SETTINGS[name])


def test_what_is_kept_is_compiled_in_until_the_defaults_are_again(cache, monkeypatch):
    monkeypatch.setattr(compile, "_compile", lambda command, *_: commands.append(command))
    commands = []
    default = compile.default_settings(ISA)
    chosen = default | {"VALUES_AHEAD": [0, 512, 2048, 8192, 0]}
    assert compile.chosen_settings(ISA) == {}
    plain = compile.library_path(ISA)
    kept = compile.write_settings(ISA, chosen)
    assert (kept.parent, compile.chosen_settings(ISA)) == (cache, chosen)
    assert compile.library_path(ISA) != plain
    assert "-DVALUES_AHEAD=0,512,2048,8192,0" in commands[1]
    assert not [word for word in commands[0] if word.startswith("-D")]
    compile.write_settings(ISA, default)
    assert (compile.chosen_settings(ISA), kept.exists()) == ({}, False)
    assert compile.library_path(ISA) == plain


RIGHT = {"BLOCK_TOKENS": [128] * 5, "VALUES_AHEAD": [0] * 5}


@pytest.mark.parametrize(
    "wrong",
    [
        b"{", b"[" * 100_000, b"\xff", b"[]", b"{}",
        json.dumps(RIGHT | {"more": [1]}).encode(),
        json.dumps(RIGHT | {"VALUES_AHEAD": [0] * 4}).encode(),
        json.dumps(RIGHT | {"VALUES_AHEAD": 0}).encode(),
        json.dumps(RIGHT | {"BLOCK_TOKENS": [128] * 4 + [100]}).encode(),
        json.dumps(RIGHT | {"BLOCK_TOKENS": [128] * 4 + [128.0]}).encode(),
    ],
)  # fmt: skip
def test_a_damaged_choice_is_named(cache, wrong):
    kept = compile.write_settings(ISA, RIGHT)
    assert compile.chosen_settings(ISA) == RIGHT
    kept.write_bytes(wrong)
    with pytest.raises(BackendError, match=rf"{kept}: .*delete it, or run"):
        compile.library_path(ISA)


def test_a_setting_is_kept_where_it_is_faster_by_two_percent(cache, monkeypatch):
    """By type; one setting is measured with what was chosen of the other."""
    monkeypatch.setattr(compile, "default_settings", lambda isa: RIGHT)
    times = {"float32": {128: 1.0, 256: 0.97, 512: 0.99}, "bfloat16": {128: 1.0, 256: 0.99, 512: 0.985}}
    seen = []

    def measure(tokens, dtype, tried, repeats):
        seen.append(tried)
        return times[dtype] if 128 in tried else dict.fromkeys(tried, 2.0)

    monkeypatch.setattr(tuning, "_measure", measure)
    made = tuning.tune(64, ["float32", "bfloat16"])
    chosen = [(row["dtype"], row["setting"], row["number"]) for row in made["rows"] if row["chosen"]]
    wanted = [(dtype, "BLOCK_TOKENS", number) for dtype, number in (("float32", 256), ("bfloat16", 128))]
    assert chosen == wanted + [(dtype, "VALUES_AHEAD", 0) for dtype in ("float32", "bfloat16")]
    assert json.loads(Path(made["file"]).read_text()) == RIGHT | {"BLOCK_TOKENS": [256, 128, 128, 128, 128]}
    assert seen[-1][512] == {"BLOCK_TOKENS": [256, 128, 128, 128, 128], "VALUES_AHEAD": [512] * 5}
    times["float32"][256] = 0.985
    assert tuning.tune(64, ["float32"])["file"] is None
    assert not list(cache.iterdir())


@pytest.mark.deep
@pytest.mark.parametrize("number", [128, 512])
def test_attention_is_exact_with_every_block(number):
    rng = np.random.default_rng(number)
    q, (k, v) = (
        rng.standard_normal((1, 1, 2, 64), np.float32),
        rng.standard_normal((2, 1, 1300, 2, 64), np.float32),
    )
    wanted, records = (partial.identity((1, 2, 1), 64) for _ in range(2))
    cpu.PlannedAttention(wanted, scale=0.125)(q, k, v)
    chosen = {"BLOCK_TOKENS": [number] * 5, "VALUES_AHEAD": [2048] * 5}
    with compile.trying(chosen):
        cpu.PlannedAttention(records, scale=0.125)(q, k, v)
    np.testing.assert_allclose(records, wanted, rtol=2e-5, atol=2e-5)

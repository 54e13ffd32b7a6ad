"""The vectors of attention over split keys: what is right in them, and which faults they find."""

import subprocess
import sys

import numpy as np
import pytest

from tests.data.split_kv_vectors import conformance
from treeattn import reference

CASES = list(conformance.cases())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_right_is_what_the_oracle_says(case):
    positions = np.arange(case.k.shape[1])
    rules = {"causal": case.causal, "window": None if case.window < 0 else (case.window, 0)}
    seen = reference.seen(positions, case.q_positions, **rules)
    sinks = {} if case.sinks is None else {"sinks": case.sinks}
    valid = {"seen": seen, "lengths": case.lengths}
    right = reference.attention(case.q, case.k, case.v, scale=case.scale, **valid, **sinks)
    for got, wanted in zip((case.out, case.lse), right, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)


class Split:
    """Attention as a system of split keys computes it, in float32; with a mistake that such systems make."""

    def __init__(self, mistake=""):
        self.mistake = mistake

    def part(self, q, shard, scale, causal, window, q_positions):
        """max, denominator [batch, heads, queries], numerator [.., dim] of one rank."""
        group = q.shape[2] // shard["k"].shape[2]
        k, v = (np.repeat(shard[name], group, 2) for name in "kv")
        logits = np.float32(scale) * np.einsum("bqhd,bthd->bhqt", q, k)
        at, stands = shard["positions"], q_positions[:, None, :, None]
        if self.mistake == "positions within a shard":
            at = np.arange(len(at))
        valid = np.arange(len(at)) < shard["lengths"][:, None]
        if self.mistake == "padding is attended to":
            valid[...] = True
        seen = np.broadcast_to(valid[:, None, None, :], logits.shape)
        if causal:
            seen = seen & (at <= stands) & ((window < 0) | (at >= stands - window))
        logits = np.where(seen, logits, np.float32(-np.inf))
        most = logits.max(-1, initial=np.float32(-np.inf))
        weights = np.exp(logits - np.where(np.isfinite(most), most, 0)[..., None])
        return most, weights.sum(-1), np.einsum("bhqt,bthd->bhqd", weights, v)

    def __call__(self, q, shards, *, sinks, **rules):
        parts = [self.part(q, shard, **rules) for shard in shards]
        if sinks is not None:
            like = parts[0][0]
            one = np.broadcast_to(sinks[:, None], like.shape), np.ones_like(like), np.zeros_like(parts[0][2])
            times = len(shards) if self.mistake == "sinks once a rank" else 1
            parts += [one] * times * (self.mistake != "no sinks")
        peaks, totals, sums = map(np.stack, zip(*parts, strict=True))
        most = peaks.max(0)
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = np.where(np.isfinite(peaks), np.exp(peaks - most), 0)
            if self.mistake == "no rescaling":
                factor = np.ones_like(factor)
            total = (factor * totals).sum(0)
            lse = np.where(total, most + np.log(total), -np.inf)
            if self.mistake == "base 2":
                lse = lse / np.log(2)
            out = np.nan_to_num((factor[..., None] * sums).sum(0) / total[..., None])
        if self.mistake == "the mean of ranks":
            each = [part[2] / np.where(part[1], part[1], 1)[..., None] for part in parts]
            out = np.mean(each, 0)
        return out.swapaxes(1, 2), lse


def failing(mistake):
    return {line.split(":")[0] for line in conformance.check(Split(mistake))}


ALL = {case.name for case in CASES}
SINKS = {"sinks", "sinks_of_any_owner", "sinks_alone", "window_and_sinks"}


@pytest.mark.parametrize(
    ("mistake", "found"),
    [
        ("", set()),
        ("sinks once a rank", SINKS),
        ("no sinks", SINKS),
        ("no rescaling", ALL - {"nothing_to_see"}),
        ("the mean of ranks", ALL),
        ("padding is attended to", {"in_turn", "any_owner", "a_rank_without_tokens", "nothing_to_see"}),
        ("positions within a shard", {"causal", "window", "window_and_sinks"}),
        ("base 2", ALL),
    ],
)
def test_each_mistake_is_found_where_it_matters(mistake, found):
    assert failing(mistake) >= found
    if not found or found == SINKS:
        assert failing(mistake) == found


def test_the_program_says_which_case_fails(tmp_path):
    (tmp_path / "mine.py").write_text("def attend(q, shards, **rules):\n    return q * 0, None\n")
    program = [sys.executable, conformance.__file__, "mine:attend"]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) >= len(CASES) - 1
    assert done.stdout.startswith("blocks: out is 0.0 at (0, 0, 0, 0), right is ")

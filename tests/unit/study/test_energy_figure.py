"""The picture of the energy along one dimension: what it shows is what the energy is."""

from __future__ import annotations

import numpy as np
import pytest

from treeattn import energy
from treeattn.errors import ArgumentError
from treeattn.study.figures import draw
from treeattn.study.figures.energy import along


@pytest.fixture(scope="module")
def arrays():
    """q, k, v of one head."""
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((1, tokens, 1, 8)) for tokens in (1, 30, 30))


@pytest.fixture(scope="module")
def chart(arrays):
    return along(3, *arrays, scale=0.4, reach=1.5, points=20)


def test_points_are_the_energy_and_its_first_derivatives(chart, arrays):
    curve, slopes = chart.panels
    assert [point.x for point in curve.points] == pytest.approx(np.linspace(-1.5, 1.5, 21).tolist())
    for point, slope in zip(curve.points, slopes.points, strict=True):
        zeta = np.zeros((1, 1, 1, 8))
        zeta[..., 3] = point.x
        assert point.value == pytest.approx(energy.value(zeta, *arrays, scale=0.4).item(), abs=1e-12)
        mean, variance = energy.moments(*arrays, zeta=zeta, scale=0.4)
        assert slope.value == pytest.approx(mean[0, 0, 0, 3], abs=1e-12)
        assert (slope.high - slope.low) / 2 == pytest.approx(np.sqrt(variance[0, 0, 0, 3]), abs=1e-10)


def test_the_dashed_line_touches_the_curve_at_attention(chart, arrays):
    attention = energy.gradient(None, *arrays, scale=0.4)[0, 0, 0, 3]
    curve, slopes = chart.panels
    assert (slopes.mark.x, slopes.mark.value) == pytest.approx((0, attention))
    assert curve.line == pytest.approx((0, curve.mark.value, attention))
    assert (curve.mark.x, curve.mark.value) == (0, curve.points[10].value)
    left, right = (axes.get_lines() for axes in draw.draw(chart).axes)
    assert [line.get_label() for line in left] == ["_curve", "_line", f"{curve.mark.value:g}"]
    (begin, end), (low, high) = left[1].get_data()
    assert (high - low) / (end - begin) == pytest.approx(attention)
    assert left[0].get_ydata().tolist() == [point.value for point in curve.points]
    assert right[1].get_xydata().tolist() == [[0, slopes.mark.value]]


def test_a_file_of_either_format(chart):
    files = draw.render(chart, ("png", "svg"))
    assert files["png"].startswith(b"\x89PNG")
    assert b"prefers-color-scheme" in files["svg"]
    assert draw.render(chart, ("png", "svg")) == files


def test_several_queries_have_no_such_picture(arrays):
    q, k, v = arrays
    with pytest.raises(ArgumentError, match="the picture is of one query"):
        along(0, np.repeat(q, 2, axis=1), k, v)

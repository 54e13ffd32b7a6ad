"""What a planned step on a GPU costs the host, which may only fall."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import treeattn

from .cases import Case
from .raw_module import compiler_problem
from .runtime import EmulatorRuntime

pytestmark = pytest.mark.skipif(compiler_problem() is not None, reason=str(compiler_problem()))

PACKAGE = [Path(__file__).resolve().parents[2] / name for name in ("treeattn", "collectives")]
CASE = Case("bfloat16", 64, group=4, batch=2)
DEVICE_LENGTHS = np.array([9, 150])
#: Arguments of a step, from its arrays -> Python functions of the package that a call enters.
WAYS: dict[str, tuple[Callable[..., tuple[Any, ...]], int]] = {
    "the same arrays": (lambda *arrays: arrays, 7),
    "lengths of the device": (lambda *arrays: (*arrays, DEVICE_LENGTHS), 7),
    "lengths of the host": (lambda *arrays: (*arrays, [3, 150]), 10),
    "new views": (lambda *arrays: tuple(array.view() for array in arrays), 13),
    "new views and lengths": (lambda q, k, v: (q.view(), k[:, :70], v[:, :70], [70, 3]), 16),
}


def frames(run: Callable[[], object]) -> int:
    """How many Python functions of the package a call enters."""
    files: list[str] = []
    sys.setprofile(lambda frame, event, _: event == "call" and files.append(frame.f_code.co_filename))
    try:
        run()
    finally:
        sys.setprofile(None)
    return sum(Path(file).is_relative_to(folder) for file in files for folder in PACKAGE)


@pytest.mark.parametrize("way", WAYS)
def test_frames_and_launches_of_a_step(runtime: EmulatorRuntime, way: str) -> None:
    given, most = WAYS[way]
    arrays = CASE.inputs()[:3]
    with treeattn.Decoder(**CASE.plan) as decoder:
        decoder(*arrays)
        decoder(*given(*arrays))
        counted, step = (runtime.launches, runtime.allocations), given(*arrays)
        assert frames(lambda: decoder(*step)) <= most
        assert (runtime.launches, runtime.allocations) == (counted[0] + 1, counted[1])


@pytest.mark.usefixtures("runtime")
def test_arrays_of_another_shape_are_seen_and_none_is_kept() -> None:
    q, k, v = CASE.inputs()[:3]
    with treeattn.Decoder(**CASE.plan) as decoder:
        kept, k = weakref.ref(given := k.copy()), v
        decoder(q, given, v)
        decoder(q, given := v.copy(), v)
        assert kept() is None
        with pytest.raises(treeattn.ArgumentError, match=r"k has shape \[5\]"):
            decoder(q, np.zeros(5, v.dtype), v, [3, 3])
    latent = {"heads": 16, "kv_heads": 1, "head_dim": 576, "cache": treeattn.CacheFormat(v_dim=512)}
    with treeattn.Decoder(**latent, scale=0.05, device="cuda") as decoder:
        q, k = (np.zeros((1, *shape, 576), ml_dtypes.bfloat16) for shape in ((1, 16), (50, 1)))
        decoder(q, k)
        for wrong in (k[:, :30, :, :512], k[..., :100]):
            with pytest.raises(treeattn.ArgumentError, match="v has shape"):
                decoder(q, k, wrong)

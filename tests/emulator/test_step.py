"""A planned step as one C call: its results, and what it costs the host, which may only fall."""

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import treeattn
from tests.support.exporters import Dlpack
from tests.support.frames import frames
from treeattn.attention.arguments import Rules
from treeattn.errors import StateError

from .cases import Case
from .runtime import EmulatorRuntime

CASE = Case("bfloat16", 64, group=4, batch=2)
DEVICE_LENGTHS = np.array([9, 150])
#: Arguments of a step, from its arrays -> Python functions of the package that a call enters.
WAYS: dict[str, tuple[Callable[..., tuple[Any, ...]], int]] = {
    "the same arrays": (lambda *arrays: arrays, 5),
    "lengths of the device": (lambda *arrays: (*arrays, DEVICE_LENGTHS), 5),
    "lengths of the host": (lambda *arrays: (*arrays, [3, 150]), 9),
    "new views": (lambda *arrays: tuple(array.view() for array in arrays), 11),
    "new views and lengths": (lambda q, k, v: (q.view(), k[:, :70], v[:, :70], [70, 3]), 15),
}


@pytest.mark.parametrize("way", WAYS)
def test_frames_and_driver_calls_of_a_step(runtime: EmulatorRuntime, way: str) -> None:
    given, most = WAYS[way]
    arrays = CASE.inputs()[:3]
    with treeattn.Decoder(**CASE.plan) as decoder:
        decoder(*arrays)
        decoder(*given(*arrays))
        counted = runtime.driver_calls, runtime.launches, runtime.allocations
        step = given(*arrays)
        assert len(frames(lambda: decoder(*step))) <= most
        assert (runtime.driver_calls, runtime.launches) == (counted[0] + 1, counted[1] + 1)
        assert runtime.allocations == counted[2]


def test_frames_of_a_decode(runtime: EmulatorRuntime) -> None:
    """It plans anew: what started this process, and what it can run, is not asked again."""
    arrays = CASE.inputs()[:3]
    treeattn.decode(*arrays, device="cuda")
    assert len(frames(lambda: treeattn.decode(*arrays, device="cuda"))) <= 308


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        Case("float32", 64, group=2, queries=3, batch=17, tokens=40),  # lengths are copied
        Case("float32", 512, tokens=300),  # two launches: the splits of wide heads are merged by another
        Case("bfloat16", 64, group=8, kv_heads=1, causal=True, tokens=70),  # by tables
        Case("bfloat16", 64, group=4, kv_heads=1, tokens=300),  # clusters, and what is cut has none
    ],
    ids=str,
)
def test_the_bits_are_those_of_the_runtime(
    runtime: EmulatorRuntime, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    """Cut or whole, lengths on the host, on the device or none in turn, and around parts of a step."""
    monkeypatch.setattr(EmulatorRuntime, "multiprocessors", 132)
    q, k, v, *_ = case.inputs()
    lengths = np.random.default_rng(1).integers(0, 21, case.batch)
    cuts = [(q, k, v), (q.copy(), k[:, :20], v[:, :20])]
    steps = [
        (*cut, given) for cut in cuts for given in (None, lengths.tolist(), None, lengths, [20] * len(q))
    ]
    seen = {"q_positions": np.full((case.batch, case.queries), 20)} if case.causal else {}
    by_tables = {"rules": Rules(causal=True), "cache": treeattn.CacheFormat(positions="interleaved")}
    results = []
    for driver in (runtime.driver, None):
        monkeypatch.setattr(EmulatorRuntime, "driver", driver)
        calls = runtime.driver_calls
        with treeattn.Decoder(**case.plan | (by_tables if case.causal else {})) as decoder:
            for step in steps:
                results.append([array.copy() for array in decoder(*step, **seen)])
                decoder.out[...] = 0
                decoder.local(*step, **seen)
                assert not decoder.out.any()
        assert (runtime.driver_calls > calls) == (driver is not None)
    for one, other in zip(results[: len(steps)], results[len(steps) :], strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])


def test_what_the_driver_refuses_is_made_by_the_runtime(
    runtime: EmulatorRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the launch on that is refused, on the stream that is current, of the GPU that has the kernel."""
    case, asked = Case("float32", 512, tokens=300), []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3)
    def refuse(kernel: int, *rest: Any) -> int:
        asked.append(rest[7])
        pointers = [ctypes.c_void_p(one) for one in (kernel, *rest[7:])]
        accepted = len(asked) == 1
        return runtime.driver.cuLaunchKernel(pointers[0], *rest[:7], *pointers[1:]) if accepted else 400

    with treeattn.Decoder(**case.plan) as decoder:
        wanted, arrays = decoder(*case.inputs()[:3])[0].copy(), decoder.plan.attend.bound[:3]
        decoder.plan.fused_step._struct["launch_kernel"] = ctypes.cast(refuse, ctypes.c_void_p).value
        decoder.out[...], runtime.stream = 0, 7
        np.testing.assert_array_equal(decoder(*arrays)[0], wanted)
        assert (asked, runtime.driver_calls, runtime.launches) == ([7, 7], 3, 4)
        monkeypatch.setattr(runtime, "check", lambda name, array: 1 / 0)  # another GPU is current
        with pytest.raises(ZeroDivisionError):
            decoder(*arrays)
    with pytest.raises(StateError, match="closed"):
        decoder(*arrays)
    assert (len(asked), runtime.launches) == (3, 4)


def test_arrays_of_another_library_and_a_capture(runtime: EmulatorRuntime) -> None:
    """The first are one C call from the second step on; what is captured is written down by the runtime."""
    arrays = CASE.inputs()[:3]
    given = [Dlpack(array.view(np.uint16), kind=2, code=4) for array in arrays]
    with treeattn.Decoder(**CASE.plan) as decoder:
        wanted = decoder(*arrays)[0].copy()
        for _ in range(2):
            np.testing.assert_array_equal(decoder(*given)[0], wanted)
        launch = runtime.capture(lambda: decoder(*arrays))
        calls = runtime.driver_calls
        decoder.out[...] = 0
        launch()
        np.testing.assert_array_equal(decoder.out, wanted)
        assert runtime.driver_calls == calls > 0


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

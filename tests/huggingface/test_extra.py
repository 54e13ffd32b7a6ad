"""Without torch, or with another transformers, the import says in one line what to install; tensors of torch
are decoded where the models are, since to load it takes seconds."""

import importlib
import sys
import types

import numpy as np
import pytest

import treeattn
from tests.support.problems import random_qkv
from tests.support.ranks import own_run
from treeattn.errors import BackendError


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_the_import_names_the_extra(monkeypatch, missing):
    for name in [name for name in sys.modules if name.startswith("treeattn.huggingface")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    old = types.ModuleType("transformers")
    old.__version__ = "5.17.0"
    monkeypatch.setitem(sys.modules, "transformers", old)
    with pytest.raises(ImportError, match=r"serves transformers 5.24, not 5.17.0: pip install '.*5.24.\*'"):
        importlib.import_module("treeattn.huggingface")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(BackendError, match=rf"{missing}.*pip install 'treeattn\[huggingface\]'"):
        importlib.import_module("treeattn.huggingface")


def test_results_are_of_the_kind_of_the_query(comm):
    torch = pytest.importorskip("torch", reason="torch is not installed (the extra `oracle`)")
    (q, k, v), run = random_qkv(37), own_run(comm, 37)
    wanted = treeattn.decode(q, k[:, run], v[:, run], comm=comm)
    tensors = [torch.from_numpy(array) for array in (q, k[:, run], v[:, run])]
    for root in (None, 0):
        got = treeattn.decode(*tensors, comm=comm, q_root=root)
        assert all(isinstance(tensor, torch.Tensor) for tensor in got)
        np.testing.assert_array_equal(got[0].numpy(), wanted[0])
    with treeattn.Decoder(comm, heads=4, kv_heads=2, head_dim=64, dtype="float32") as decoder:
        out, _ = decoder(*tensors)
        assert out.data_ptr() == decoder.out.ctypes.data
        np.testing.assert_array_equal(out.numpy(), wanted[0])

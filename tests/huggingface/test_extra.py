"""Without torch, or with another transformers, the import says in one line what to install."""

from __future__ import annotations

import importlib
import sys
import types

import pytest

from treeattn.errors import BackendError

pytestmark = pytest.mark.mpi


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

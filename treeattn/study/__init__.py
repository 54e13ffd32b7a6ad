"""Studies of schemes: measured, compared, predicted and drawn."""

from __future__ import annotations

import importlib
from typing import Any

from treeattn.errors import MissingPackageError


def extra(module: str) -> Any:
    """Import a module of the extra `study`: scipy, pandas, matplotlib or Jinja2.

    Raises `MissingPackageError`, an ImportError, which names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingPackageError(f"{package} is missing ({error}): pip install '.[study]'") from None

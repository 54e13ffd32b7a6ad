"""What a forked process must not use of its parent's: no communicator, of MPI or torch, outlives a fork.

Loaded with the package, so that it sees a fork that comes before the first call.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

# Whether this process has the MPI of the one that forked it, and the default group of torch if it has that.
mpi = False
group: Callable[[], Any] = tuple


def _remember() -> None:
    """Nothing is imported here, since another thread may have been at an import."""
    global mpi, group
    library, torch = sys.modules.get("mpi4py.MPI"), sys.modules.get("torch.distributed")
    mpi = mpi or bool(getattr(library, "Is_initialized", bool)())
    if torch is not None and getattr(torch, "is_initialized", bool)():
        group = weakref.ref(torch.group.WORLD)


os.register_at_fork(after_in_child=_remember)

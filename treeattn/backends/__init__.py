"""Where partial attention is computed: the processor (`cpu`) or an NVIDIA GPU (`cuda`).

A backend knows nothing of MPI. Each plans the same three verbs, attention, merge and finish, which read and
write records as `treeattn.partial` defines them.
"""

from __future__ import annotations

from pathlib import Path

from treeattn.errors import BackendError


def kernel_folder(language: str) -> Path:
    """Where the kernel sources of a language lie, ``cpu`` or ``cuda``.

    In the package; or beside it, in a checkout whose links came out as plain files and in an unpacked sdist,
    which has none. Raises `BackendError` where they are in neither place.
    """
    package = Path(__file__).parents[1]
    for place in (package, package.parent):
        if (folder := place / "kernels" / language).is_dir():
            return folder
    raise BackendError(
        f"no kernels/{language} in {package} or beside it: the installation is incomplete, install it again"
    )

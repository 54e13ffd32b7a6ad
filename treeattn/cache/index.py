"""The index of a saved cache: what is in it, and which tokens lie in which file.

A saved cache is a directory: a safetensors file for each rank that wrote it, and ``index.json``. The index is
written last, and names the files that count.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from treeattn import files
from treeattn.attention.positions import Runs, check_owners
from treeattn.errors import ArgumentError

NAME = "index.json"


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's file, beside the index. runs: (start, step, count) of the positions of its tokens, in
    order."""

    file: Annotated[str, msgspec.Meta(pattern=r"^part-[0-9]{5,}-[0-9a-f]{16}\.safetensors\Z")]
    runs: tuple[tuple[int, int, int], ...]


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """layout, capacity: of the cache that was saved. about: whatever its writer said of it."""

    format: Literal["treeattn.ShardedCache"] = "treeattn.ShardedCache"
    version: Literal[2] = 2
    layers: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    kv_heads: int
    head_dim: int
    v_dim: int
    latent: bool
    dtype: str
    k_scale: tuple[float, ...] | None = None
    v_scale: tuple[float, ...] | None = None
    layout: str
    capacity: int
    totals: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    parts: tuple[Part, ...]
    about: dict[str, Any] = {}
    sha256: str = ""

    @property
    def held(self) -> dict[str, Any]:
        """What `treeattn.cache.placement.LayerPlan.of` takes of it."""
        names = "kv_heads", "head_dim", "dtype", "v_dim", "k_scale", "v_scale"
        return {"batch": len(self.totals), **{name: getattr(self, name) for name in names}}

    def encode(self) -> bytes:
        """As the file's text, with its own digest."""
        plain = msgspec.structs.replace(self, sha256="")
        whole = msgspec.structs.replace(self, sha256=_digest(plain))
        return msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n"


def read_index(directory: str | Path) -> Index:
    """Raises `ArgumentError`: no saved cache, one of another version, or an index that is damaged."""
    path = Path(directory) / NAME
    if not path.is_file():
        raise ArgumentError(f"{directory}: no saved cache: there is no {NAME}")
    try:
        index = msgspec.json.decode(files.read_text(path), type=Index)
        everyone = [Runs(part.runs) for part in index.parts]
    except (msgspec.DecodeError, ArgumentError) as error:
        raise ArgumentError(f"{path}: damaged, or of another version ({error})") from None
    if index.sha256 != _digest(msgspec.structs.replace(index, sha256="")):
        raise ArgumentError(f"{path}: damaged: its digest is another than it says; save the cache again")
    check_owners(everyone)
    most = max(index.totals, default=0)
    if sum(runs.below(most) for runs in everyone) != most:
        raise ArgumentError(
            f"{path}: damaged: its files hold fewer tokens than it says; save the cache again"
        )
    return index


def _digest(index: Index) -> str:
    return hashlib.sha256(msgspec.json.encode(index)).hexdigest()

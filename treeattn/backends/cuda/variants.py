"""Which attention kernel takes which work, and what is known of it before it runs."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from treeattn.errors import BackendError

#: Head dimensions that the attention kernels are built for.
HEAD_DIMS = (64, 80, 96, 128, 256, 512)
#: Of latent attention: channels of keys, and how many of them, the first ones, are the values.
LATENT = (576, 512)
#: Query rows of a KV head from which tensor cores are used: fewer would make them multiply mostly padding.
TENSOR_CORES_FROM_ROWS = 4
#: C++ type and ElementType of kernels/cuda/attention.cuh. uint16 stands for the bits of bfloat16.
TYPES = {
    "float32": ("float", 0),
    "float16": ("float16", 1),
    "bfloat16": ("bfloat16", 2),
    "uint16": ("bfloat16", 2),
}
#: The same of caches of 8 bits; uint8 arrays carry them where the dtype has no name of its own.
TYPES_8 = {"float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2"}

_BYTES = {"float": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_BESIDE = 2048  # bytes of shared memory that a block takes beside its tiles, and the system with it
_WARPS, _UNROLL = 4, 4  # of a block; tokens that a group of lanes of the multiply-add kernel takes at a time
_MERGED_APART = 256  # heads of more channels have the merge of their splits in a launch of its own
_MERGED_CHANNELS = 64  # of a block of that launch; those of other heads are one block's


class Tokens(NamedTuple):
    """Which tokens a kernel takes: all valid ones or what queries see, in a row or in pages."""

    visible: bool = False
    paged: bool = False

    @property
    def expression(self) -> str:
        """The last parameter of a kernel, AllTokens where it is not named."""
        kind = "VisibleTokens" if self.visible else "AllTokens"
        return f", Paged<{kind}>" if self.paged else f", {kind}" if self.visible else ""


ALL_TOKENS = Tokens()


class Variant(NamedTuple):
    """One kernel. expression: its C++ name. shared_bytes: of dynamic shared memory. rows: of a tile.
    step: tokens that a block takes at a time. blocks: of it that a multiprocessor should have, if it holds so
    many: with one more, merging costs more than waiting for memory. threads: of a block. merge: the kernel
    that merges the splits, where this one does not. clustered: are these the blocks of a cluster?"""

    module: str
    expression: str
    shared_bytes: int
    rows: int
    step: int
    blocks: int
    threads: int = 32 * _WARPS
    merge: str | None = None
    clustered: bool = False


@functools.lru_cache(maxsize=64)
def choose_variant(
    q_type: str,
    kv_type: str,
    head_dim: int,
    rows: int,
    *,
    tensor_cores: bool,
    shared_limit: int,
    tokens: Tokens = ALL_TOKENS,
    latent: bool = False,
) -> Variant:
    """The kernel for C++ types of q and of the cache, and for `rows` query rows that share a KV head.

    tensor_cores: may they be used? shared_limit: bytes of shared memory that a block can have. tokens: which
    ones it takes. latent: are the values the first channels of the keys? Those are for tensor cores alone:
    raises `BackendError` where these do not serve.
    """
    if tensor_cores and for_tensor_cores(q_type, kv_type, rows, latent):
        variant = mma_kernel(q_type, kv_type, LATENT[0] if latent else head_dim, rows, shared_limit, tokens)
        if variant is not None:
            return variant
    if latent:
        raise no_latent_kernel(q_type, kv_type)
    return fma_kernel(kv_type, head_dim, rows, tokens)


def for_tensor_cores(q_type: str, kv_type: str, rows: int, latent: bool) -> bool:
    """Whether tensor cores, where there are any, serve `rows` query rows that share a KV head."""
    served = q_type != "float" and (q_type == kv_type or kv_type in TYPES_8)
    return served and (latent or rows >= TENSOR_CORES_FROM_ROWS)


@functools.lru_cache(maxsize=64)
def cluster_kernel(
    q_type: str, kv_type: str, head_dim: int, rows: int, shared_limit: int, tokens: Tokens
) -> Variant | None:
    """The kernel of tensor cores whose splits are the blocks of a cluster: where these were measured, and
    for heads that are narrower; None elsewhere, and where it needs more shared memory than there is."""
    few = TENSOR_CORES_FROM_ROWS <= rows <= 16 and head_dim <= 128
    served = few and q_type == kv_type != "float" and not tokens.visible
    return _mma_kernel(q_type, kv_type, head_dim, _CLUSTERED, shared_limit, tokens) if served else None


def no_latent_kernel(q_type: str, kv_type: str) -> BackendError:
    """Why latent attention is refused."""
    return BackendError(
        f"no CUDA kernel for latent attention with q of {q_type} and a cache of {kv_type}: it needs tensor "
        "cores (compute capability 8.0, TREEATTN_TENSOR_CORES=1), q of 16 bits, and a cache of q's type or "
        "of 8 bits; use device='cpu'"
    )


def fma_kernel(kv_type: str, head_dim: int, rows: int, tokens: Tokens = ALL_TOKENS) -> Variant:
    """The multiply-add kernel; `rows`: query rows that share a KV head."""
    tile = 1 if rows == 1 else 2 if rows == 2 or head_dim > 256 else 4
    vectors = head_dim * _BYTES[kv_type] // 16
    lanes = min(32, 1 << (vectors - 1).bit_length())  # that share a token
    step = _WARPS * (32 // lanes) * _UNROLL
    name = f"partial_attention<{kv_type}, {head_dim}, {tile}{tokens.expression}>"
    merge = merge_kernel(head_dim, tile)
    return Variant("partial_attention", name, 0, tile, step, blocks=4, merge=merge)


def merge_kernel(v_dim: int, rows: int) -> str | None:
    """The kernel of merge_splits.cu for tiles of so many rows; None where the last blocks of the attention
    kernel merge."""
    return f"merge_splits<{v_dim}, {rows}, {_MERGED_CHANNELS}>" if v_dim > _MERGED_APART else None


def merge_blocks(variant: Variant, v_dim: int, rows: int) -> int:
    """Blocks of the launch of its `merge` for each tile, `rows` being those of a KV head."""
    slices = v_dim // _MERGED_CHANNELS if v_dim > _MERGED_APART else 1
    return min(variant.rows, rows) * slices


def mma_kernel(
    q_type: str,
    kv_type: str,
    head_dim: int,
    rows: int,
    shared_limit: int,
    tokens: Tokens = ALL_TOKENS,
) -> Variant | None:
    """The tensor-core kernel for `rows` rows of a KV head, latent where head_dim is that of latent keys; None
    where it needs more shared memory than there is."""
    if rows > 64 and head_dim <= 128 and kv_type == q_type:
        return _rows_kernel(q_type, head_dim, shared_limit, tokens)
    for tile in _tiles_for(head_dim, rows, kv_type in TYPES_8):
        kernel = _mma_kernel(q_type, kv_type, head_dim, tile, shared_limit, tokens)
        if kernel is not None:
            return kernel
    return None


def _rows_kernel(q_type: str, head_dim: int, shared_limit: int, tokens: Tokens) -> Variant | None:
    """Of tiles of 128 rows: queries stay in shared memory, beside three tiles of 32 tokens."""
    rows, step, stages = 128, 32, 3
    size = max((rows + stages * 2 * step) * (head_dim + 8) * 2, 4 * rows * (head_dim + 10))
    if size + _BESIDE > shared_limit:
        return None
    name = f"attention_rows<{q_type}, {head_dim}, {step}, {stages}{tokens.expression}>"
    merge = f"merge_splits<{head_dim}, {rows}, {head_dim}>"
    return Variant("attention_rows", name, size, rows, step, blocks=2, merge=merge)


def _mma_kernel(
    q_type: str, kv_type: str, head_dim: int, tile: _Tile, shared_limit: int, tokens: Tokens
) -> Variant | None:
    """With the first number of stages that leaves room for two blocks beside each other, else the last that
    fits; None where none does."""
    latent, narrow = head_dim == LATENT[0], kv_type in TYPES_8
    v_dim, tile_rows, warps = LATENT[1] if latent else head_dim, 16 * tile.warps[0], math.prod(tile.warps)

    def shared_bytes(stages: int) -> int:
        """Tiles of 16 bits in rows padded by 16 bytes, as many as stages; or one, and stages as they come;
        the partials take their place. Where warps share out the channels, each one's part of the scores."""
        rows_of_tiles = (1 if latent else 2) * tile.tokens
        size = (1 if narrow else stages) * rows_of_tiles * (head_dim + 8) * 2
        size += stages * rows_of_tiles * head_dim if narrow else 0
        size = max(size, 4 * tile.warps[1] * tile_rows * (v_dim + 10))
        return size + (warps * tile.tokens // tile.warps[1] * 64 if tile.warps[2] > 1 else 0)

    once, twice = (
        [n for n in tile.stages if blocks * (shared_bytes(n) + _BESIDE) <= shared_limit] for blocks in (1, 2)
    )
    if not once:
        return None
    stages = twice[0] if twice else once[-1]
    module = "attention_cluster" if tile is _CLUSTERED else "attention_mma"
    name = (
        f"{module}<{q_type}, {kv_type}, {head_dim}, {v_dim}, Warps<{', '.join(map(str, tile.warps))}>, "
        f"{tile.tokens}, {stages}{tokens.expression}>"
    )
    return Variant(
        *(module, name, shared_bytes(stages), tile_rows),
        step=tile.tokens,
        blocks=tile.blocks,
        threads=32 * warps,
        merge=merge_kernel(v_dim, tile_rows),
        clustered=tile is _CLUSTERED,
    )


class _Tile(NamedTuple):
    """warps: how they share out rows, tokens and channels. tokens: of a tile. stages: to choose from.
    blocks: as `Variant` has it."""

    warps: tuple[int, int, int]
    tokens: int
    stages: tuple[int, ...]
    blocks: int = 1


#: Wide, since its blocks are few: as many tokens are under way as otherwise by two.
_CLUSTERED = _Tile((1, 8, 1), 128, (3,))


def _tiles_for(head_dim: int, rows: int, narrow: bool) -> tuple[_Tile, ...]:
    """Tiles of as many rows as there are, up to 64, where registers hold them, and 128 of heads of 80 to 128
    channels, where several tiles would read the tokens: the first that fits shared memory. narrow: 8 bits, of
    which a head of 64 needs more tokens to leave room for the merge of splits."""
    if head_dim == LATENT[0]:
        if rows <= 16:
            return (_Tile((1, 1, 4), 32, (2, 3), blocks=2),)
        some, many = _Tile((2, 1, 2), 32, (2, 3)), _Tile((4, 1, 2), 32, (3,))
        return (some,) if rows <= 32 else (many, some)
    if head_dim > 256:
        return (_Tile((1, 1, 4), 16, (3, 2), blocks=2),)
    if rows <= 16 and narrow:  # two stages leave room for three blocks: converting is much waiting
        return (_Tile((1, 4, 1), 64, (2,) if head_dim == 128 else (3, 2), blocks=3),)
    if rows <= 16:
        return (_Tile((1, 4, 1), 64, (3, 2)),)
    if head_dim > 128:
        return (_Tile((2, 1, 2), 32, (3, 2)),)
    if rows <= 32:
        return (_Tile((2, 2, 1), 64, (3, 2)),)
    if head_dim == 64 and narrow:
        return (_Tile((4, 1, 1), 64, (3,)),)
    if rows <= 128 or head_dim == 64:
        return (_Tile((4, 1, 1), 32, (4,) if head_dim == 64 else (3,)),)
    return (_Tile((8, 1, 1), 32, (3,)),)


def check_head_dim(head_dim: int, v_dim: int | None = None) -> None:
    """Raise `BackendError` where there is no kernel for it, or for values of another width, `v_dim`."""
    if v_dim not in (None, head_dim):
        if (head_dim, v_dim) != LATENT:
            raise BackendError(
                f"no CUDA kernel for keys of {head_dim} and values of {v_dim} channels: of two widths there "
                f"are {LATENT[0]} and {LATENT[1]}, latent attention; use device='cpu'"
            )
        return
    if head_dim not in HEAD_DIMS:
        raise BackendError(
            f"no CUDA kernel for head_dim {head_dim}: there are {', '.join(map(str, HEAD_DIMS))}; "
            "pad it with zeros, or use device='cpu'"
        )


def kernel_head_dim(head_dim: int) -> int:
    """The least head_dim from this one on that there is a kernel for. Raises `BackendError`."""
    for width in HEAD_DIMS:
        if head_dim <= width:
            return width
    raise BackendError(
        f"no CUDA kernel for head_dim {head_dim}: {HEAD_DIMS[-1]} is the widest; use device='cpu'"
    )

"""Which attention kernel takes which work, and what is known of it before it runs."""

from __future__ import annotations

from typing import NamedTuple

from treeattn.errors import BackendError

#: Head dimensions that the attention kernels are built for.
HEAD_DIMS = (64, 80, 96, 128, 256)
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
_TILE = 64  # tokens that a block of the tensor-core kernel takes at a time
_MMA_ROWS = 16
_LATENT_TILE = 32  # tokens of the tensor-core kernel of latent attention; the other one: bytes of a channel
_WARPS, _UNROLL = 4, 4  # of the multiply-add kernel


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
    step: tokens that a block takes at a time. in_flight: tokens that it has asked memory for at once."""

    module: str
    expression: str
    shared_bytes: int
    rows: int
    step: int
    in_flight: int


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
    ones it takes. latent: are the values the first channels of the keys? Caches of 8 bits are widened by the
    multiply-add kernels alone.
    """
    if tensor_cores and rows >= TENSOR_CORES_FROM_ROWS and q_type == kv_type != "float":
        variant = (
            latent_mma_kernel(kv_type, shared_limit, tokens)
            if latent
            else mma_kernel(kv_type, head_dim, shared_limit, tokens)
        )
        if variant is not None:
            return variant
    return latent_kernel(kv_type, tokens) if latent else fma_kernel(kv_type, head_dim, rows, tokens)


def fma_kernel(kv_type: str, head_dim: int, rows: int, tokens: Tokens = ALL_TOKENS) -> Variant:
    """The multiply-add kernel; `rows`: query rows that share a KV head."""
    tile = 1 if rows == 1 else 2 if rows == 2 else 4
    vectors = head_dim * _BYTES[kv_type] // 16
    lanes = min(32, 1 << (vectors - 1).bit_length())  # that share a token
    step = _WARPS * (32 // lanes) * _UNROLL
    name = f"partial_attention<{kv_type}, {head_dim}, {tile}{tokens.expression}>"
    return Variant("partial_attention", name, 0, tile, step, step)


def mma_kernel(kv_type: str, head_dim: int, shared_limit: int, tokens: Tokens = ALL_TOKENS) -> Variant | None:
    """The tensor-core kernel; None where it needs more shared memory than there is.

    Three stages if two blocks of them fit beside each other, else two.
    """
    stages = 3 if 2 * _mma_shared_bytes(head_dim, 3) <= shared_limit else 2
    size = _mma_shared_bytes(head_dim, stages)
    if size > shared_limit:
        return None
    name = f"partial_attention_mma<{kv_type}, {head_dim}, {stages}{tokens.expression}>"
    return Variant("partial_attention_mma", name, size, _MMA_ROWS, _TILE, _TILE * (stages - 1))


def _mma_shared_bytes(head_dim: int, stages: int) -> int:
    """Stages of keys and values, rows padded by 16 bytes."""
    return 2 * stages * _TILE * (head_dim + 8) * 2


def latent_kernel(kv_type: str, tokens: Tokens = ALL_TOKENS) -> Variant:
    """The multiply-add kernel of latent attention. It has a tile of keys at hand and one on its way."""
    step = _LATENT_TILE // _BYTES[kv_type]
    name = f"latent_attention<{kv_type}, {LATENT[0]}, {LATENT[1]}{tokens.expression}>"
    return Variant("latent_attention", name, 0, _MMA_ROWS, step, step)


def latent_mma_kernel(kv_type: str, shared_limit: int, tokens: Tokens = ALL_TOKENS) -> Variant | None:
    """The tensor-core kernel of latent attention; None where it needs more shared memory than there is.

    Two stages if two blocks of them fit beside each other, with 2 KiB more for each; else three, if they fit.
    """
    two, three = (_latent_shared_bytes(stages) for stages in (2, 3))
    stages, size = (3, three) if three <= shared_limit < 2 * (two + 2048) else (2, two)
    if size > shared_limit:
        return None
    name = f"latent_attention_mma<{kv_type}, {LATENT[0]}, {LATENT[1]}, {stages}{tokens.expression}>"
    in_flight = _LATENT_TILE * (stages - 1)
    return Variant("latent_attention_mma", name, size, _MMA_ROWS, _LATENT_TILE, in_flight)


def _latent_shared_bytes(stages: int) -> int:
    """Stages of keys, rows padded by 16 bytes, and each warp's part of the scores."""
    return stages * _LATENT_TILE * (LATENT[0] + 8) * 2 + _WARPS * _MMA_ROWS * _LATENT_TILE * 4


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

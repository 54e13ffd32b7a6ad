"""Every kernel that the backend can ask for, compiled for every architecture that it may meet.

``python tests/compile_matrix/matrix.py`` writes docs/compile-matrix.md.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from compile_matrix import compilers, cubin  # noqa: E402
from treeattn.backends.cuda import variants  # noqa: E402
from treeattn.backends.cuda.compile import source  # noqa: E402

__all__ = [
    "ARCHITECTURES",
    "BOUNDS",
    "Bound",
    "Row",
    "bound_of",
    "compiled",
    "expressions",
    "spill_exceptions",
]

#: Architecture and the shared memory that a block can have there, in bytes (CUDA programming guide, table
#: of technical specifications).
ARCHITECTURES = {
    "75": 64 << 10,
    "80": 163 << 10,
    "86": 99 << 10,
    "89": 99 << 10,
    "90": 227 << 10,
    "100": 227 << 10,
}
# Part of the static shared memory that cubins state for these, and taken by the system.
_RESERVED = {"90": 1024, "100": 1024}
_TYPES_16 = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Bound:
    """What a kernel's code may hold: instructions, divisions by numbers that are not constants, and rounds of
    loads before the main loop (`cubin.load_rounds`)."""

    instructions: int
    integer_divisions: int
    load_rounds: int


#: By module, on every architecture: a tenth or so above the largest.
BOUNDS = {
    "partial_attention": Bound(2600, 0, 5),
    "partial_attention_mma": Bound(2900, 0, 8),
    "latent_attention": Bound(3800, 0, 11),
    "latent_attention_mma": Bound(2600, 0, 12),
    "merge_partials": Bound(470, 0, 16),
    "take_maxima": Bound(30, 0, 1),
    "rescale": Bound(130, 0, 3),
    "finish": Bound(480, 2, 3),
    "pack_partials": Bound(130, 0, 5),
    "scale_lse": Bound(30, 0, 1),
    "pull_partials": Bound(1390, 3, 13),
}

#: The same for queries that see some tokens only, pages and caches of 8 bits.
OTHER_BOUNDS = {
    "partial_attention": Bound(5600, 0, 8),
    "partial_attention_mma": Bound(5600, 0, 12),
    "latent_attention": Bound(5600, 0, 22),
    "latent_attention_mma": Bound(4800, 0, 22),
}

#: Kernels that may use local memory, each with its reason: (module, expression, architecture).
spill_exceptions: dict[tuple[str, str, str], str] = {
    ("partial_attention", f"partial_attention<float8_e4m3fn, {shape}>", arch): (
        "8 bytes: a lane holds sixteen elements of each row, and of keys and values"
    )
    for shape, archs in {
        "64, 1": ("80", "86", "89"),
        "64, 4": ("90",),
        "128, 4, Paged<AllTokens>": ("75", "80", "86", "89"),
        "128, 4, Paged<VisibleTokens>": ("100",),
    }.items()
    for arch in archs
}


def _other(expression: str) -> bool:
    """Is it a kernel for `OTHER_BOUNDS`?"""
    return any(word in expression for word in ("VisibleTokens", "Paged", "float8"))


def bound_of(expression: str) -> Bound:
    """What a kernel's code may hold."""
    return (OTHER_BOUNDS if _other(expression) else BOUNDS)[expression.partition("<")[0]]


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel on one architecture. `dynamic`: bytes of dynamic shared memory at launch.
    `instructions`: counts by class, empty without nvdisasm."""

    expression: str
    arch: str
    registers: int
    stack: int
    shared: int
    dynamic: int
    instructions: dict[str, int]

    def resident_blocks(self) -> int:
        """Blocks of 128 threads that the registers and the shared memory of a multiprocessor allow."""
        by_registers = 65536 // (-(-self.registers * 32 // 256) * 256 * 4)
        by_shared = (ARCHITECTURES[self.arch] + 1024) // (self.shared + self.dynamic + 1024)
        return min(by_registers, by_shared, 16)


def expressions(module: str, arch: str, whole: bool = True) -> dict[str, int]:
    """Kernels of a module that the backend can ask for on an architecture, with their dynamic shared memory.

    whole=False: a choice of them that compiles in seconds, the narrow and the demanding ones.
    """
    if module == "partial_attention":
        kernels = {
            variants.fma_kernel(kind, head_dim, rows, tokens).expression: 0
            for tokens in (variants.Tokens(), variants.Tokens(visible=True))
            for kind in ("float", *_TYPES_16)
            for head_dim in variants.HEAD_DIMS
            for rows in (1, 2, 4)
        }
        kernels |= dict.fromkeys(_FEW, 0)
        return kernels if whole else {name: kernels[name] for name in _CHOICE}
    if module == "partial_attention_mma":
        types, head_dims = (_TYPES_16, variants.HEAD_DIMS) if whole else (("bfloat16",), (80, 128, 256))
        wanted = (
            variants.mma_kernel(t, d, ARCHITECTURES[arch], variants.Tokens(visible, paged))
            for visible, paged in _TOKENS
            for t in types
            for d in (head_dims if not paged else (128, 256))
        )
        return {k.expression: k.shared_bytes for k in wanted if k} if int(arch) >= 80 else {}
    if module == "latent_attention":
        kinds = ("float", *_TYPES_16, *variants.TYPES_8) if whole else ("float", "bfloat16", "float8_e4m3fn")
        return {
            variants.latent_kernel(kind, variants.Tokens(*tokens)).expression: 0
            for tokens in (_TOKENS if whole else (_TOKENS[0], _TOKENS[3]))
            for kind in kinds
        }
    if module == "latent_attention_mma":
        kernels = (
            variants.latent_mma_kernel(kind, ARCHITECTURES[arch], variants.Tokens(*tokens))
            for tokens in (_TOKENS if whole else (_TOKENS[0], _TOKENS[3]))
            for kind in (_TYPES_16 if whole else ("bfloat16",))
        )
        return {k.expression: k.shared_bytes for k in kernels if k} if int(arch) >= 80 else {}
    return {module: 0}


_TOKENS = ((False, False), (True, False), (False, True), (True, True))
# Caches of 8 bits and in pages: what is asked for with all others as well would take an hour to compile.
_FEW = tuple(
    variants.fma_kernel(kind, head_dim, rows, variants.Tokens(*tokens)).expression
    for kind, head_dims, kinds in (
        ("float8_e4m3fn", variants.HEAD_DIMS, _TOKENS[:1]),
        ("float8_e4m3fn", (128,), _TOKENS[1:]),
        ("float8_e5m2", (128,), _TOKENS[:1]),
        ("bfloat16", (128, 256), _TOKENS[2:]),
        ("float", (128,), _TOKENS[2:]),
    )
    for tokens in kinds
    for head_dim in head_dims
    for rows in (1, 2, 4)
)
_CHOICE = tuple(
    variants.fma_kernel(*kernel, variants.Tokens(*tokens)).expression
    for tokens, kernels in (
        (_TOKENS[0], (("float", 80, 2), ("float", 128, 1), ("float", 256, 4), ("float16", 96, 2))),
        (_TOKENS[0], (("bfloat16", 64, 1), ("bfloat16", 128, 1), ("bfloat16", 128, 4))),
        (_TOKENS[0], (("float8_e4m3fn", 128, 1), ("float8_e4m3fn", 128, 4), ("float8_e5m2", 128, 1))),
        (_TOKENS[1], (("float", 256, 4), ("bfloat16", 128, 1), ("bfloat16", 128, 4))),
        (_TOKENS[2], (("bfloat16", 128, 1),)),
        (_TOKENS[3], (("float8_e4m3fn", 128, 4),)),
    )
    for kernel in kernels
)


def compiled(module: str, arch: str, whole: bool = True) -> list[Row]:
    """What became of each kernel of `expressions`. Kept among the temporary files by compiler and source."""
    wanted = expressions(module, arch, whole)
    if not wanted:
        return []
    nvdisasm = compilers.find_tool("nvdisasm")
    key = json.dumps(
        [compilers.compiler_name(), compilers.FLAGS, arch, source(module), wanted, bool(nvdisasm)]
    )
    folder = Path(tempfile.gettempdir()) / f"treeattn-compile-matrix-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    kept = (
        folder / f"{hashlib.sha256(key.encode() + Path(cubin.__file__).read_bytes()).hexdigest()[:20]}.json"
    )
    if not kept.exists():
        binary = compilers.compile_cubin(source(module), list(wanted), arch)
        counts = cubin.instruction_counts(binary, nvdisasm) if nvdisasm else {}
        rows = [
            asdict(
                Row(
                    _plain(name),
                    arch,
                    r.registers,
                    r.stack,
                    r.shared,
                    wanted[_plain(name)],
                    counts.get(name, {}),
                )
            )
            for name, r in cubin.read_resources(binary).items()
        ]
        unfinished = kept.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(rows), encoding="utf-8")
        unfinished.replace(kept)
    order = list(wanted)
    rows = [Row(**row) for row in json.loads(kept.read_text(encoding="utf-8"))]
    rows = [replace(row, shared=max(0, row.shared - _RESERVED.get(arch, 0))) for row in rows]
    return sorted(rows, key=lambda row: order.index(row.expression))


@functools.cache
def _plain(mangled: str) -> str:
    """The C++ expression of a mangled kernel name."""
    result = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout.strip()
    return result.removeprefix("void ").partition("(")[0].replace("> >", ">>").replace(", AllTokens>", ">")


MODULES = (
    *("partial_attention", "partial_attention_mma", "latent_attention", "latent_attention_mma"),
    *("merge_partials", "take_maxima", "rescale", "finish"),
    *("pack_partials", "scale_lse", "pull_partials"),
)


def page() -> str:
    """The page for the docs."""
    matrix = {module: [row for a in ARCHITECTURES for row in compiled(module, a)] for module in MODULES}
    lines = [
        "# Compile matrix",
        "",
        f"Written by `python tests/compile_matrix/matrix.py` with {compilers.compiler_name()}, no GPU:",
        "registers of a thread (r), blocks of 128 threads that fit on a multiprocessor by registers and",
        "shared memory (b), bytes of stack where there are any, and instructions (i). No figure here is a",
        "speed, and none of these kernels has run on a GPU yet.",
        "",
        "What a launch costs beside its bytes shows in the code: its size, divisions of integers by what is",
        "only known at launch, and how many rounds of loads from global memory have to come back one after",
        "another before the main loop (all branches counted, those too that only an unaligned q takes). The",
        "most over all kernels of a file and all architectures, and what the tests allow:",
        "",
        "| file | instructions | divisions | rounds of loads |",
        "|---|---|---|---|",
        *(_most(module, rows) for module, rows in matrix.items()),
        "",
        "The last parameter of a kernel is which tokens it takes: all valid ones where none is named, with",
        "`VisibleTokens` what its queries may see, `Paged` in pages. These, and caches of 8 bits, of both of",
        "which the tables below have a choice, are counted apart:",
        "",
        "| file | instructions | divisions | rounds of loads |",
        "|---|---|---|---|",
        *(_most(module, matrix[module], other=True) for module in OTHER_BOUNDS),
        "",
    ]
    for module in MODULES:
        table: dict[str, dict[str, Row]] = {e: {} for a in ARCHITECTURES for e in expressions(module, a)}
        for arch in ARCHITECTURES:
            for row in compiled(module, arch):
                table[row.expression][arch] = row
        lines += [
            f"## {module}",
            "",
            "| kernel | shared, bytes | " + " | ".join(f"sm_{a}" for a in ARCHITECTURES) + " |",
        ]
        lines += ["|---|---|" + "---|" * len(ARCHITECTURES)]
        for expression, cells in table.items():
            shared = sorted({row.shared + row.dynamic for row in cells.values()})
            numbers = [_cell(cells.get(arch)) for arch in ARCHITECTURES]
            lines.append(f"| `{expression}` | {', '.join(map(str, shared))} | " + " | ".join(numbers) + " |")
        lines.append("")
    lines += ["A dash: the backend does not ask for this kernel there.", ""]
    if spill_exceptions:
        lines += ["Kernels that may use local memory:", ""]
        lines += [f"- `{e}` on sm_{a}: {why}" for (_, e, a), why in spill_exceptions.items()] + [""]
    return "\n".join(lines)


def _most(module: str, rows: list[Row], other: bool = False) -> str:
    bound = (OTHER_BOUNDS if other else BOUNDS)[module]
    rows = [row for row in rows if _other(row.expression) == other]
    pairs = (
        ("instructions", bound.instructions),
        ("integer_division", bound.integer_divisions),
        ("load_rounds", bound.load_rounds),
    )
    cells = (f"{max(row.instructions[name] for row in rows)} (at most {most})" for name, most in pairs)
    return f"| `{module}` | {' | '.join(cells)} |"


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    stack = f", stack {row.stack}" if row.stack else ""
    return f"{row.registers} r, {row.resident_blocks()} b, {row.instructions['instructions']} i{stack}"


if __name__ == "__main__":
    (ROOT / "docs" / "compile-matrix.md").write_text(page(), encoding="utf-8")

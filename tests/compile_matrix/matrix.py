"""Every kernel that the backend can ask for, compiled for every architecture that it may meet.

`python -m tests.compile_matrix.matrix` compiles them all, which takes an hour, and prints a table of their
registers, resident blocks, stack, shared memory and instructions. With `--write` it compiles the choice of
them that the tests look at, and writes anew what these cost, to `costs.json` beside this file.
"""

import itertools
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from tests.compile_matrix import nvidia
from tests.support.builds import kept
from treeattn.backends.cuda import variants
from treeattn.backends.cuda.compile import source

#: Architecture, and the shared memory that a block can have there (CUDA programming guide).
ARCHITECTURES = {
    "75": 64 << 10,
    "80": 163 << 10,
    "86": 99 << 10,
    "89": 99 << 10,
    "90": 227 << 10,
    "100": 227 << 10,
    "120": 99 << 10,
}
_TEMPLATES = ("partial_attention", "attention_mma", "attention_cluster", "attention_rows", "merge_splits")
_PLAIN = ("merge_partials", "take_maxima", "rescale", "finish", "pack_partials", "scale_lse", "pull_partials")
_COSTS = Path(__file__).with_name("costs.json")
MODULES = (*_TEMPLATES, *_PLAIN)
_TOKENS = [variants.Tokens(visible, paged) for paged in (False, True) for visible in (False, True)]
_TYPES_16 = ("float16", "bfloat16")
_ROWS = (1, 2, 4)
# Type, head dimensions, rows and kinds of tokens: of those that would take an hour in all combinations ..
_FEW = [
    ("float8_e4m3fn", variants.HEAD_DIMS, _ROWS, _TOKENS[:1]),
    ("float8_e4m3fn", (128,), _ROWS, _TOKENS[1:]),
    ("float8_e5m2", (128,), _ROWS, _TOKENS[:1]),
    ("bfloat16", (128, 256), _ROWS, _TOKENS[2:]),
    ("float", (128,), _ROWS, _TOKENS[2:]),
]
# .. and of all, for a run of minutes.
_CHOICE = [
    ("float", (80,), (2,), _TOKENS[:1]),
    ("float", (256,), (4,), _TOKENS[:1]),
    ("float", (512,), (2,), _TOKENS[:1]),
    ("bfloat16", (64,), (1,), _TOKENS[:1]),
    ("bfloat16", (128,), (1, 4), _TOKENS[:1]),
    ("bfloat16", (128,), (1,), _TOKENS[1:3]),
    ("float8_e4m3fn", (128,), (1, 4), _TOKENS[:1]),
    ("float8_e5m2", (128,), (1,), _TOKENS[:1]),
]
# Of the tensor-core kernel: type of q, head dimension, rows and kind of tokens.
_LATENT = [
    (t, variants.LATENT[0], rows, tokens) for t in _TYPES_16 for rows in (16, 32, 64) for tokens in _TOKENS
]
_FEW_MMA = [
    *(("bfloat16", 128, 16, tokens) for tokens in _TOKENS[:3]),
    ("bfloat16", 128, 32, _TOKENS[0]),
    *(("bfloat16", 128, rows, tokens) for rows in (64, 256) for tokens in _TOKENS[:2]),
    ("bfloat16", 256, 16, _TOKENS[0]),
    ("bfloat16", 512, 16, _TOKENS[0]),
    ("float16", 576, 16, _TOKENS[0]),
    ("bfloat16", 576, 32, _TOKENS[0]),
    ("bfloat16", 576, 64, _TOKENS[0]),
]
# Of clusters: the same, of 16 rows at most.
_FEW_CLUSTERED = [
    *(("bfloat16", 128, 4, tokens) for tokens in _TOKENS[::2]),
    ("float16", 80, 16, _TOKENS[0]),
]
_FEW_NARROW = (128, 576)  # head dimensions with a cache of 8 bits


class Launch(NamedTuple):
    """Of a kernel: bytes of dynamic shared memory, and threads, of a block."""

    shared: int = 0
    threads: int = 128


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel on one architecture; shared: bytes of a block, those of the launch included. threads: of a
    block."""

    expression: str
    arch: str
    registers: int
    stack: int
    shared: int
    threads: int
    counts: dict[str, int]

    @property
    def costs(self) -> dict[str, int]:
        """What is held to the last known numbers; loop_bytes: of a warp in a turn of the main loop."""
        kept = (
            "instructions",
            "local_memory",
            "divisions",
            "load_rounds",
            "loads_at_once",
            "loop",
            "loop_bytes",
        )
        own = {"registers": self.registers, "stack": self.stack, "shared": self.shared}
        return own | {name: self.counts[name] for name in kept}

    @property
    def resident_blocks(self) -> int:
        """Blocks that the registers and the shared memory of a multiprocessor allow."""
        by_registers = 65536 // (-(-self.registers * 32 // 256) * 256 * (self.threads // 32))
        return min(by_registers, (ARCHITECTURES[self.arch] + 1024) // (self.shared + 1024), 16)


def costs() -> dict[str, dict[str, dict[str, int]]]:
    """What each kernel cost when `--write` was called last: `Row.costs` by architecture and expression."""
    return json.loads(_COSTS.read_text())  # type: ignore[no-any-return]


def expressions(module: str, arch: str, whole: bool = False) -> dict[str, Launch]:
    """Kernels of a module that the backend can ask for, and how it launches them.

    whole=False: a choice of them that compiles in seconds, the narrow and the demanding ones.
    """
    if module == "pull_partials":
        return {f"{module}<{tables}>": Launch() for tables in ("InParameters", "InMemory")}
    if module in _PLAIN:
        return {module: Launch()}
    if module == "merge_splits":
        found = [variants.merge_kernel(512, rows) for rows in ((1, 2, 16, 32, 64) if whole else (2, 64))]
        many = {"merge_splits<128, 128, 128>": Launch()} if int(arch) >= 80 else {}
        return {kernel: Launch() for kernel in found if kernel} | many
    if module == "partial_attention":
        every = [(kind, variants.HEAD_DIMS, _ROWS, _TOKENS[:2]) for kind in ("float", *_TYPES_16)] + _FEW
        chosen = every if whole else _CHOICE
        kinds = itertools.chain.from_iterable(itertools.product([kind], *rest) for kind, *rest in chosen)
        return {variants.fma_kernel(*one).expression: Launch() for one in kinds}
    if int(arch) < (90 if module == "attention_cluster" else 80):
        return {}
    every = itertools.product(_TYPES_16, variants.HEAD_DIMS, (16, 32, 64, 256), _TOKENS)
    kinds = [*every, *_LATENT] if whole else _FEW_MMA
    found = [
        variants.mma_kernel(q_type, kv_type, head_dim, rows, ARCHITECTURES[arch], tokens)
        for q_type, head_dim, rows, tokens in kinds
        for kv_type in (q_type, *variants.TYPES_8)
        if kv_type == q_type
        or whole
        or ((kv_type, tokens) == ("float8_e4m3fn", _TOKENS[0]) and head_dim in _FEW_NARROW)
    ]
    if module == "attention_cluster":
        every = itertools.product(_TYPES_16, (64, 80, 96, 128), (16,), _TOKENS[::2])
        found = [
            variants.cluster_kernel(kind, kind, head_dim, rows, ARCHITECTURES[arch], tokens)
            for kind, head_dim, rows, tokens in (every if whole else _FEW_CLUSTERED)
        ]
    return {
        kernel.expression: Launch(kernel.shared_bytes, kernel.threads)
        for kernel in found
        if kernel and kernel.module == module
    }


def compiled(module: str, arch: str, whole: bool = False) -> list[Row]:
    """What became of each kernel of `expressions`."""
    wanted = expressions(module, arch, whole)

    def measure(file: Path) -> None:
        found = nvidia.kernels(nvidia.compile_cubin(source(module), list(wanted), arch))
        rows = [
            Row(
                *(name, arch, kernel.registers, kernel.stack),
                shared=kernel.shared + wanted[name].shared,
                threads=wanted[name].threads,
                counts=kernel.counts,
            )
            for name, kernel in ((_plain(mangled), kernel) for mangled, kernel in found.items())
        ]
        file.write_text(json.dumps([asdict(row) for row in rows]))

    facts = json.dumps([nvidia.compiler_version(), nvidia.FLAGS, arch, wanted])
    file = kept(".json", (facts, source(module), Path(nvidia.__file__).read_bytes()), measure)
    rows = [Row(**row) for row in json.loads(file.read_text())]
    return sorted(rows, key=lambda row: list(wanted).index(row.expression))


def _plain(mangled: str) -> str:
    """The C++ expression of a mangled kernel name."""
    result = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout.strip()
    return result.removeprefix("void ").partition("(")[0].replace("> >", ">>").replace(", AllTokens>", ">")


def write() -> None:
    """Write `costs.json` anew."""
    table = {
        arch: {
            row.expression: row.costs
            for module in MODULES
            if expressions(module, arch)
            for row in compiled(module, arch)
        }
        for arch in ARCHITECTURES
    }
    rows = [
        f'  "{arch}": {{\n'
        + ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in kernels.items())
        + "\n  }"
        for arch, kernels in table.items()
    ]
    _COSTS.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def main() -> None:
    """Print the table."""
    print("| kernel | sm | registers | blocks | stack | shared | instructions |", "|---" * 7 + "|", sep="\n")
    for module, arch in itertools.product(MODULES, ARCHITECTURES):
        for row in compiled(module, arch, whole=True) if expressions(module, arch) else []:
            numbers = row.registers, row.resident_blocks, row.stack, row.shared, row.counts["instructions"]
            print(f"| `{row.expression}` | {arch} | {' | '.join(map(str, numbers))} |", flush=True)


if __name__ == "__main__":
    write() if sys.argv[1:] == ["--write"] else main()

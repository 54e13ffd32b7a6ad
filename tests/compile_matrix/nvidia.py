"""What NVRTC makes of CUDA sources, as nvdisasm shows it: resources and instructions of each kernel.

Some of what a launch costs shows in the code alone. A division by a number that is only known at launch is
some 20 instructions one behind the other; code that was not run lately is fetched as it runs; and each round
of loads that has to come back before the next can be sent is a latency of memory.
"""

import ctypes
import functools
import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FLAGS = ("-std=c++17", "-ftz=true", "--device-as-default-execution-space")  # as CuPy compiles

#: Classes of instructions, as regular expressions over SASS.
CLASSES = {
    "load_16_bytes": r"\bLDG\.(?:\S+\.)?128\b",
    "copy_16_bytes": r"\bLDGSTS\S*\.128",
    # Loads and copies with a policy for the second level of caches: before sm_90 no others have descriptors.
    "hinted": r"\bLDG\.\S*\.NA\.\S* \S+, desc|\bLDGSTS\S*\.128 \[\S+\], desc",
    "matrix_multiply": r"\bHMMA\.16816",
    "matrix_load": r"\bLDSM\.",
    "local_memory": r"\b(?:LDL|STL)\b",
    # How compilers divide integers: to float, rounded up, and the reciprocal; 64-bit ones by a call.
    "divisions": r"\bI2F\S*\.RP\b|\bCALL\S*\s.*__cuda_sm\S*_(?:div|rem)_[su]",
    "instructions": r"^(?!NOP)",
}
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?);")
_UNIFORM = re.compile(r"\bUR(\d+)\b")
_WRITES_UNIFORM = re.compile(r"U|R2UR|S2UR|LDCU|VOTEU|C?REDUX")
# Only the main loop reads past the cache, multiplies matrices, or adds what lanes found of keys.
_STREAMED = re.compile(r"\bLDG\.\S*\.NA\.|\bHMMA\.|\bSHFL\.")


class CompileError(RuntimeError):
    """What the compiler said."""


class Kernel(NamedTuple):
    """Registers of a thread, bytes of its stack, static bytes of a block, and how often each class occurs."""

    registers: int
    stack: int
    shared: int
    counts: dict[str, int]


@functools.cache
def _from_wheel(pattern: str) -> str | None:
    """A file of the wheels of NVIDIA."""
    specification = importlib.util.find_spec("nvidia")
    folders = (specification.submodule_search_locations or []) if specification else []
    return next((str(path) for folder in folders for path in sorted(Path(folder).glob(pattern))), None)


def problem() -> str | None:
    """Why nothing can be compiled or read here, or None."""
    found = _from_wheel("*/lib/libnvrtc.so.[0-9]*") and _from_wheel("*/bin/nvdisasm")
    return None if found else "no NVRTC with nvdisasm: pip install 'treeattn[nvrtc]'"


def nvrtc() -> Path:
    """The NVRTC that is installed."""
    return Path(_from_wheel("*/lib/libnvrtc.so.[0-9]*") or "")


@functools.cache
def _loaded(compiler: Path) -> ctypes.CDLL:
    """With what it looks for by name alone, which lies beside it."""
    for builtins in compiler.parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins))
    return ctypes.CDLL(str(compiler))


def compiler_version(compiler: Path | None = None) -> str:
    """Of an NVRTC, None: of the one that is installed."""
    numbers = ctypes.c_int(), ctypes.c_int()
    _loaded(compiler or nvrtc()).nvrtcVersion(*map(ctypes.byref, numbers))
    return "NVRTC {}.{}".format(*(number.value for number in numbers))


def architectures(compiler: Path) -> list[str]:
    """Those that an NVRTC knows, such as "90"."""
    library, count = _loaded(compiler), ctypes.c_int()
    library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    known = (ctypes.c_int * count.value)()
    library.nvrtcGetSupportedArchs(known)
    return list(map(str, known))


def compile_cubin(code: str, expressions: Sequence[str], arch: str, compiler: Path | None = None) -> bytes:
    """The cubin of kernels of one text, for an architecture such as "90", by an NVRTC, None: the one that is
    installed; CompileError with the log."""
    library, program, size = _loaded(compiler or nvrtc()), ctypes.c_void_p(), ctypes.c_size_t()

    def text(what: str) -> bytes:
        getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(library, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw

    options = [option.encode() for option in (f"-arch=sm_{arch}", *FLAGS)]
    library.nvrtcCreateProgram(ctypes.byref(program), code.encode(), b"treeattn.cu", 0, None, None)
    try:
        for expression in expressions:
            library.nvrtcAddNameExpression(program, expression.encode())
        if library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
            raise CompileError(text("ProgramLog").decode())
        return text("CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def disassembled(cubin: bytes) -> tuple[str, dict[str, str]]:
    """All that nvdisasm says, and of each kernel, by mangled name, the code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [str(_from_wheel("*/bin/nvdisasm")), file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return text, dict(re.findall(r"^\.text\.(\S+):$(.*?)(?=^//-----|\Z)", text, re.M | re.S))


def kernels(cubin: bytes) -> dict[str, Kernel]:
    """Every kernel, by mangled name."""
    text, bodies = disassembled(cubin)
    fact = r"EIATTR_{}\n(?:.*\n)*?.*index@\((\S+)\)\n.*\.word\s+(\S+)"
    facts = [dict(re.findall(fact.format(name), text)) for name in ("REGCOUNT", "FRAME_SIZE")]
    shared = dict(re.findall(r"^\.nv\.shared\.(\S+):\n\s+\.zero\s+(\d+)", text, re.M))
    found = {}
    for name, body in bodies.items():
        code = _INSTRUCTION.findall(body)
        counts = {kind: sum(bool(re.search(one, line)) for line in code) for kind, one in CLASSES.items()}
        numbers = (int(numbers_of[name], 16) for numbers_of in facts)
        found[name] = Kernel(*numbers, int(shared.get(name, 0)), counts | _loads(body))
    return found


def unwritten_registers(body: str) -> set[str]:
    """Uniform registers that instructions read and none of them writes: what lies there is left over from
    another kernel, and as a descriptor of memory an illegal instruction."""
    read, written = set[int](), set[int]()
    for instruction in _INSTRUCTION.findall(body):
        operation, _, operands = re.sub(r"^@!?U?P\w+\s+", "", instruction).partition(" ")
        named = [[int(number) for number in _UNIFORM.findall(one)] for one in operands.split(",")]
        # A result comes first, or behind a predicate that is one too.
        results = next(filter(None, named[:2]), []) if _WRITES_UNIFORM.match(operation) else []
        width = 4 if ".128" in operation else 2 if re.search(r"\.64|\.WIDE", operation) else 1
        written |= {first + i for first in results[:1] for i in range(width)}
        every = [number for numbers in named for number in numbers]
        read |= set(every[len(results[:1]) :])
    return {f"UR{number}" for number in read - written}


def _loads(body: str) -> dict[str, int]:
    loop = main_loop(body)
    sizes = {"loop": len(loop), "loop_bytes": 32 * sum(map(_streamed_bytes, loop))}
    waits = {"loads_of_a_look": loads_of_a_look(body)}
    return {"load_rounds": load_rounds(body), "loads_at_once": loads_at_once(body)} | sizes | waits


def main_loop(body: str) -> list[str]:
    """Instructions of the shortest loop that multiplies most matrices or, where none does, brings most from
    memory."""
    lines, loops = _loops(body)

    def work(loop: tuple[int, int]) -> tuple[int, int, int]:
        inside = lines[slice(*loop)]
        products = sum("HMMA." in line for line in inside)
        return products, sum(map(_streamed_bytes, inside)), -len(inside)

    best = max(loops, key=work, default=(0, 0))
    return lines[slice(*best)] if work(best)[:2] > (0, 0) else []


def _streamed_bytes(instruction: str) -> int:
    """That a thread asks memory for, past the cache."""
    return 16 * bool(re.search(r"\bLDG\.\S*\.NA\.\S*128|\bLDGSTS\S*\.128", instruction))


def _loops(body: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Instructions, and where loops of them begin and end, in the order of their ends."""
    lines, labels = [], {}
    for line in body.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(lines)
        lines += _INSTRUCTION.findall(line)
    branches = [
        (labels.get(found[1], len(lines)), end + 1)
        for end, line in enumerate(lines)
        if (found := re.search(r"\bBRA\b.*\((\.L_\w+)\)", line))
    ]
    return lines, [loop for loop in branches if loop[0] < loop[1]]


def loads_at_once(body: str) -> int:
    """The most loads, of global memory or of any, that are on their way before something needs one of them,
    along the code as it lies there."""
    most, loads, pending = 0, 0, set[int]()
    for instruction in _INSTRUCTION.findall(body):
        load = re.search(r"\bLDG?((?:\.\S*)?)\s+R(\d+)", instruction)
        named = [int(number) for number in re.findall(r"\bR(\d+)\b", instruction)]
        if pending & set(named[1 if load else 0 :]):
            loads = 0
            pending.clear()
        if load:
            loads += 1
            pending |= {named[0] + i for i in range(_registers(load[1]))}
        most = max(most, loads)
    return most


def loads_of_a_look(body: str) -> int:
    """Loads in each turn of the shortest loop that looks at what another device writes; 0 without one."""
    lines, loops = _loops(body)
    turns = [lines[slice(*loop)] for loop in loops]
    looks = [turn for turn in turns if any(re.search(r"\bLD\S*\.STRONG\.SYS", line) for line in turn)]
    return sum(bool(re.search(r"\bLDG?\.", line)) for line in min(looks, key=len, default=[]))


def _registers(suffix: str) -> int:
    """Of a load, by what stands behind its name."""
    return 4 if ".128" in suffix else 2 if ".64" in suffix else 1


def load_rounds(body: str) -> int:
    """How many rounds of loads from global memory have to come back one after another before the main loop,
    counted along the code as it lies there, all branches taken; without a main loop, in all of it.

    A round ends where something needs what a load of it brings. Asynchronous copies are not waited for before
    the loop.
    """
    rounds, pending = 0, set[int]()
    for instruction in _before_the_main_loop(body):
        load = re.search(r"\bLDG(\S*)\s+(R\d+|RZ)", instruction)
        named = [int(number) for number in re.findall(r"\bR(\d+)\b", instruction)]
        if pending & set(named[1 if load else 0 :]):  # a load only writes the first
            pending.clear()
        if load and load[2] != "RZ":
            rounds += not pending
            pending |= {named[0] + i for i in range(_registers(load[1]))}
    return rounds


def _before_the_main_loop(body: str) -> list[str]:
    """Instructions up to where the first loop begins that reads keys, or multiplies matrices."""
    lines, loops = _loops(body)
    begins = (begin for begin, end in loops if any(map(_STREAMED.search, lines[begin:end])))
    return lines[: next(begins, len(lines))]

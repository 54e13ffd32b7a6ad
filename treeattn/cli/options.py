"""Options that commands share: types of values, groups that become one object, and where results go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

import click

from treeattn import files
from treeattn.collectives.runtime.communicator import Communicator
from treeattn.errors import ArgumentError, TreeattnError
from treeattn.mpi import communicators
from treeattn.mpi.communicators import MpiCommunicator, collectively, must_match
from treeattn.report import Report
from treeattn.shards import LAYOUTS, parse_layout

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from treeattn.backends.device import Device

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any])

_UNITS = {"Ki": 1024, "Mi": 1024**2, "k": 1000, "M": 1000**2}


def number(text: str) -> int:
    """Read a whole number; k = 1000, Ki = 1024, M and Mi likewise. Raises `ArgumentError`."""
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    digits = text.removesuffix(unit)
    if not digits.strip().isdecimal() or len(digits) > 18:
        several = ", or where several may stand FIRST:LAST:xFACTOR" * (":" in text)
        raise ArgumentError(f"{text!r:.40}: give a whole number, such as 65536 or 64Ki{several}")
    return int(digits) * _UNITS.get(unit, 1)


def numbers(text: str) -> list[int]:
    """Read whole numbers from 1 on, separated by commas, each once; FIRST:LAST:xFACTOR stands for several.
    Raises `ArgumentError`."""
    values: list[int] = []
    for part in text.split(","):
        first, last, factor = part.split(":") if part.count(":") == 2 else (part, part, "x2")
        value, most, by = number(first), number(last), number(factor.removeprefix("x"))
        if not 1 <= value <= most or by < 2 or not factor.startswith("x"):
            raise ArgumentError(f"{part!r:.40}: give numbers from 1 on, or FIRST:LAST:xFACTOR as in 8:1Mi:x2")
        while value <= most:
            values.append(value)
            value *= by
    return list(dict.fromkeys(values))


def whole_numbers(text: str) -> list[int]:
    """Read plain whole numbers separated by commas. Raises `ArgumentError`."""
    if not all(one.strip().isdecimal() and len(one) <= 18 for one in text.split(",")):
        raise ArgumentError(f"{text:.40}: whole numbers, separated by commas")
    return [int(one) for one in text.split(",")]


def choices(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """Make a reader of lists of `known` names, each once. It raises `ArgumentError`."""

    def choose(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
        for name in names:
            if name not in known:
                raise ArgumentError(f"{name!r} is unknown: choose from {', '.join(known)}")
        return names

    return choose


def read(reader: Callable[[str], T]) -> Callable[[click.Context, click.Parameter, str | None], T | None]:
    """Make the callback of an option that `reader` reads; its error becomes one of the option."""

    def convert(context: click.Context, option: click.Parameter, text: str | None) -> T | None:
        try:
            return None if text is None else reader(text)
        except TreeattnError as error:
            raise click.BadParameter(str(error), context, option) from None

    return convert


FILE = click.Path(path_type=Path)
#: Sizes of what is allocated or drawn; how often something is done; ranks that a schedule is made for.
SIZE, COUNT, RANKS = click.IntRange(1, 2**20), click.IntRange(1, 10**9), click.IntRange(1, 2**20)
RESULT = click.option("--result", type=click.Choice(["replicated", "root"]), default="replicated",
                      help="Where it ends: on every rank, or on rank 0 for half the messages.")  # fmt: skip

DEVICE = click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu",
                      help="Where each rank computes.")  # fmt: skip
CLUSTER = click.option("--cluster", metavar="NAME|FILE.toml",
                       help="A shipped cluster or a file; default TREEATTN_CLUSTER.")  # fmt: skip
LAYOUT = click.option("--layout", callback=read(parse_layout), default="contiguous",
                      metavar="|".join(LAYOUTS), help="Which tokens go to which rank.")  # fmt: skip
REPEAT = click.option("--repeat", type=COUNT, default=10, help="Timed steps after the first one.")


HEADS = click.option("--heads", type=SIZE, default=16)
HEAD_DIM = click.option("--head-dim", type=SIZE, default=128)


class Output:
    """Where a command leaves what it found: the screen, and the files of ``--out`` and ``--json``."""

    def __init__(self, json: Path | None = None, out: Path | None = None, wide: bool = False) -> None:
        self.json, self.out, self._wide = json, out, wide

    def open(self, *inputs: Path | None, world: Communicator | None = None) -> None:
        """Find out whether the files can be written, before any work, on rank 0. Collective with `world`.

        Raises `ArgumentError` for what cannot be written, and for one file that is named twice.
        """

        def opened() -> None:
            files.check_distinct([self.json, self.out], inputs)
            self._write_json, self.write = map(files.output_writer, (self.json, self.out))

        if world is None:
            opened()
        else:
            collectively(world, opened if world.rank == 0 else lambda: None)

    def draw(self, drawing: str, what: str) -> None:
        """Write a drawing, and say so; without ``--out`` print it."""
        self.write((drawing.rstrip("\n") + "\n").encode())
        print(f"{what} is in {self.out}" if self.out else drawing.rstrip("\n"))

    def tensors(self, out: ArrayLike, lse: ArrayLike, **about: str) -> None:
        """Write a result with metadata to ``--out``, a safetensors file."""
        self.write(files.save_tensors({"out": out, "lse": lse}, about))

    def report(self, made: Report, file: TextIO | None = None) -> None:
        """Write the facts, print the tables to `file` instead of standard output."""
        if self.json is not None:
            self._write_json(made.json())
        made.show(self._wide, file)


def output_options(
    out: str | None = None,
    required: str | None = None,
    wide: bool = False,
    json: str | None = "Write everything that was found.",
) -> Callable[[Command], Command]:
    """Decorate a command with the options of `Output`, which it takes as one argument, `output`.

    out, json: their help, for commands that have them. required: what ``--out`` takes, where it is needed.
    """
    made = {
        "json": click.option("--json", type=FILE, help=json),
        "wide": click.option("--wide", is_flag=True, help="Every column, however wide it becomes."),
        "out": click.option("--out", type=FILE, metavar=required, required=bool(required), help=out),
    }
    has = {"json": json is not None, "wide": wide, "out": out is not None}

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def combined(**given: Any) -> Any:
            output = Output(**{name: given.pop(name) for name in made if has[name]})
            return command(output=output, **given)

        decorated: Any = combined
        for name in made:
            decorated = made[name](decorated) if has[name] else decorated
        return cast(Command, decorated)

    return decorate


def ranks() -> Communicator:
    """The ranks of this job, of MPI or of torchrun, once all agree on their command line. Collective."""
    everyone, context = communicators.intracomm(None), click.get_current_context()
    must_match(everyone, {"the command line": f"{context.command.name} {context.params}"})
    return everyone


def world() -> MpiCommunicator:
    """The ranks of the job, for what goes by MPI alone. Raises `ArgumentError` below torchrun."""
    return communicators.mpi_intracomm(ranks(), f"treeattn {click.get_current_context().command.name}")


def own_device(world: Communicator, name: str) -> tuple[Device, str | None]:
    """The device of this rank, and what to say where ranks share one. Ranks of a node take its GPUs in turn.

    Collective. Raises `ArgumentError`, the same on every rank, where a rank has no such device.
    """
    from treeattn.backends import device as devices  # loaded where something is computed

    local = communicators.node_local_rank(world)

    def place() -> Any:
        if name == "cuda":
            from treeattn.backends.cuda import cupy_runtime

            if problem := cupy_runtime.problem():
                raise ArgumentError(problem)
            cupy_runtime.choose(local)
        return devices.find(name)

    device = collectively(world, place)
    if device.name == "cpu":
        return device, None
    from treeattn.decoder import gpu_reducers

    shared = gpu_reducers.shared_gpu(world, device.runtime)
    return device, f"{shared}: times include waiting for each other" if shared else None

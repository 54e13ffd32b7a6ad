"""What was asked for: the arguments of `jobs/emulated_cluster`, checked."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

__all__ = ["Plan", "parse"]

USAGE = """jobs/emulated_cluster [options] -- command ...

Run a command on an emulated cluster: several nodes on this one Linux machine. Needs root.

  jobs/emulated_cluster --nodes 4 --ranks-per-node 2 --delay 0.1ms -- mpiexec -n 8 treeattn doctor"""

MAX_NODES = 64
MOST_BITS_PER_SECOND = 10**12
BITS_PER_SECOND = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
BYTES = {None: 1, "Ki": 1 << 10, "Mi": 1 << 20}
NANOSECONDS = {"us": 10**3, "ms": 10**6, "s": 10**9}


@dataclass(frozen=True)
class Plan:
    """A cluster to be. `ranks_per_node` of each node; `bandwidth` in bit/s each way, None for unlimited;
    `delay` one way in nanoseconds; `noise`: length and period of interruptions of each core in microseconds;
    `traffic`: share of each link that others use, and the size of their messages."""

    nodes: int
    ranks_per_node: tuple[int, ...]
    placement: str
    bandwidth: int | None
    delay: int
    noise: tuple[float, float] | None
    traffic: tuple[float, int] | None
    yield_cores: bool
    measure: bool
    command: tuple[str, ...]


class _OneLine(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"emulated_cluster: {message}; --help lists the options", file=sys.stderr)
        raise SystemExit(2)


def _quantity(text: str, units: dict[str, int], example: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text)
    if found is None or found[2] not in units:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number with a unit of {', '.join(units)}: {example}"
        )
    return float(found[1]) * units[found[2]]


def bandwidth(text: str) -> int | None:
    """Bits per second of `1gbit`, `100mbit`, ..., or None for `none`."""
    if text == "none":
        return None
    rate = _quantity(text, BITS_PER_SECOND, "write for instance 1gbit, or none for no limit")
    if rate < 1000:
        raise argparse.ArgumentTypeError(
            f"{text!r} lets nothing through: at least 1kbit, or none for no limit"
        )
    if rate > MOST_BITS_PER_SECOND:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is more than any machine sends: none for no limit")
    return round(rate)


def delay(text: str) -> int:
    """Nanoseconds of `0.1ms`, `50us`, `1s`; `0ms` for none added."""
    duration = _quantity(text, NANOSECONDS, "write for instance 0.1ms")
    if duration > 10 * NANOSECONDS["s"]:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is more than the 10s that connections survive")
    if 0 < duration < NANOSECONDS["us"]:
        raise argparse.ArgumentTypeError(f"{text!r} is below the microsecond that timers reach: 0us for none")
    return round(duration)


def noise(text: str) -> tuple[float, float]:
    """Microseconds of `10us/1ms`: how long each core is interrupted, and once in how long on average."""
    length, _, period = text.partition("/")
    found = tuple(
        _quantity(part, NANOSECONDS, "write for instance 10us/1ms") / 1000 for part in (length, period)
    )
    if not 1 <= found[0] < found[1]:
        raise argparse.ArgumentTypeError(
            f"{text!r}: at least 1us, and shorter than what lies between: 10us/1ms"
        )
    return found[0], found[1]


def traffic(text: str) -> tuple[float, int]:
    """Share and bytes of `30%:64Ki`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)%(?::(\d+)(Ki|Mi)?)?", text)
    share = float(found[1]) / 100 if found else 0.0
    size = int(found[2] or 64) * BYTES[found[3] if found[2] else "Ki"] if found else 0
    if not 0 < share < 1 or not 0 < size <= 1 << 30:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a share below 100%: write for instance 30%, 30%:64Ki"
        )
    return share, size


def _count(most: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {most}")
        return int(text)

    return count


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(_count(1024), text.split(",")))


def parse(words: list[str]) -> Plan:
    """The plan that the command line asks for. Bad arguments: one line on stderr and exit code 2."""
    split = words.index("--") if "--" in words else len(words)
    options, command = words[:split], words[split + 1 :]
    parser = _OneLine(usage=USAGE, allow_abbrev=False)
    add = parser.add_argument
    add("--nodes", type=_count(MAX_NODES), metavar="N", help="default 4, or as many as R say")
    add("--ranks-per-node", type=_counts, default="1", metavar="R[,R..]",
        help="ranks that mpiexec puts on a node before it turns to the next, of each node if they differ; "
        "default 1")  # fmt: skip
    add("--placement", choices=("block", "cyclic"), default="block",
        help="block: a node's ranks are neighbours (default); cyclic: rank r is on node r mod N")  # fmt: skip
    add("--bandwidth", type=bandwidth, default="1gbit", metavar="RATE",
        help="of each node's link, each way: 100mbit, 1gbit, ..., none; default 1gbit")  # fmt: skip
    add("--delay", type=delay, default="0ms", metavar="TIME",
        help="added to every packet between nodes, one way: 50us, 0.1ms, ...; default none")  # fmt: skip
    add("--noise", type=noise, metavar="T/T",
        help="keep each core busy so long, once in so long on average: 10us/1ms; default never")  # fmt: skip
    add("--traffic", type=traffic, metavar="N%[:SIZE]",
        help="others send so much of each link, in messages of SIZE: 30%%:64Ki; default none")  # fmt: skip
    add("--yield", dest="yield_cores", action="store_true",
        help="MPICH's waiting ranks sleep instead of spin: for more ranks than cores")  # fmt: skip
    add("--measure", action="store_true",
        help="print the round trip and bandwidth really found between node0 and node1 first")  # fmt: skip
    given, rest = parser.parse_known_args(options)
    if rest:
        where = "" if command else ", and put -- before the command"
        parser.error(f"unknown argument {rest[0]!r}: see the options{where}")
    if not command and not given.measure:
        parser.error("no command: write it after --, for instance -- mpiexec -n 8 treeattn doctor")
    each = given.ranks_per_node
    given.nodes = given.nodes or (4 if len(each) == 1 else len(each))
    if len(each) not in (1, given.nodes) or given.nodes > MAX_NODES:
        parser.error(f"--ranks-per-node is of {len(each)} nodes: --nodes {len(each)}, at most {MAX_NODES}")
    given.ranks_per_node = each * (given.nodes // len(each))
    if given.placement == "cyclic" and len(set(each)) > 1:
        parser.error("--placement cyclic takes as many ranks on every node")
    if given.traffic and (given.bandwidth is None or given.nodes < 2):
        parser.error("--traffic is a share of a link between nodes: --nodes 2 and a --bandwidth")
    if given.measure and given.nodes < 2:
        parser.error("--measure needs two nodes to measure between: --nodes 2")
    return Plan(**vars(given), command=tuple(command))

"""What the system shows of the machine that this process is on: sockets, GPUs, network cards, links.

Read below one folder, the root of the file system but in tests. What cannot be read there is None or left
out: nothing is guessed, and no rank fails over it. Formats: Documentation/ABI of Linux (sysfs-bus-pci,
sysfs-class-infiniband, sysfs-devices-system-cpu), of amdkfd drivers/gpu/drm/amd/amdkfd/kfd_topology.c.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

ROOT = Path("/")

#: NVIDIA's abbreviations, as ``nvidia-smi topo -m`` has them.
LEGEND = (
    "NV#: so many NVLinks; XGMI: of AMD; PIX: one PCIe switch; PXB: several; PHB: one host bridge; "
    "NODE: one memory node; SYS: between sockets or memory nodes; ?: not shown"
)

#: (address, address) of two devices -> what joins them.
Pairs = dict[tuple[str, str], str]

_CORES, _NUMA, _PCI = "sys/devices/system/cpu", "sys/devices/system/node", "sys/bus/pci/devices"
_CARDS = ("sys/class/infiniband", "sys/class/cxi")  # verbs of any vendor; Slingshot
_KFD = "sys/class/kfd/kfd/topology/nodes"
_XGMI = "11"  # CRAT_IOLINK_TYPE_XGMI

_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
# PCI classes: 3D and other display controllers, processing accelerators; VGA is a processor's own
# graphics or a console's but for those vendors that build cards.
_ACCELERATORS, _VGA = ("0x0302", "0x0380", "0x1200"), "0x0300"
_VGA_CARDS = ("0x10de", "0x1002")


@dataclass(frozen=True, slots=True)
class PciDevice:
    """A GPU or a network card.

    way: from its host bridge through PCIe switches to its own address, as sysfs nests them; socket and numa:
    those it hangs off, None where the system does not say.
    """

    name: str
    model: str
    way: tuple[str, ...]
    socket: int | None
    numa: int | None

    @property
    def address(self) -> str:
        """On the PCI bus."""
        return self.way[-1]


@dataclass(frozen=True, slots=True)
class Devices:
    """Of one machine. links: a row for each GPU, of what joins it to every GPU and then to every card."""

    gpus: tuple[PciDevice, ...] = ()
    cards: tuple[PciDevice, ...] = ()
    links: tuple[tuple[str, ...], ...] = ()


def sockets(cores: Iterable[int], root: Path = ROOT) -> tuple[int, ...]:
    """Those that the cores belong to; empty where the system does not say it of each."""
    said = {_number(root / _CORES / f"cpu{core}/topology/physical_package_id") for core in cores}
    return () if None in said else tuple(sorted(number for number in said if number is not None))


def numa_nodes(cores: Iterable[int], root: Path = ROOT) -> tuple[int, ...]:
    """The memory nodes that the cores belong to; empty where the system shows none."""
    wanted = set(cores)
    found = (folder for folder in _entries(root / _NUMA) if re.fullmatch(r"node\d+", folder.name))
    return tuple(
        sorted(int(folder.name[4:]) for folder in found if wanted & _listed(_said(folder / "cpulist")))
    )


def active_cards(root: Path = ROOT) -> tuple[str, ...]:
    """Names of the network cards for messages that have a link, or do not say whether they have one."""
    return tuple(folder.name for folder in _cards(root))


def nvidia_smi(*words: str) -> str:
    """What the driver's tool prints; nothing where there is none, or no GPU."""
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        done = subprocess.run(
            ["nvidia-smi", *words], capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def devices(root: Path = ROOT, ask: Callable[..., str] | None = None) -> Devices:
    """GPUs in order of their addresses, cards by name, and links: NVLinks as the driver's tool says them,
    XGMI as the AMD driver does, all others by the PCIe switches and bridges that two share.

    ask: the tool, by default `nvidia_smi` where `root` is this machine's.
    """
    ask = ask or (nvidia_smi if root == ROOT else lambda *_: "")
    models = dict(_asked(ask)) or dict(_of_nvidia(root))
    found = sorted(_gpus(root, models), key=lambda item: item[0])
    gpus = tuple(_device(root, f"GPU {at}", model, address) for at, (address, model) in enumerate(found))
    cards = tuple(
        _device(root, folder.name, _rate(folder), (folder / "device").resolve().name)
        for folder in _cards(root)
        if os.path.exists(folder / "device")
    )
    direct: Pairs = dict(_nvlinks(list(models), ask)) | dict(_xgmi(root))
    links = tuple(tuple(_link(gpu, other, direct) for other in (*gpus, *cards)) for gpu in gpus)
    return Devices(gpus, cards, links)


def _device(root: Path, name: str, model: str, address: str) -> PciDevice:
    folder = root / _PCI / address
    numa, everyone = _number(folder / "numa_node"), list((root / _NUMA).glob("node[0-9]*"))
    if numa is None and len(everyone) == 1:
        numa = int(everyone[0].name[4:])  # firmware does not number the only one
    near = sockets(_listed(_said(folder / "local_cpulist")), root)
    return PciDevice(name, model, _way(folder), near[0] if len(near) == 1 else None, numa)


def _way(folder: Path) -> tuple[str, ...]:
    """The bus holds links into the tree of bridges."""
    parts = folder.resolve().parts
    first = next((at for at, part in enumerate(parts) if part.startswith("pci0")), len(parts) - 1)
    return parts[first:]


def _link(one: PciDevice, other: PciDevice, direct: Pairs) -> str:
    """In NVIDIA's abbreviations."""
    if one == other:
        return "-"
    if (one.address, other.address) in direct:
        return direct[one.address, other.address]
    if len(one.way) < 2 or len(other.way) < 2:
        return "?"
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one.way, other.way, strict=False)))
    if shared > 1:  # below a switch are its port and the device; two functions of one have not even a port
        return "PIX" if max(len(one.way), len(other.way)) - shared <= 2 else "PXB"
    if shared == 1:
        return "PHB"
    if one.numa is None or other.numa is None:
        return "?"
    return "NODE" if one.numa == other.numa else "SYS"


def _gpus(root: Path, models: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(address, model). Of NVIDIA's those that its driver has, if it says which: a container may have few of
    those on the bus."""
    for folder in _entries(root / _PCI):
        kind, vendor = _said(folder / "class")[:6], _said(folder / "vendor")
        if vendor not in _VENDORS or not (kind in _ACCELERATORS or (kind == _VGA and vendor in _VGA_CARDS)):
            continue
        if vendor == "0x10de" and models and folder.name not in models:
            continue
        number = f"{_VENDORS[vendor]} {vendor[2:]}:{_said(folder / 'device')[2:]}"
        yield folder.name, models.get(folder.name) or _said(folder / "product_name") or number


def _asked(ask: Callable[..., str]) -> Iterator[tuple[str, str]]:
    """(address, model) in the order of the tool's numbers."""
    for line in ask("--query-gpu=pci.bus_id,name", "--format=csv,noheader").splitlines():
        address, comma, model = line.partition(", ")
        if comma:
            yield _short(address), model.strip()


def _of_nvidia(root: Path) -> Iterator[tuple[str, str]]:
    for folder in _entries(root / "proc/driver/nvidia/gpus"):
        model = re.search(r"^Model:\s*(.+)$", _said(folder / "information"), re.MULTILINE)
        yield _short(folder.name), model[1].strip() if model else ""


def _short(address: str) -> str:
    """NVIDIA writes domains with eight digits, in capitals; the kernel with four."""
    domain, _, rest = address.strip().lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _nvlinks(addresses: Sequence[str], ask: Callable[..., str]) -> Iterator[tuple[tuple[str, str], str]]:
    """Of the matrix that the tool draws: rows of GPUs, whose first columns are GPUs too."""
    matrix = re.sub(r"\x1b\[[0-9;]*m", "", ask("topo", "-m")) if len(addresses) > 1 else ""
    for row in re.findall(r"^GPU(\d+)\s+(.*)$", matrix, re.MULTILINE):
        for column, cell in enumerate(row[1].split()[: len(addresses)]):
            if re.fullmatch(r"NV\d+", cell) and int(row[0]) < len(addresses):
                yield (addresses[int(row[0])], addresses[column]), cell


def _xgmi(root: Path) -> Iterator[tuple[tuple[str, str], str]]:
    nodes = {folder.name: _properties(folder / "properties") for folder in _entries(root / _KFD)}
    for name, here in nodes.items():
        for link in _entries(root / _KFD / name / "io_links"):
            said = _properties(link / "properties")
            there = nodes.get(said.get("node_to", ""), {})
            if said.get("type") == _XGMI and _located(here) and _located(there):
                yield (_located(here), _located(there)), "XGMI"


def _located(properties: dict[str, str]) -> str:
    """The PCI address of a node that is a GPU, else nothing."""
    place, domain = (int(properties.get(key, "0")) for key in ("location_id", "domain"))
    if not place:
        return ""
    return f"{domain:04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"


def _properties(path: Path) -> dict[str, str]:
    pairs = (line.split() for line in _said(path).splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _cards(root: Path) -> list[Path]:
    found = [folder for kind in _CARDS for folder in _entries(root / kind)]
    return [folder for folder in found if "ACTIVE" in (_said(folder / "ports/1/state") or "ACTIVE")]


def _rate(folder: Path) -> str:
    said = (_said(folder / "ports/1" / name) for name in ("link_layer", "rate"))
    return ", ".join(filter(None, said)) or "network card"


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir(), key=lambda path: [int(n) if n.isdecimal() else n for n in _cut(path)])
    except OSError:
        return []


def _cut(path: Path) -> list[Any]:
    """Digits apart, so that mlx5_10 comes after mlx5_9."""
    return re.split(r"(\d+)", path.name)


def _listed(text: str) -> set[int]:
    """0-3,8 -> 0, 1, 2, 3, 8."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _number(path: Path) -> int | None:
    """Of a file that holds one; None for none, and for -1, which is how drivers say that."""
    text = _said(path)
    return int(text) if text.isdecimal() else None


def _said(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""

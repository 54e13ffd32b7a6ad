"""A machine as Linux would show it, in a folder: two sockets, four GPUs, two network cards."""

from __future__ import annotations

from pathlib import Path

#: Cores of each socket, so that a machine of two cores has one on each.
CORES = ((0, 2), (1, 3))

# PCI address -> what is above it, from the host bridge inwards; its socket; class, vendor, number.
_LEFT, _RIGHT = "pci0000:16", "pci0000:97"
_SWITCH = (_RIGHT, "0000:97:01.0", "0000:98:00.0")
_H100, _CONNECTX = ("0x030200", "0x10de", "0x2330"), ("0x020700", "0x15b3", "0x1021")
DEVICES = {
    "0000:19:00.0": ((_LEFT, "0000:16:01.0", "0000:17:00.0", "0000:18:00.0"), 0, *_H100),
    "0000:1c:00.0": ((_LEFT, "0000:16:02.0"), 0, *_H100),
    "0000:9a:00.0": ((*_SWITCH, "0000:99:00.0"), 1, *_H100),
    "0000:9d:00.0": ((*_SWITCH, "0000:99:01.0", "0000:9b:00.0", "0000:9c:00.0"), 1, *_H100),
    "0000:1a:00.0": ((_LEFT, "0000:16:01.0", "0000:17:00.0", "0000:18:01.0"), 0, *_CONNECTX),
    "0000:c8:00.0": (("pci0000:c7", "0000:c7:01.0"), 1, *_CONNECTX),
    "0000:03:00.0": (("pci0000:00", "0000:00:1c.0"), 0, "0x030000", "0x1a03", "0x2000"),  # the console
}
GPUS = [address for address, (*_, vendor, _) in DEVICES.items() if vendor == "0x10de"]
CARDS = {"mlx5_0": "0000:1a:00.0", "mlx5_1": "0000:c8:00.0"}


def machine(root: Path) -> Path:
    """`root`, filled."""
    for socket, cores in enumerate(CORES):
        for core in cores:
            write(root / f"sys/devices/system/cpu/cpu{core}/topology/physical_package_id", socket)
        write(root / f"sys/devices/system/node/node{socket}/cpulist", ",".join(map(str, cores)))
    for address, (above, socket, kind, vendor, number) in DEVICES.items():
        folder = root.joinpath("sys/devices", *above, address)
        for name, text in {"class": kind, "vendor": vendor, "device": number, "numa_node": socket}.items():
            write(folder / name, text)
        write(folder / "local_cpulist", ",".join(map(str, CORES[socket])))
        link(root / "sys/bus/pci/devices" / address, folder)
    for name, address in CARDS.items():
        card = root / "sys/class/infiniband" / name
        write(card / "ports/1/state", "4: ACTIVE")
        write(card / "ports/1/link_layer", "InfiniBand")
        write(card / "ports/1/rate", "400 Gb/sec (4X NDR)")
        link(card / "device", root / "sys/bus/pci/devices" / address)
    write(root / "sys/class/infiniband/mlx5_2/ports/1/state", "1: DOWN")
    for address in GPUS:
        write(root / f"proc/driver/nvidia/gpus/{address}/information", "Model: \t\t NVIDIA H100\nIRQ: 1")
    return root


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)

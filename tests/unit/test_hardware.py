"""What the system shows of a machine, read from one that is made up."""

from __future__ import annotations

import shutil

import pytest

from tests.support.machine import DEVICES, GPUS, link, machine, write
from treeattn import hardware

LINKS = (
    ("-", "PHB", "SYS", "SYS", "PIX", "SYS"),
    ("PHB", "-", "SYS", "SYS", "PHB", "SYS"),
    ("SYS", "SYS", "-", "PXB", "SYS", "NODE"),
    ("SYS", "SYS", "PXB", "-", "SYS", "NODE"),
)


def test_sockets_and_memory_nodes_of_cores(tmp_path):
    root = machine(tmp_path)
    assert hardware.sockets({0, 2}, root) == (0,)
    assert hardware.sockets({0, 1}, root) == (0, 1)
    assert hardware.sockets({0, 9}, root) == ()  # of core 9 nothing is said
    assert hardware.numa_nodes({3}, root) == (1,)
    write(root / "sys/devices/system/cpu/cpu0/topology/physical_package_id", -1)  # as some virtual machines
    assert hardware.sockets({0, 2}, root) == ()


def test_gpus_cards_and_what_joins_them(tmp_path):
    found = hardware.devices(machine(tmp_path))
    assert [gpu.address for gpu in found.gpus] == GPUS
    assert [gpu.name for gpu in found.gpus] == ["GPU 0", "GPU 1", "GPU 2", "GPU 3"]
    assert {gpu.model for gpu in found.gpus} == {"NVIDIA H100"}
    assert [gpu.socket for gpu in found.gpus] == [gpu.numa for gpu in found.gpus] == [0, 0, 1, 1]
    assert [(card.name, card.socket) for card in found.cards] == [("mlx5_0", 0), ("mlx5_1", 1)]
    assert found.cards[0].model == "InfiniBand, 400 Gb/sec (4X NDR)"
    assert found.links == LINKS
    assert hardware.active_cards(tmp_path) == ("mlx5_0", "mlx5_1")


def test_without_a_driver_gpus_have_numbers_for_names(tmp_path):
    root = machine(tmp_path)
    shutil.rmtree(root / "proc")
    assert {gpu.model for gpu in hardware.devices(root).gpus} == {"NVIDIA 10de:2330"}


def test_a_container_has_the_gpus_that_its_driver_shows(tmp_path):
    root = machine(tmp_path)
    for address in GPUS[1:]:
        shutil.rmtree(root / "proc/driver/nvidia/gpus" / address)
    assert [gpu.address for gpu in hardware.devices(root).gpus] == GPUS[:1]


def test_nvlinks_are_what_the_drivers_tool_says(tmp_path):
    matrix = "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\x1b[0m\n" + "\n".join(
        f"GPU{row}\t" + "\t".join(" X " if row == column else "NV18" for column in range(4)) + "\tPIX\t0-3"
        for row in range(4)
    )
    listed = "".join(f"0000{address.upper()}, NVIDIA H100 80GB HBM3\n" for address in GPUS)
    found = hardware.devices(machine(tmp_path), lambda *words: matrix if words[0] == "topo" else listed)
    assert {gpu.model for gpu in found.gpus} == {"NVIDIA H100 80GB HBM3"}
    assert found.links[0] == ("-", "NV18", "NV18", "NV18", "PIX", "SYS")
    assert [row[4:] for row in found.links] == [row[4:] for row in LINKS]


def test_links_between_gpus_of_amd(tmp_path):
    root = machine(tmp_path)
    shutil.rmtree(root / "proc")
    for address in GPUS:
        write(root / "sys/bus/pci/devices" / address / "vendor", "0x1002")
        write(root / "sys/bus/pci/devices" / address / "product_name", "AMD Instinct MI300X")
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    write(nodes / "0/properties", "cpu_cores_count 4\nlocation_id 0")
    for at, address in enumerate(GPUS[:2], 1):
        bus = int(address.split(":")[1], 16)
        write(nodes / f"{at}/properties", f"simd_count 304\nlocation_id {bus << 8}\ndomain 0")
        write(nodes / f"{at}/io_links/0/properties", "type 2\nnode_to 0")
        write(nodes / f"{at}/io_links/1/properties", f"type 11\nnode_to {3 - at}")
    found = hardware.devices(root)
    assert {gpu.model for gpu in found.gpus} == {"AMD Instinct MI300X"}
    assert (found.links[0][1], found.links[1][0]) == ("XGMI", "XGMI")
    assert found.links[2] == LINKS[2]


def test_graphics_of_a_processor_are_no_gpu(tmp_path):
    root = machine(tmp_path)
    for address in GPUS:
        folder = root / "sys/bus/pci/devices" / address
        write(folder / "class", "0x030000")
        write(folder / "vendor", "0x8086")
    assert hardware.devices(root).gpus == ()


def test_a_card_without_a_bus_and_firmware_that_numbers_nothing(tmp_path):
    """What is not said stays unknown."""
    root = machine(tmp_path)
    link(root / "sys/class/cxi/cxi0", root / "sys/class/infiniband/mlx5_0")
    for address in DEVICES:
        write(root / "sys/bus/pci/devices" / address / "numa_node", -1)
        (root / "sys/bus/pci/devices" / address / "local_cpulist").unlink()
    found = hardware.devices(root)
    assert [card.name for card in found.cards] == ["mlx5_0", "mlx5_1", "cxi0"]
    assert {device.socket for device in (*found.gpus, *found.cards)} == {None}
    assert (found.links[0][1], found.links[0][2]) == ("PHB", "?")


@pytest.mark.parametrize("ask", [lambda *_: "", lambda *_: "garbage\nGPU9 NV4\n", lambda *_: "GPU0, \nGPU1"])
def test_nothing_to_read(tmp_path, ask):
    assert hardware.devices(tmp_path, ask) == hardware.Devices()
    assert hardware.sockets({0}, tmp_path) == hardware.numa_nodes({0}, tmp_path) == ()
    assert hardware.active_cards(tmp_path) == ()


def test_this_machine():
    """Whatever it is: no rank fails over it."""
    found = hardware.devices()
    assert len(found.links) == len(found.gpus)

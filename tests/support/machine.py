"""A machine as Linux would show it, in a folder: two sockets, two network cards with a link, one without."""

from pathlib import Path

#: Cores of each socket, so that a machine of two cores has one on each.
CORES = ((0, 2), (1, 3))


def machine(root: Path) -> Path:
    """`root`, filled."""
    for socket, cores in enumerate(CORES):
        for core in cores:
            write(root / f"sys/devices/system/cpu/cpu{core}/topology/physical_package_id", socket)
    for name, state in {"mlx5_0": "4: ACTIVE", "mlx5_1": "4: ACTIVE", "mlx5_2": "1: DOWN"}.items():
        port = root / "sys/class/infiniband" / name / "ports/1"
        write(port / "state", state)
    return root


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")

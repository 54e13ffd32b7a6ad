"""Somebody else on the network of a job, who connects to every port that its ranks hold."""

import os
import socket
import struct
from pathlib import Path

_LISTENS = "0A"  # of /proc/net/tcp


def ports(process: int) -> set[tuple[str, int]]:
    """Address and number of each, as one connects to it from this machine."""
    links = [path for path in Path(f"/proc/{process}/fd").glob("*") if path.is_symlink()]
    held = set(map(os.readlink, links))
    found = set()
    for name in ("tcp", "tcp6"):
        for words in map(str.split, Path("/proc/net", name).read_text().splitlines()):
            if words[3] == _LISTENS and f"socket:[{words[9]}]" in held:
                address, number = words[1].split(":")
                everywhere = not int(address, 16) or name == "tcp6"
                packed = socket.INADDR_LOOPBACK if everywhere else socket.ntohl(int(address, 16))
                found.add((socket.inet_ntoa(struct.pack("!I", packed)), int(number, 16)))
    return found


def bother(process: int, *words: bytes) -> list[socket.socket]:
    """Connect to each, say something of no meaning, and `words`, and go. Returns connections on which nothing
    is said."""
    silent = []
    for there in ports(process):
        for said in (b"", bytes(4096), os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", *words):
            with socket.create_connection(there) as connection:
                connection.sendall(said)
            silent.append(socket.create_connection(there))
    return silent

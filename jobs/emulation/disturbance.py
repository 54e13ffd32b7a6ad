"""Disturb what runs on an emulated cluster:

    disturbance.py noise LENGTH PERIOD CORE
    disturbance.py traffic SHARE SIZE RATE HOST..

noise: keeps the core busy for LENGTH microseconds, once in PERIOD on average. traffic: takes connections from
other nodes, and sends messages of SIZE bytes to HOSTs, one at random at a time, so many that they take a
SHARE of RATE bytes in a second. Both at random instants, exponentially apart, as `treeattn simulate` has them
in the same words. Prints one line when it is ready.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import threading
import time

PORT, BLOCK, PATIENCE = 9, 1 << 20, 10.0


def noise(length: float, period: float, core: int) -> None:
    os.sched_setaffinity(0, {core})
    with contextlib.suppress(OSError):  # without that right it competes as any other process
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    print("ready", flush=True)
    instant = time.monotonic()
    while True:
        instant = max(instant + random.expovariate(1 / period), time.monotonic())
        time.sleep(max(0.0, instant - time.monotonic()))
        until = time.monotonic() + length
        while time.monotonic() < until:
            pass


def traffic(share: float, size: int, rate: float, hosts: list[str]) -> None:
    server = socket.create_server(("", PORT))
    threading.Thread(target=_swallow, args=(server,), daemon=True).start()
    print("ready", flush=True)
    message, others = bytes(size), [_connected(host) for host in hosts]
    instant = time.monotonic()
    while True:
        instant += random.expovariate(share * rate / size)
        time.sleep(max(0.0, instant - time.monotonic()))
        random.choice(others).sendall(message)


def _connected(host: str) -> socket.socket:
    """The other node may not listen yet."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection((host, PORT))
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def _swallow(server: socket.socket) -> None:
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_drain, args=(connection,), daemon=True).start()


def _drain(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        while connection.recv(BLOCK):
            pass


def main() -> None:
    what, *words = sys.argv[1:]
    if what == "noise":
        noise(float(words[0]) / 1e6, float(words[1]) / 1e6, int(words[2]))
    share, size, rate, *hosts = words
    traffic(float(share), int(size), float(rate), hosts)


if __name__ == "__main__":
    main()

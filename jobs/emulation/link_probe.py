"""What two nodes' link really does: link_probe.py serve | link_probe.py measure HOST.

`measure` prints the median round trip of one byte and the rate of one TCP stream. Plain sockets, so that no
MPI library's protocol is in the numbers.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import time

PORT = 7
ROUND_TRIPS, ENOUGH_ROUND_TRIPS, TRIP_SECONDS = 300, 3, 5.0
STREAM_SECONDS = 1.0
PATIENCE = 30.0  # seconds without an answer
BLOCK = 1 << 20


def serve() -> None:
    """Answer every byte with a byte on the first connection; swallow and count the second one's stream."""
    with socket.create_server(("", PORT)) as server:
        print("ready", flush=True)
        echo, _ = server.accept()
        echo.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := echo.recv(1):
            echo.sendall(data)
        stream, _ = server.accept()
        received, began = 0, time.monotonic()
        while data := stream.recv(BLOCK):
            received += len(data)
        stream.sendall(json.dumps(received / (time.monotonic() - began)).encode())
        stream.close()


def round_trip(host: str) -> float:
    """Median seconds for one byte to go and come back, after a few to warm up; fewer trips on slow links."""
    seconds: list[float] = []
    until = time.monotonic() + TRIP_SECONDS
    with socket.create_connection((host, PORT), timeout=PATIENCE) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while len(seconds) < ENOUGH_ROUND_TRIPS or (len(seconds) < ROUND_TRIPS and time.monotonic() < until):
            began = time.monotonic()
            connection.sendall(b"x")
            connection.recv(1)
            seconds.append(time.monotonic() - began)
    return statistics.median(seconds[len(seconds) // 15 :])


def stream_rate(host: str) -> float:
    """Bytes per second that arrive at the other end, over about `STREAM_SECONDS`."""
    with socket.create_connection((host, PORT), timeout=PATIENCE) as connection:
        until = time.monotonic() + STREAM_SECONDS
        block = bytes(BLOCK // 16)
        while time.monotonic() < until:
            connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)
        return float(json.loads(connection.recv(100)))


def main() -> None:
    if sys.argv[1] == "serve":
        serve()
        return
    try:
        report(round_trip(sys.argv[2]), stream_rate(sys.argv[2]))
    except TimeoutError:
        sys.exit(f"link_probe: nothing came for {PATIENCE:.0f} s: this link is too slow to be measured")
    except OSError as error:
        sys.exit(f"link_probe: {error}")


def report(trip: float, rate: float) -> None:
    print(
        f"measured: round trip {trip * 1e3:.3f} ms (median of one byte over TCP), "
        f"{_readable(rate * 8 / 1e6)} Mbit/s = {_readable(rate / 1e6)} MB/s (one TCP stream)",
        flush=True,
    )


def _readable(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


if __name__ == "__main__":
    main()

"""Hold back every packet that reaches a node for a fixed time: packet_delay.py NANOSECONDS PID...

Each PID is a process in a node's network namespace where a rule sends what arrives on eth0 to NFQUEUE 0. The
kernel keeps the packets; only their numbers come here (netfilter's queue protocol over netlink), and go back
as verdicts when their time has come. Prints one line when it is ready.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from emulation import kernel

# linux/netlink.h, linux/netfilter/nfnetlink.h and nfnetlink_queue.h
NETLINK_NETFILTER, SUBSYSTEM_QUEUE, REQUEST = 12, 3, 1
SOL_NETLINK, NO_OVERFLOW_ERRORS, FORCE_RECEIVE_BUFFER = 270, 5, 33
PACKET, CONFIGURE, VERDICT_UP_TO = 0, 2, 3  # messages
PACKET_HEADER, VERDICT_HEADER = 1, 2  # attributes of packets and verdicts
COMMAND, COPY_RANGE, QUEUE_LENGTH, FLAG_MASK, FLAGS = 1, 2, 3, 4, 5  # attributes of a configuration
BIND_QUEUE, COPY_NUMBERS_ONLY, WHOLE_SEGMENTS, ACCEPT = 1, 1, 1 << 2, 1
HEADERS = 20  # of netlink and netfilter, in front of a message's attributes


def attribute(number: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), number) + value + bytes(-len(value) % 4)


def message(kind: int, attributes: bytes) -> bytes:
    """A request about queue 0."""
    body = struct.pack(">BBH", socket.AF_UNSPEC, 0, 0) + attributes
    return struct.pack("=IHHII", 16 + len(body), SUBSYSTEM_QUEUE << 8 | kind, REQUEST, 0, 0) + body


def open_queue(pid: str) -> socket.socket:
    """Queue 0 of the network namespace of `pid`; the socket stays there when this process moves on."""
    kernel.enter_network(pid)
    queue = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
    queue.bind((0, 0))
    queue.setsockopt(socket.SOL_SOCKET, FORCE_RECEIVE_BUFFER, 8 << 20)
    queue.setsockopt(SOL_NETLINK, NO_OVERFLOW_ERRORS, 1)
    for setting in (
        attribute(COMMAND, struct.pack(">BBH", BIND_QUEUE, 0, socket.AF_INET)),
        attribute(COPY_RANGE, struct.pack(">IB", 0, COPY_NUMBERS_ONLY)),
        attribute(QUEUE_LENGTH, struct.pack(">I", 1 << 16)),
        attribute(FLAG_MASK, struct.pack(">I", WHOLE_SEGMENTS))
        + attribute(FLAGS, struct.pack(">I", WHOLE_SEGMENTS)),
    ):
        queue.send(message(CONFIGURE, setting))
    queue.setblocking(False)
    return queue


def packet_numbers(data: bytes) -> list[int]:
    """The numbers of the packets that the netlink messages in `data` announce, in order."""
    numbers = []
    start = 0
    while start + HEADERS <= len(data):
        length, kind = struct.unpack_from("=IH", data, start)
        if kind == SUBSYSTEM_QUEUE << 8 | PACKET:
            numbers.append(_packet_number(data, start + HEADERS, start + length))
        start += length + -length % 4
    return numbers


def _packet_number(data: bytes, at: int, end: int) -> int:
    while at + 4 <= end:
        length, number = struct.unpack_from("=HH", data, at)
        if number == PACKET_HEADER:
            return int(struct.unpack_from(">I", data, at + 4)[0])
        at += length + -length % 4
    raise ValueError("a packet message without a packet header: not the protocol this was written for")


def run(delay: int, queues: list[socket.socket]) -> None:
    """Serve for ever. Packets leave a queue in the order they came: the last one due frees all before it."""
    held: dict[socket.socket, deque[tuple[int, int]]] = {queue: deque() for queue in queues}
    while True:
        next_due = min((packets[0][0] for packets in held.values() if packets), default=None)
        timeout = None if next_due is None else max(0, next_due - time.monotonic_ns()) / 1e9
        for queue in select.select(queues, [], [], timeout)[0]:
            due = time.monotonic_ns() + delay
            with contextlib.suppress(BlockingIOError):
                held[queue] += [(due, number) for number in packet_numbers(queue.recv(1 << 16))]
        now = time.monotonic_ns()
        for queue, packets in held.items():
            last = None
            while packets and packets[0][0] <= now:
                last = packets.popleft()[1]
            if last is not None:
                queue.send(
                    message(VERDICT_UP_TO, attribute(VERDICT_HEADER, struct.pack(">II", ACCEPT, last)))
                )


def main() -> None:
    kernel.punctual_timers()
    # Ranks that spin on every core must not make packets late.
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    queues = [open_queue(pid) for pid in sys.argv[2:]]
    print("ready", flush=True)
    run(int(sys.argv[1]), queues)


if __name__ == "__main__":
    main()

"""Runs a command and says of which call of MPI that may wait for others the watchdog would not know.

python -m tests.faults.told_calls WORDS, with `mpi_calls.c` preloaded from PRELOADED
"""

import ctypes
import os
import runpy
import traceback

from treeattn.collectives.runtime import watchdog

heard: list[bytes] = []


def say(text: str) -> None:
    """In one piece, between those of other ranks."""
    os.write(2, text.encode())


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def listen(call: bytes) -> None:
    """Called before each."""
    heard.append(call)
    if not any(thing.blocking for thing in list(watchdog._things)):
        say(f"outside the limit: {call.decode()}\n{''.join(traceback.format_stack())}")


def start() -> None:
    """Listen from now to the end, and say then how many calls were heard."""
    library = ctypes.CDLL(os.environ["PRELOADED"])
    library.tell(listen)

    def end() -> None:
        library.tell(None)  # MPI may end after Python
        say(f"heard {len(heard)} calls\n")

    watchdog.at_the_end(end)


if __name__ == "__main__":
    start()
    runpy.run_module("treeattn", run_name="__main__")

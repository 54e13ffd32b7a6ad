"""Every public verb in a forked process, which none of the communicators of its parent serves."""

from __future__ import annotations

import os
import signal

import treeattn
from tests.support.public_verbs import SHAPE, TREE, VERBS, K, Q, check_complete
from treeattn import token_tree


def made(comm):
    """Objects of every public class that keeps a communicator, and calls that need the other ranks."""
    decoder = treeattn.Decoder(comm, **SHAPE)
    merger = treeattn.Merger(comm, lse_shape=(2,), head_dim=8)
    prefill = treeattn.Prefill(comm, tokens=2, **SHAPE)
    cache = treeattn.ShardedCache(comm, capacity=8, kv_heads=2, head_dim=8)
    verifier = token_tree.Verifier(comm, nodes=2, **SHAPE)
    calls = [
        lambda: decoder(Q[:, :1], K, K),
        lambda: decoder.begin(Q[:, :1], K, K),
        lambda: merger(Q[0, 0], Q[0, 0, :, 0]),
        lambda: verifier(Q, K, K, Q, Q, TREE),
        lambda: cache.save("nowhere"),
        lambda: treeattn.ShardedCache.load("nowhere"),
    ]
    if comm.size > 1:
        calls.append(lambda: prefill(Q, Q, Q))
    return [decoder, merger, prefill, verifier], calls


def in_a_fork(*calls):
    """Fail unless each call raises `StateError` in one and the same forked process, which has so long."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(next((number for number, call in enumerate(calls, 1) if not _refused(call)), 0))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, f"call {code} was not refused"


def _refused(call):
    try:
        call()
    except treeattn.StateError as error:
        return "another process's: no communicator outlives a fork" in str(error)
    except BaseException as error:
        print(repr(error), flush=True)
    return False


def check(comm, world):
    """world: that of the job, which ``comm=None`` means."""
    check_complete()
    for call in VERBS.values():
        call(comm=comm)  # it can be made, where nothing was forked
        in_a_fork(call, lambda call=call: call(comm=comm), lambda call=call: call(comm=world))
    living, calls = made(comm)
    in_a_fork(*calls)
    for owner in living:
        owner.close()

"""Every public verb in a forked process, which none of the communicators of its parent serves."""

import os
import signal

import treeattn
from tests.support.public_verbs import OBJECTS, VERBS, K, Q, check_complete


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


def before_any_call():
    """In a process that has called nothing yet: a child that it forks now is refused, and it is not."""
    in_a_fork(VERBS[treeattn.decode])
    assert VERBS[treeattn.decode]()[0].mean() == 1


def check(comm, world):
    """world: that of the job, which ``comm=None`` means."""
    check_complete()
    for call in VERBS.values():
        call(comm=comm)  # it can be made, where nothing was forked
        in_a_fork(call, lambda call=call: call(comm=comm), lambda call=call: call(comm=world))
    living = {name: make(comm) for name, (make, _) in OBJECTS.items() if comm.size > 1 or name != "a prefill"}
    cache = living.pop("a cache")
    steps = [OBJECTS[name][1](made)[0] for name, made in living.items()]
    steps.append(lambda: living["a decoder"].begin(Q[:, :1], K, K))
    in_a_fork(*steps, lambda: cache.save("nowhere"), lambda: treeattn.ShardedCache.load("nowhere"))
    for made in living.values():
        made.close()

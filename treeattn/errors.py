"""Every exception that this package raises on purpose, on one screen.

A message says what is wrong, where (scheme, size, round, rank) and what to do about it.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Call = TypeVar("Call", bound=Callable[..., Any])


class TreeattnError(Exception):
    """The base of every error below: ``except treeattn.TreeattnError`` catches them all."""

    #: Exit code of the ``treeattn`` command, 2 where its caller can mend the command line or a file.
    exit_code = 1

    def __init__(self, *args: Any) -> None:
        super().__init__(*(one_line(arg) if isinstance(arg, str) else arg for arg in args))


class ArgumentError(TreeattnError, ValueError):
    """An argument or an input file that cannot be used, or that differs between ranks."""

    exit_code = 2


class ScheduleError(TreeattnError, ValueError):
    """A schedule that is not a correct reduction, or a scheme name that does not parse."""

    exit_code = 2


class RestrictionError(ScheduleError):
    """A scheme that exists but does not serve this size, these nodes or these parameters."""


class BackendError(TreeattnError, RuntimeError):
    """A device, compiler or library that the chosen backend needs is missing or failed."""


class MissingPackageError(BackendError, ImportError):
    """A package of an extra that is not installed."""


class TransportError(TreeattnError, RuntimeError):
    """Records cannot travel the way that was asked for."""

    exit_code = 2


class PeerError(TransportError):
    """Another rank has ended or failed, or cannot be reached any more, while records travel."""

    exit_code = 1


class PeerTimeoutError(PeerError):
    """A wait for other ranks has reached the limit of ``TREEATTN_TIMEOUT``."""

    exit_code = 124  # as timeout(1)


class StateError(TreeattnError, RuntimeError):
    """A call out of order: on what is closed, before the call that it needs, or a second time."""


class SharingError(TransportError):
    """Ranks of one node cannot share memory."""


#: What belongs to the process that forked this one, in a sentence that says so.
ANOTHER_PROCESS = "another process's: no communicator outlives a fork, so start workers by spawn instead"


#: Words of other libraries -> ours; and arguments of what `rules=` and `k=` take.
_WORDS = {"softmax_scale": "scale", "sm_scale": "scale", "num_heads": "heads", "num_kv_heads": "kv_heads"}
_WORDS |= {"attn_mask": "mask", "group": "comm", "cache_seqlens": "lengths", "seq_lens": "lengths"}
_RULES = {"is_causal": "causal", "window_size": "window", "sliding_window": "window", "softcap": "softcap"}
_RULES |= {name: name for name in ("causal", "window", "leading", "alibi", "sink_logits")}
_SHARD = ("positions", "block_table", "k_scale", "v_scale", "v_dim", "draft_positions")


def telling_arguments(call: Call) -> Call:
    """Make a call tell, of a keyword argument that it has not, which one is meant: a `TypeError`."""
    known = inspect.signature(call).parameters

    @functools.wraps(call)
    def called(*given: Any, **named: Any) -> Any:
        for name in named.keys() - known.keys():
            near = [_WORDS.get(name), *difflib.get_close_matches(name, known, 1)]
            meant = next((f"{one}=" for one in near if one in known), "")
            if name in _RULES and "rules" in known:
                meant = f"rules=treeattn.Rules({_RULES[name]}=..)"
            elif name in _SHARD and "k" in known:
                meant = f"treeattn.Shard(k, v, {name}=..) in place of k"
            hint = f": did you mean {meant}?" if meant else f": take {', '.join(known)}"
            raise TypeError(f"{call.__qualname__.split('.')[0]} has no argument {name!r:.60}{hint}")
        return call(*given, **named)

    return called  # type: ignore[return-value]


def no_communicator(error: Any) -> BackendError:
    """What to raise for an exception of MPI that says that there are no more communicators."""
    reason = error.Get_error_string().splitlines()[-1].strip()
    return BackendError(
        f"MPI gives no communicator ({reason}): decoders and reducers keep one each until close() or the "
        "end of their with statement; for good where an exception ended that"
    )


def one_line(message: str) -> str:
    """Whatever it quotes of an input: control characters are escaped, a long one is cut in its middle."""
    if not message.isprintable():
        message = "".join(one if one.isprintable() else repr(one)[1:-1] for one in message)
    return message if len(message) <= 1600 else f"{message[:1000]} .. {message[-500:]}"

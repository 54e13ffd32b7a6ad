"""What ``print(decoder.plan)`` says: every stage, buffer and message of a step, and why each was chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treeattn.decoder.plan import Plan


def described(plan: Plan) -> str:
    """The plan as text of a few lines, for people."""
    comm, request = plan.comm, plan.request
    if plan.reducer._closed:
        return f"{request.scheme.text}: closed"
    sections = {
        "stages": _stages(plan),
        "buffers": _buffers(plan),
        "messages that this rank sends in a step": _messages(plan),
        "why": _reasons(plan),
    }
    lines = [f"{request.scheme.text} on {comm.size} ranks, as rank {comm.rank} runs it"]
    for title, rows in sections.items():
        lines += [title, *_aligned(rows)]
    return "\n".join(lines)


def _aligned(rows: Iterable[tuple[str, str]]) -> list[str]:
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {text}" for name, text in rows]


def _stages(plan: Plan) -> Iterator[tuple[str, str]]:
    request, reducer, buffers = plan.request, plan.reducer, plan.buffers
    shape = request.shape
    what = f"q {list(shape.q_shape)} {shape.dtype} to this rank's {shape.kv_dtype} k and v"
    by = f"by {reducer.name} while it communicates" if request.attends_by_reducer else request.device.name
    yield "attend", f"{what}: {', '.join(request.rules.names) or 'all tokens'}; {by}"
    if plan.schedule is None:
        yield "reduce", f"{reducer.name} over {plan.transport}"
    else:
        proof = reducer.certificate
        proved = f"; class {proof.determinism}, depth {proof.depth}" if proof else ""
        rounds = f"{plan.schedule.name}, rounds: {len(plan.schedule.rounds)}{proved}"
        yield "reduce", f"{rounds}; run by {reducer.executor} over {plan.transport}"
    heads = f"heads {buffers.heads.start} to {buffers.heads.stop - 1}"
    yield "finish", f"records into out and lse of {heads}" if buffers.given else "nothing is given here"


def _buffers(plan: Plan) -> Iterator[tuple[str, str]]:
    buffers = plan.buffers
    arrays = {
        "records": buffers.records,
        "records on the wire": buffers.wire,
        "records of the result": buffers.own,
        "out": buffers.out,
        "lse": buffers.lse,
    }
    known: list[Any] = []
    for name, array in arrays.items():
        if name in ("out", "lse") or not any(array is other for other in (*known, buffers.out)):
            yield name, f"{list(array.shape)} {array.dtype}, {array.nbytes:,} bytes"
            known.append(array)


def _messages(plan: Plan) -> Iterator[tuple[str, str]]:
    sent = plan.reducer.sent
    if plan.request.attends_by_reducer and not sent:
        yield "unknown", "they depend on the arrays of the step"
    elif isinstance(sent, int):
        yield f"{sent:,} bytes", "handed to the library, whose business the messages are"
    elif sent is None:
        yield "unknown", "they are the library's business"
    elif not sent:
        yield "none", "others send to this rank" if plan.comm.size > 1 else "it is alone"
    else:
        for (peer, size), times in Counter(sent).items():
            yield f"{size:,} bytes", f"to rank {peer}" + (f", {times} times" if times > 1 else "")


def _reasons(plan: Plan) -> Iterator[tuple[str, str]]:
    how, reducer = plan.request.how, plan.reducer
    unnamed = (
        "what ranks of one node take" if len(plan.comm.nodes) == 1 else "what ranks of several nodes take"
    )
    yield "scheme", "as asked for" if how.scheme is not None else unnamed
    tried = "the first of peer memory and NCCL that all ranks can have"
    untold = "the only one here" if plan.transport == "mpi" else tried
    yield "transport", "as asked for" if how.transport else untold
    if reducer.executor is not None:
        fastest = reducer.fallback or "the fastest that all ranks can have"
        yield "executor", "as asked for" if how.executor else fastest
    stages = "one for each stage: they are not all compiled, or something comes between them"
    yield "calls", stages if plan.fused_step is None else "one: attention and reduction are both compiled"

"""After a failure: leave nothing of the step behind, and say the same on every rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mpimesh.errors import MpimeshError, on_all_ranks
from mpimesh.parallel.alarm import Alarm
from mpimesh.parallel.engine import Engine
from mpimesh.parallel.failure import Failure, agreed_error
from mpimesh.parallel.header import Given, disagreement
from mpimesh.parallel.inbox import Inbox, take_in
from mpimesh.parallel.microbatch import replica_rows
from mpimesh.parallel.outbox import Outbox
from mpimesh.runtime.agreement import exchange

__all__ = ["Note", "unwind"]


@dataclass(frozen=True, slots=True)
class Note:
    """A rank's note to the others at the end of a failed step.

    Attributes:
        given: What it was given for the step.
        training: Whether it was training.
        failure: What went wrong on it, if anything did.
    """

    given: Given
    training: bool
    failure: Failure | None


def unwind(
    engine: Engine, note: Note, alarm: Alarm, inbox: Inbox | None, outbox: Outbox | None
) -> MpimeshError:
    """Clear up with all other ranks. Collective over the engine's scope.

    Every message that is on its way is taken in, every receive that has none is taken back, and
    the reductions that any rank has started are made by all, those of split layers, too. The
    gradients are 0 afterwards, unless all ranks were in inference.

    Returns:
        The error that every rank is to raise.

    Cost:
        Two all-gathers of small texts and a barrier.
    """
    scope = engine.scope
    mine = {
        "given": asdict(note.given),
        "training": note.training,
        "failure": None if note.failure is None else asdict(note.failure),
        "sounded": alarm.sounded,
        "started": engine.buckets.started,
        "tensor": engine.tensor.notes(),
        "sent": [] if outbox is None else _by_rank(engine, outbox),
    }
    notes = exchange(
        scope._core.progress, scope.communicator, mine, what="the end of a failed step"
    )
    engine.tensor.finish(dict(zip(scope.ranks, (one["tensor"] for one in notes), strict=True)))
    waiting = alarm.collect(place for place, one in enumerate(notes) if one["sounded"])
    if outbox is not None:
        waiting += outbox.drain()
    sent = _to_me(engine, notes)
    waiting += take_in(engine.pipe, sent) if inbox is None else inbox.drain(sent)
    for request in waiting:
        scope._core.wait_for(request, what="the end of a failed step")
    if any(one["training"] for one in notes):
        engine.buckets.cancel(started=any(one["started"] for one in notes))
    engine.interfaces.clear()
    # A message of the next step must not meet a receive that is about to be taken back.
    scope.barrier(label="the end of a failed step")
    return _agreed(engine, notes)


def _by_rank(engine: Engine, outbox: Outbox) -> list[tuple[int, int, list[int]]]:
    """Return what was sent, with the receivers as numbered in the mesh."""
    return [(engine.pipe.ranks[peer], tag, sizes) for peer, tag, sizes in outbox.sent]


def _to_me(engine: Engine, notes: list[dict[str, Any]]) -> dict[tuple[int, int], list[int]]:
    """Return the bytes of all messages to this rank, by the sender in the pipeline and tag."""
    places = {rank: place for place, rank in enumerate(engine.pipe.ranks)}
    return {
        (places[rank], tag): sizes
        for rank, note in zip(engine.scope.ranks, notes, strict=True)
        for dest, tag, sizes in note["sent"]
        if dest == engine.mesh.rank
    }


def _batch_cure(engine: Engine, given: list[Given]) -> str:
    """Say what to do where each rank was given rows of its own."""
    data = engine.data
    rows = next((one.rows for one in given if one.rows), None)
    if data.size == 1 or rows is None:
        return ""
    spans = [replica_rows(rows, data.size, place) for place in range(min(data.size, 4))]
    taken = ", ".join(f"{one.start}:{one.stop}" for one in spans)
    more = ", ..." if data.size > len(spans) else ""
    return (
        f"of a batch of {rows} rows the replicas along {data.name!r} take rows {taken}{more}; if "
        "each rank has read rows of its own, put them together first, x as well as target: "
        f'x = mm.DTensor.from_local(x, mesh, "{data.name}=S0").full()'
    )


def _agreed(engine: Engine, notes: list[dict[str, Any]]) -> MpimeshError:
    """Return the same error on every rank: that they were at odds, or what failed."""
    given = [Given(**note["given"]) for note in notes]
    error = disagreement(
        given,
        engine.scope.ranks,
        batch_cure=_batch_cure(engine, given),
        first=engine.first_values,
    )
    if error is None:
        return agreed_error([Failure(**note["failure"]) for note in notes if note["failure"]])
    return on_all_ranks(error)

"""Compare a collective over its ranks before any data moves (``MPIMESH_CHECKS``).

Of the ways in which ranks can call different collectives, MPI answers most with
wrong numbers and the rest with a hang. One all-reduce of 16 bytes finds them
all: each rank puts in its call's fingerprint h as ``(h, -h)``; after a maximum,
the first is the largest fingerprint and the second minus the smallest, and they
cancel exactly if all ranks agree. Only if not, a table of all ranks' calls is
gathered, and every rank raises with it.

Calls that differ in nothing but their meaning (two equal gradients swapped) can
only be told apart by a `label`, or by the lines that led to the call with ``MPIMESH_CHECKS=2``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpimesh.arguments import rank_names
from mpimesh.errors import MismatchError, on_all_ranks
from mpimesh.runtime.call import Call
from mpimesh.transport import Communicator, Request, Steps, run_steps

__all__ = ["checked", "compare"]

_ROW_BYTES = 1024
_MOST_PLACES = 4
"""So many of the places that led to a call are shown."""
_HEAD_BYTES = 256
"""Bytes kept from the front of a call that is too long for its row."""


def compare(
    communicator: Communicator,
    call: Call,
    compared: object,
    *,
    stack: tuple[str, ...] = (),
    note: str = "",
) -> Steps:
    """Compare `call` with the other ranks' calls.

    Args:
        communicator: The ranks to compare.
        call: What this rank calls.
        compared: The part of the shape that must agree.
        stack: The places that led to the call, the innermost first, where they must agree, too.
        note: What went wrong already on this rank; makes every rank raise.

    Raises:
        MismatchError: On every rank alike, if any two differ.
    """
    mine = call.fingerprint((compared, stack, note))
    pair = np.array([mine, -mine])
    yield communicator.all_reduce(None, pair, "max")
    if pair[0] == -pair[1] and not note:
        return
    row = np.zeros(_ROW_BYTES, np.uint8)
    text = _fitted(_shown(call, stack), note and f": {note}")
    row[: len(text)] = np.frombuffer(text, np.uint8)
    table = np.empty((communicator.size, _ROW_BYTES), np.uint8)
    yield communicator.all_gather(row, table.reshape(-1), [_ROW_BYTES] * communicator.size)
    raise on_all_ranks(MismatchError(_report(call.group, table)))


def checked(
    communicator: Communicator,
    call: Call,
    compared: object,
    start: Callable[[], Request | Steps],
    also: Callable[[Call], Steps] | None = None,
    *,
    stack: tuple[str, ...] = (),
) -> Steps:
    """Compare, also by `also` if there is one, then run `start`."""
    yield from compare(communicator, call, compared, stack=stack)
    if also is not None:
        yield from also(call)
    return (yield from run_steps(start))


def _shown(call: Call, stack: tuple[str, ...]) -> str:
    return str(call) + "".join(f", called at {place}" for place in stack[1:_MOST_PLACES])


def _fitted(call: str, note: str) -> bytes:
    """Return a call and a note in the bytes of a row; what is cut is the middle of the call.

    The place of the call stands at its end.
    """
    text = (call + note).encode(errors="backslashreplace")
    if len(text) <= _ROW_BYTES:
        return text
    tail = call.encode()[_HEAD_BYTES:] + note.encode()[:_HEAD_BYTES]
    return text[:_HEAD_BYTES] + b" ... " + tail[_HEAD_BYTES + 5 - _ROW_BYTES :]


def _report(group: str, table: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> str:
    texts = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in table]
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    rows = "\n".join(f"  {rank_names(who)}: {text}" for text, who in ranks.items())
    return (
        f"the ranks of group {group!r} must call the same collective with matching arguments, "
        f"but called:\n{rows}"
    )

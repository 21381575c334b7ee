"""Agreement of all ranks: that they call the same, on a small value, or on the same error.

Of the ways in which ranks can call different collectives, MPI answers most with wrong numbers and
the rest with a hang. With ``MPIMESH_CHECKS`` one all-reduce of 16 bytes before each finds them all:
each rank puts in its call's fingerprint h as ``(h, -h)``; after a maximum, the first is the largest
fingerprint and the second minus the smallest, and they cancel exactly if all ranks agree. Only if
not, a table of all ranks' calls is gathered, and every rank raises with it.

Calls that differ in nothing but their meaning (two equal gradients swapped) can only be told apart
by a `label`, or by the lines that led to the call with ``MPIMESH_CHECKS=2``.
"""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np

from mpimesh import errors
from mpimesh.arguments import plain_text, rank_names, ranks_by_value
from mpimesh.comm import Communicator, Request, Steps, run_steps
from mpimesh.errors import MismatchError, MpimeshError, on_all_ranks
from mpimesh.mesh import WORLD
from mpimesh.runtime.call import Call
from mpimesh.runtime.progress import Progress

__all__ = [
    "agree",
    "agreed",
    "announce",
    "checked",
    "compare",
    "exchange",
    "together",
]

T = TypeVar("T")

# -- values and errors ---------------------------------------------------------------------------


def agree(
    progress: Progress, communicator: Communicator, call: Call, *, stack: tuple[str, ...] = ()
) -> None:
    """Return if all ranks make the same `call`, and raise on all of them if not.

    Args:
        progress: The unfinished operations of this rank.
        communicator: The ranks.
        call: What this rank calls.
        stack: The places that led to the call, where they must agree, too.

    Raises:
        MismatchError: On every rank, naming each rank's call.

    Cost:
        One all-reduce of 16 bytes.
    """
    steps = compare(communicator, call, call.shape, stack=stack)
    _wait(progress, communicator, steps, call, "agreement", "as in add_group or reshape")


def agreed(
    progress: Progress,
    communicator: Communicator,
    name: str,
    make: Callable[[], T],
    rule: Callable[[T], str] = str,
) -> T:
    """Return what `make` gives, if it is alike on all ranks, errors too.

    Args:
        progress: The unfinished operations of this rank.
        communicator: The ranks.
        name: What the ranks call, for messages.
        make: Turns this rank's arguments into a value, or raises.
        rule: What of the value must be alike.

    Raises:
        Exception: That of `make`, on every rank, if it is the same on all.
        MismatchError: On every rank, if values or errors differ.
    """
    problem: Exception | None = None
    try:
        value = make()
        text = rule(value)
    except Exception as error:
        problem = error
        text = f"{type(error).__name__}: {error}"
    # Objects have another address on each rank.
    agree(progress, communicator, Call(name, WORLD, rule=plain_text(text)))
    if problem is not None:
        raise on_all_ranks(problem) if isinstance(problem, MpimeshError) else problem
    return value


def exchange(
    progress: Progress,
    communicator: Communicator,
    value: Any,
    *,
    what: object,
    problem: Exception | None = None,
) -> list[Any]:
    """Give every rank the values of all ranks, in rank order, or raise on all what any refuses.

    Args:
        progress: The unfinished operations of this rank.
        communicator: The ranks.
        value: This rank's value: what JSON can say.
        what: Its `str` names the wait in reports: what the user's program is in.
        problem: Why this rank refuses; None if it does not.

    Raises:
        Exception: On every rank, if any has a problem: of the class of the first. That of mpimesh
            has the texts of all ranks; one of Python's or NumPy's has the words of the first.

    Cost:
        Two all-gathers: of sizes, then of texts.
    """
    note = None if problem is None else [type(problem).__name__, str(problem)]
    text = np.frombuffer(json.dumps([value, note]).encode(), np.uint8).copy()

    def steps() -> Steps:
        if communicator.mail is not None:
            # With checks on, what the ranks are in is compared before they tell each other more;
            # not what else a call says: that may be what they are about to tell.
            name = what.name if isinstance(what, Call) else str(what)
            yield from compare(communicator, Call(name, communicator.name), None)
        sizes = np.empty(communicator.size, np.int64)
        yield communicator.all_gather(np.array([text.size]), sizes, [1] * communicator.size)
        texts = np.empty(int(sizes.sum()), np.uint8)
        yield communicator.all_gather(text, texts, sizes.tolist())
        return [json.loads(bytes(part)) for part in np.split(texts, np.cumsum(sizes)[:-1])]

    rows: list[Any] = _wait(
        progress, communicator, steps(), what, "exchange of facts", "as in from_callback"
    )
    notes = {rank: note for rank, (_, note) in enumerate(rows) if note is not None}
    if notes:
        raise _joint_error(notes, what) from problem
    return [value for value, _ in rows]


@contextmanager
def together(
    progress: Progress,
    communicator: Communicator,
    what: object,
    caught: type[Exception] | tuple[type[Exception], ...] = MpimeshError,
) -> Iterator[None]:
    """Raise on every rank what the body, or the function that this decorates, raises on any.

    Args:
        progress: The unfinished operations of this rank.
        communicator: The ranks.
        what: As for :func:`exchange`.
        caught: The errors that are raised on all ranks; another one is raised here alone.

    Raises:
        Exception: As :func:`exchange` does.

    Cost:
        That of an exchange of small texts.
    """
    problem: Exception | None = None
    try:
        yield
    except caught as error:
        problem = error
    exchange(progress, communicator, None, what=what, problem=problem)


def _joint_error(notes: Mapping[int, Sequence[str]], what: object) -> Exception:
    """Return the error of all ranks, by the class and the text of each that has one."""
    name, text = next(iter(notes.values()))
    kinds = (getattr(module, name, None) for module in (errors, builtins, np.linalg))
    kind: type[Exception] = next((kind for kind in kinds if isinstance(kind, type)), ValueError)
    if not issubclass(kind, MpimeshError):
        return kind(text)
    by_text = ranks_by_value((rank, each) for rank, (_, each) in notes.items())
    texts = [f"{rank_names(ranks)}: {each}" for each, ranks in by_text.items()]
    head = [f"{what.name} cannot be done"] if isinstance(what, Call) else []
    return on_all_ranks(kind("\n  ".join(head + texts)))


def _wait(
    progress: Progress, communicator: Communicator, steps: Steps, what: object, *named: str
) -> Any:
    number, look = announce(communicator, *named)
    request = progress.stage(communicator, steps)
    try:
        progress.wait(communicator, request, what=what, number=number, look=look)
    except MismatchError as error:
        request.give_up(error)
        raise
    return request.value


def announce(
    communicator: Communicator, name: str, within: str = ""
) -> tuple[int, Callable[[], None] | None]:
    """Count and post what this rank is about to start beside the collectives of a group.

    Args:
        communicator: The ranks.
        name: What all of them start.
        within: Calls that users know it by.

    Returns:
        Its number, by which who waits for whom can be told; and what to call while it is waited
        for, which raises if a rank of this node has started something else; None for nothing.

    Raises:
        MismatchError: If one has done so already.
    """
    communicator.started = number = communicator.started + 1
    signatures = communicator.signatures
    if signatures is None or communicator.mail is not None:  # with checks on they compare more
        return number, None
    group = communicator.name.rpartition("/")[2]
    word = signatures.post(number, signatures.digest((name, within, None, "")))
    if word < 0:
        raise signatures.error(group)
    return number, partial(signatures.look, number, group) if word else None


# -- calls ----------------------------------------------------------------------------------------

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
    ranks = ranks_by_value(enumerate(texts))
    rows = "\n".join(f"  {rank_names(who)}: {text}" for text, who in ranks.items())
    return (
        f"the ranks of group {group!r} must call the same collective with matching arguments, "
        f"but called:\n{rows}"
    )

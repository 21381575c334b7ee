"""Agreement of ranks: all learn the values of all, or all raise the same error.

One protocol serves calls, small values and errors. Each rank puts the fingerprint h of its call,
that of its value v, and the length of that, into one all-reduce of 40 bytes: ``(h, -h, v, -v, n)``.
After a maximum, the first is the largest fingerprint and the second minus the smallest, and they
cancel exactly if all ranks agree; so do the third and the fourth. Only if calls differ, a table of
them is gathered, and every rank raises with it. Only if values differ, they are gathered, too.

Of the ways in which ranks can call different collectives, MPI answers most with wrong numbers and
the rest with a hang. With ``MPIMESH_CHECKS`` each collective compares its call first, and finds
them all. Calls that differ in nothing but their meaning (two equal gradients swapped) can only be
told apart by a `label`, or by the lines that led to the call with ``MPIMESH_CHECKS=2``.
"""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, Protocol, TypeVar

import numpy as np

from mpimesh import errors
from mpimesh.arguments import digest_bits, plain_text, rank_names, ranks_by_value
from mpimesh.comm import Communicator, Steps, run_steps
from mpimesh.comm.signatures import digest_of, explained, mismatch
from mpimesh.core.call import Ledger
from mpimesh.core.node import Operation
from mpimesh.errors import MismatchError, MpimeshError, TransportError, on_all_ranks
from mpimesh.mesh import WORLD
from mpimesh.runtime.call import Call
from mpimesh.runtime.progress import Progress

__all__ = ["AgreeingRanks", "PlannedMax", "agree", "agree_alike", "announce", "compare"]

T = TypeVar("T")


class AgreeingRanks(Protocol):
    """Ranks that can agree: those of a group, or of a mesh."""

    @property
    def communicator(self) -> Communicator:
        """The ranks."""


def agree(
    ranks: AgreeingRanks,
    what: Call | str,
    value: Any = None,
    *,
    problem: Exception | None = None,
    stack: tuple[str, ...] = (),
    ends: Sequence[Ledger] = (),
) -> list[Any]:
    """Give every rank the values of all ranks, in rank order, or raise the same error on all.

    Collective. Without a value it returns if all ranks make the same call, and none has a problem.

    Args:
        ranks: The ranks.
        what: What all of them do, as a call or in words. Its `str` names the wait in reports.
        value: This rank's value: what JSON can say.
        problem: Why this rank refuses; None if it does not.
        stack: The places that led to the call, where they must agree, too.
        ends: Those of communicators on which this rank starts nothing more before it has agreed: a
            rank of its node that waits for it in a collective there is told, and so is this rank.

    Raises:
        MismatchError: On every rank, naming each rank's call, if these differ.
        Exception: On every rank, if any has a problem: of the class of the first. That of mpimesh
            has the texts of all ranks; one of Python's or NumPy's has the words of the first.

    Cost:
        One all-reduce of 40 bytes; if values differ, an all-gather of the longest one's bytes.
    """
    communicator = ranks.communicator
    progress = _progress_of(ranks)
    ledger = progress.ledger_of(communicator)
    note = None if problem is None else [_known_kind(problem), str(problem)]
    mine = json.dumps([value, note]).encode()
    call = what if isinstance(what, Call) else Call(what, _group_of(ledger))
    steps = compare(communicator, call, call.shape, mine=mine, stack=stack)
    number, steps, look = announce(ledger, "agreement", steps, call)
    if ends:
        look = _announce_ends(progress, ends, call.name, look)
    request = progress.stage(communicator, steps)
    try:
        with progress.keeping(problem):
            progress.wait(communicator, request, what=what, number=number, look=look)
    except (TransportError, MismatchError) as error:
        if look is not None:
            with suppress(MismatchError):
                look()
        found = explained(communicator, call.group, error, None)
        if isinstance(found, MismatchError):
            request.give_up(found)
        raise found from None if found is not error else error.__cause__
    said = {text: json.loads(text) for text in set(request.value)}  # often the same of many
    rows = [said[text] for text in request.value]
    notes = {rank: note for rank, (_, note) in enumerate(rows) if note is not None}
    if notes:
        raise _joint_error(notes, what) from problem
    return [value for value, _ in rows]


def agree_alike(
    ranks: AgreeingRanks, name: str, make: Callable[[], T], rule: Callable[[T], str] = str
) -> T:
    """Return what `make` gives, if it is alike on all ranks, errors too. Collective.

    Args:
        ranks: The ranks.
        name: What they call, for messages.
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
    call = Call(name, WORLD, rule=plain_text(text))
    with _progress_of(ranks).keeping(problem):
        agree(ranks, call)
    if problem is not None:
        raise on_all_ranks(problem) if isinstance(problem, MpimeshError) else problem
    return value


def _progress_of(ranks: AgreeingRanks) -> Progress:
    # A communicator of one rank may have no engine, nor does it need one.
    engine = ranks.communicator.engine
    return engine if isinstance(engine, Progress) else Progress()


_KINDS = (errors, builtins, np.linalg)
"""Where the classes of errors are that all ranks have."""


def _known_kind(problem: Exception) -> str:
    """Return the name of a problem's class, or of the nearest one above it that all ranks have."""
    names = (kind.__name__ for kind in type(problem).__mro__)
    return next(name for name in names if any(name in vars(each) for each in _KINDS))


def _joint_error(notes: Mapping[int, Sequence[str]], what: object) -> Exception:
    """Return the error of all ranks, by the class and the text of each that has one."""
    name, text = next(iter(notes.values()))
    kind: type[Exception] = next(vars(each)[name] for each in _KINDS if name in vars(each))
    if not issubclass(kind, MpimeshError):
        return kind(text)
    by_text = ranks_by_value((rank, each) for rank, (_, each) in notes.items())
    texts = [f"{rank_names(ranks)}: {each}" for each, ranks in by_text.items()]
    head = [f"{what.name} cannot be done"] if isinstance(what, Call) else []
    return on_all_ranks(kind("\n  ".join(head + texts)))


def announce(
    ledger: Ledger, name: str, steps: Steps, call: Call | None = None
) -> tuple[int, Steps, Callable[[], None] | None]:
    """Count what this rank is about to start beside the collectives of a group.

    Args:
        ledger: That of the ranks.
        name: What all of them start, as far as it is compared here.
        steps: What is started, when its turn has come.
        call: The call that users know it by, which messages name.

    Returns:
        Its number, by which who waits for whom can be told; the steps, with the comparison before
        them; and what to call while they are waited for, which raises if a rank of this node has
        started something else; None for nothing.
    """
    ledger.started = number = ledger.started + 1
    communicator, node = ledger.communicator, ledger.communicator.node
    if node is None or ledger.mail is not None:  # with checks on they compare more
        return number, steps, None
    group = _group_of(ledger) if call is None else call.group
    text = "" if call is None else f"{call.name}() on group {call.group!r}"
    posted: list[Operation] = []

    def look() -> None:
        if posted and posted[0].differs():
            raise mismatch(node, communicator.node_ranks, group)

    def compared() -> Steps:
        posted.append(node.post(digest_of(node, (name, "", None, ""), text), number))
        look()
        return (yield from steps)

    return number, compared(), look


def _announce_ends(
    progress: Progress,
    ends: Sequence[Ledger],
    name: str,
    look_too: Callable[[], None] | None,
) -> Callable[[], None]:
    """Post that this rank starts nothing on these communicators before `name()` of their mesh.

    Returns:
        What raises if a rank of this node has started something there instead; it calls `look_too`.
    """
    digest, text = _end_of(name)
    posted: list[tuple[Ledger, Operation]] = []

    def post(ledger: Ledger) -> Operation:
        operation: Operation = ledger.communicator.node.post(digest, ledger.started + 1)
        posted.append((ledger, operation))
        return operation

    def look() -> None:
        for ledger, operation in posted:
            node = ledger.communicator.node
            # Who has met another mismatch before may end the mesh all the same.
            if operation.differs() and digest in (node.difference or (0, ()))[1]:
                raise mismatch(node, ledger.communicator.node_ranks, _group_of(ledger))
        if look_too is not None:
            look_too()

    for ledger in ends:
        communicator, node = ledger.communicator, ledger.communicator.node
        if node is None or node.difference:
            continue
        node.tell(digest, text)
        if progress.busy(communicator):
            progress.stage(communicator, run_steps(partial(post, ledger)))
        else:
            post(ledger)
    return look


@cache
def _end_of(name: str) -> tuple[int, bytes]:
    """Return the digest and the text of what ends a mesh."""
    text = f"{name}() of the mesh".encode()
    return digest_bits(text, 32) or 1, text


def _group_of(ledger: Ledger) -> str:
    """Return the name of the first group that has this ledger."""
    return str(ledger.name).rpartition("/")[2]


# -- the protocol ----------------------------------------------------------------------------------

_ROW_BYTES = 1024
_MOST_PLACES = 4
"""So many of the places that led to a call are shown."""
_HEAD_BYTES = 256
"""Bytes kept from the front of a call that is too long for its row."""


def compare(
    communicator: Communicator,
    call: Call,
    compared: object = None,
    *,
    mine: bytes = b"",
    stack: tuple[str, ...] = (),
    note: str = "",
) -> Steps:
    """Compare `call` with the other ranks' calls; the steps' value is what all ranks bring.

    Args:
        communicator: The ranks to compare.
        call: What this rank calls.
        compared: The part of the shape that must agree.
        mine: What this rank brings, as JSON.
        stack: The places that led to the call, the innermost first, where they must agree, too.
        note: What went wrong already on this rank; makes every rank raise.

    Raises:
        MismatchError: On every rank alike, if any two differ.
    """
    size = communicator.size
    h, v = call.fingerprint((compared, stack, note)), digest_bits(mine, 63)
    numbers = np.array([h, -h, v, -v, len(mine)])
    yield communicator.all_reduce(None, numbers, "max")
    if numbers[0] != -numbers[1] or note:
        row = _fitted(_shown(call, stack), note and f": {note}").ljust(_ROW_BYTES, b"\0")
        table = yield from _table(communicator, row)
        raise on_all_ranks(MismatchError(_report(call.group, table)))
    if numbers[2] == -numbers[3]:
        return [mine] * size
    # JSON does not mind spaces behind it.
    return (yield from _table(communicator, mine.ljust(int(numbers[4]))))


def _table(communicator: Communicator, row: bytes) -> Steps:
    """Gather the rows of all ranks, of equally many bytes."""
    size, nbytes = communicator.size, len(row)
    table = np.empty(size * nbytes, np.uint8)
    yield communicator.all_gather(np.frombuffer(row, np.uint8).copy(), table, [nbytes] * size)
    return [bytes(part) for part in table.reshape(size, nbytes)]


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


def _report(group: str, table: Sequence[bytes]) -> str:
    texts = [row.rstrip(b"\0").decode(errors="replace") for row in table]
    ranks = ranks_by_value(enumerate(texts))
    rows = "\n".join(f"  {rank_names(who)}: {text}" for text, who in ranks.items())
    is_of_all = all(f" on group {group!r}" in text for text in texts)
    among = f"group {group!r}" if is_of_all else "groups that share a communicator"
    return (
        f"the ranks of {among} must call the same collective with matching arguments, "
        f"but called:\n{rows}"
    )


class PlannedMax:
    """The largest of small numbers, one of each rank: a planned all-reduce of a byte.

    Args:
        all_reduce_init: That of the ranks' group.
        label: Names the exchange.
    """

    def __init__(self, all_reduce_init: Callable[..., Any], label: str) -> None:
        self._number = np.zeros(1, np.uint8)
        self._plan = all_reduce_init(self._number, "max", out=self._number, label=label)
        self._handle: Any = None

    def start(self, number: int) -> None:
        """Start to compare this rank's number with those of the others. Collective."""
        self._number[0] = number
        self._handle = self._plan.start()

    def resolve(self) -> int:
        """Wait for what was started, and return the largest number; the last one if nothing was."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.resolve()
        return int(self._number[0])

    def largest(self, number: int) -> int:
        """Return the largest of the ranks' numbers. Collective, and waits."""
        self.start(number)
        return self.resolve()

"""Small facts that all ranks must know or agree on. Collective, and waits."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np

from mpimesh.arguments import plain_text
from mpimesh.errors import MismatchError, MpimeshError, on_all_ranks
from mpimesh.mesh import WORLD
from mpimesh.runtime.call import Call
from mpimesh.runtime.checks import compare
from mpimesh.runtime.progress import Progress
from mpimesh.transport import Communicator, Steps

__all__ = ["agree", "agreed", "announce", "exchange"]

T = TypeVar("T")


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
    progress: Progress, communicator: Communicator, value: Any, *, what: object
) -> list[Any]:
    """Give every rank the values of all ranks, in rank order. Values are what JSON can say.

    Args:
        progress: The unfinished operations of this rank.
        communicator: The ranks.
        value: This rank's value.
        what: Its `str` names the wait in reports: what the user's program is in.

    Cost:
        Two all-gathers: of sizes, then of texts.
    """
    text = np.frombuffer(json.dumps(value).encode(), np.uint8).copy()

    def steps() -> Steps:
        if communicator.mail is not None:
            # Not what else a call says: that may be what the ranks are about to tell.
            name = what.name if isinstance(what, Call) else str(what)
            yield from compare(communicator, Call(name, communicator.name), None)
        sizes = np.empty(communicator.size, np.int64)
        yield communicator.all_gather(np.array([text.size]), sizes, [1] * communicator.size)
        texts = np.empty(int(sizes.sum()), np.uint8)
        yield communicator.all_gather(text, texts, sizes.tolist())
        return [json.loads(bytes(part)) for part in np.split(texts, np.cumsum(sizes)[:-1])]

    values: list[Any] = _wait(
        progress, communicator, steps(), what, "exchange of facts", "as in from_callback"
    )
    return values


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
    word = signatures.post(number, (name, within, None, ""))
    if word < 0:
        raise signatures.error(group)
    return number, partial(signatures.look, number, group) if word else None

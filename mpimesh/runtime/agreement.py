"""Small facts that all ranks must know or agree on. Collective, and waits."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from mpimesh.errors import MpimeshError, on_all_ranks
from mpimesh.mesh import WORLD
from mpimesh.runtime.call import Call
from mpimesh.runtime.checks import compare
from mpimesh.runtime.progress import Progress
from mpimesh.transport import Communicator, Steps

__all__ = ["agree", "agreed", "exchange"]

T = TypeVar("T")


def agree(progress: Progress, communicator: Communicator, call: Call) -> None:
    """Return if all ranks make the same `call`, and raise on all of them if not.

    Raises:
        MismatchError: On every rank, naming each rank's call.

    Cost:
        One all-reduce of 16 bytes.
    """
    steps = compare(communicator, call, call.shape, with_site=False)
    _wait(progress, communicator, steps, call)


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
        MpimeshError: That of `make`, on every rank, if it is the same on all.
        MismatchError: On every rank, if values or errors differ.
    """
    problem: MpimeshError | None = None
    try:
        value = make()
        text = rule(value)
    except MpimeshError as error:
        problem = error
        text = f"{type(error).__name__}: {error}"
    agree(progress, communicator, Call(name, WORLD, rule=text))
    if problem is not None:
        raise on_all_ranks(problem)
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
        sizes = np.empty(communicator.size, np.int64)
        yield communicator.all_gather(np.array([text.size]), sizes, [1] * communicator.size)
        texts = np.empty(int(sizes.sum()), np.uint8)
        yield communicator.all_gather(text, texts, sizes.tolist())
        return [json.loads(bytes(part)) for part in np.split(texts, np.cumsum(sizes)[:-1])]

    values: list[Any] = _wait(progress, communicator, steps(), what)
    return values


def _wait(progress: Progress, communicator: Communicator, steps: Steps, what: object) -> Any:
    request = progress.stage(communicator, steps)
    progress.wait(communicator, request, what=what)
    return request.value

"""Collectives on the buffers of all ranks, where they are in one memory.

Plain NumPy, rank after rank: this is also the readable definition of what the
other transports must do, and the oracle they are tested against.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate

import numpy as np

from mpimesh.arrays.types import HostArray

__all__ = ["MOVES", "Contribution"]

_FUNCTIONS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


@dataclass(slots=True)
class Contribution:
    """One rank's part in a collective.

    Attributes:
        kind: The collective's name.
        rule: What must be equal on all ranks: the reduction, the root.
        send: The rank's input, if it has one.
        recv: Where its output goes, if it gets one.
        counts: Elements of each block.
    """

    kind: str
    rule: object
    send: HostArray | None
    recv: HostArray | None
    counts: tuple[int | None, ...]


def _reduced(parts: list[Contribution]) -> HostArray:
    rule = parts[0].rule
    function = _FUNCTIONS[rule[0] if isinstance(rule, tuple) else str(rule)]
    inputs = [part.send for part in parts if part.send is not None]
    # The first step makes a new array, so that an output may be one of the inputs.
    # Overflow and NaN pass silently, as they do in MPI.
    with np.errstate(all="ignore"):
        return reduce(function, inputs) if len(inputs) > 1 else inputs[0].copy()


def _deliver(parts: list[Contribution], whole: HostArray) -> None:
    for part in parts:
        if part.recv is not None:
            part.recv[...] = whole


def _all_reduce(parts: list[Contribution]) -> None:
    _deliver(parts, _reduced(parts))


def _reduce_scatter(parts: list[Contribution]) -> None:
    whole = _reduced(parts)
    for part, block in zip(parts, _blocks(parts[0].counts), strict=True):
        _copy(part.recv, whole[block])


def _gather(parts: list[Contribution]) -> None:
    sent = [part.send for part in parts if part.send is not None]
    for part in parts:
        if part.recv is not None:
            np.concatenate(sent, out=part.recv)


def _scatter(parts: list[Contribution]) -> None:
    for part, block in zip(parts, _blocks(parts[0].counts), strict=True):
        _copy(part.recv, _root_buffer(parts)[block])


def _all_to_all(parts: list[Contribution]) -> None:
    cut = [
        [part.send[block] for block in _blocks(part.counts)]
        for part in parts
        if part.send is not None
    ]
    for dest, part in enumerate(parts):
        if part.recv is not None:
            np.concatenate([blocks[dest] for blocks in cut], out=part.recv)


def _broadcast(parts: list[Contribution]) -> None:
    source = _root_buffer(parts)
    for part in parts:
        if part.recv is not source:
            _copy(part.recv, source)


def _barrier(parts: list[Contribution]) -> None:
    """Nothing moves: all ranks are here, which is the point."""


def _root_buffer(parts: list[Contribution]) -> HostArray:
    root = parts[0].rule
    send = parts[root].send if isinstance(root, int) else None
    if send is None:
        raise ValueError(f"root {root} brought no buffer")
    return send


def _copy(target: HostArray | None, source: HostArray) -> None:
    if target is not None:
        target[...] = source


def _blocks(counts: tuple[int | None, ...]) -> list[slice]:
    sizes = [count or 0 for count in counts]
    return [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]


MOVES: dict[str, Callable[[list[Contribution]], None]] = {
    "all_reduce": _all_reduce,
    "reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "barrier": _barrier,
}
"""For each collective, the function that moves the buffers of all ranks."""

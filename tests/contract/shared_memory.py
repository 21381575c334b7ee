"""Communicators whose ranks share memory, arrays in it, and meshes of nodes that are made up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any
from unittest.mock import patch

import numpy as np

from mpimesh.comm.arena import Node
from mpimesh.comm.engine import ProgressEngine
from mpimesh.runtime.world import current_world

__all__ = [
    "MEMORIES",
    "PIECES",
    "done",
    "node_of",
    "nodes_of",
    "opened",
    "pieces_of",
    "put",
    "reduced_in_order",
]

MEMORIES = ("ordinary", "shared", "mixed")
"""Where the ranks' arrays lie; mixed: on every second rank in shared memory."""

PIECES = [0]
"""Most elements in one MPI call, as `pieces_of` says; 0 for what this MPI can do."""

_FUNCTIONS: dict[str, Any] = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


@lru_cache
def node_of(part: int) -> Any:
    """Return this process's memory, one for all tests: address space is not given back."""
    node = Node()
    node._key ^= part  # as if it were another node, or another part of this one
    return node


@contextmanager
def nodes_of(ranks: int) -> Iterator[None]:
    """Take each `ranks` consecutive ranks of MPI's world for a node, in meshes made inside.

    Args:
        ranks: How many; 0 for the real nodes.
    """
    from mpi4py import MPI  # late: importing it starts MPI

    if not ranks:
        yield
        return
    # Which ranks are a node is found out with the first mesh of a process.
    with patch.object(current_world(), "node", node_of(MPI.COMM_WORLD.rank // ranks)):
        yield


@contextmanager
def pieces_of(elements: int) -> Iterator[None]:
    """Have at most so many elements in one MPI call, in meshes made inside."""
    from mpimesh.comm import routed  # late: importing it starts MPI

    in_pieces = partial(routed.routed, limit=elements)
    with patch.object(routed, "routed", in_pieces):
        PIECES[0] = elements
        try:
            yield
        finally:
            PIECES[0] = 0


@contextmanager
def opened(
    comm: Any,
    mode: str = "always",
    *,
    limit: int = 0,
    node_ranks: int = 0,
    part: int = 0,
) -> Iterator[Any]:
    """Open a communicator for the ranks of `comm`.

    Args:
        comm: MPI's.
        mode: The setting ``MPIMESH_NODE_SHARED``.
        limit: Most elements in one MPI call; any but 0 makes the stage as small as it can be.
        node_ranks: How many ranks count as a node; 0 for all.
        part: Instead, the number of this rank's node.
    """
    # Imported late: importing them starts MPI.
    from mpimesh.comm.routed import RoutedCommunicator

    node = node_of(comm.rank // node_ranks if node_ranks else part)
    communicator = RoutedCommunicator(comm.Dup(), node, ProgressEngine(), mode, limit=limit)
    yield communicator
    # Not after an error: the other ranks may be anywhere.
    communicator.free()


def done(communicator: Any, *requests: Any) -> None:
    """Wait for requests, in their order, and move all others along meanwhile."""

    def over(request: Any) -> bool:
        communicator.engine.advance()
        return bool(request.test())

    for request in requests:
        assert communicator.wait(partial(over, request), 30), "this takes too long"


def put(array: Any, memory: str, communicator: Any) -> Any:
    """Return a copy of a flat array that lies where `memory` says."""
    if memory == "ordinary" or (memory == "mixed" and communicator.rank % 2 == 0):
        return array.copy()
    arena = communicator._node.arena
    copy = arena.empty(array.nbytes).view(array.dtype)
    copy[...] = array
    assert arena.find(copy) > 0
    return copy


def reduced_in_order(inputs: list[Any], op: str) -> Any:
    """Reduce from left to right, as a loop in one process does."""
    total = inputs[0].copy()
    with np.errstate(all="ignore"):
        for array in inputs[1:]:
            total = _FUNCTIONS[op](total, array)
        if op == "mean":  # of complex numbers each part by itself, which NumPy does not do
            parts = total.view(total.real.dtype)
            parts /= len(inputs)
        return total

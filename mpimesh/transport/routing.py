"""Give a communicator of MPI the ways that its ranks have besides messages."""

from __future__ import annotations

from mpi4py import MPI

from mpimesh.settings import Settings
from mpimesh.transport.choices import Choices
from mpimesh.transport.engine import Engine
from mpimesh.transport.mpi import MPICommunicator
from mpimesh.transport.node import Node
from mpimesh.transport.routed import RoutedCommunicator

__all__ = ["open_node", "routed"]


def open_node(settings: Settings) -> Node:
    """Return the memory of this process, for the ranks of its node. Local."""
    part = MPI.COMM_WORLD.rank // settings.node_ranks if settings.node_ranks else 0
    return Node(part)


def routed(
    communicator: MPICommunicator, node: Node, engine: Engine, settings: Settings
) -> RoutedCommunicator:
    """Collective: return a communicator for the same MPI communicator, which it takes over."""
    if isinstance(communicator, RoutedCommunicator):
        return communicator
    choices = node.choices.get(settings.node_shared)
    if choices is None:
        choices = node.choices[settings.node_shared] = Choices.of_machine(settings.node_shared)
    return RoutedCommunicator(
        communicator.native, node, engine, choices, limit=settings.chunk_elements
    )

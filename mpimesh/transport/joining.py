"""The collective step by which ranks find out who shares memory with whom."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from mpimesh.arrays.types import HostArray
from mpimesh.errors import TransportError
from mpimesh.transport.arena import bell_of
from mpimesh.transport.node import Node
from mpimesh.transport.signatures import BOARD_BYTES, Signatures
from mpimesh.transport.team import STAGE_BYTES, Team, cell_bytes, whole_stage_bytes
from mpimesh.transport.waiting import poll

__all__ = ["Neighbours", "find_neighbours"]

_POKE_TAG = 32766
_PAGE_BYTES = 4096
_SMALLEST_STAGE_LINES = 64
_CORE_NUMBERS, _CORE_BITS = 16, 62


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The ranks of a communicator by nodes.

    Attributes:
        nodes: The ranks of each node, in order.
        team: Those on this rank's node, ready to meet; None if memory is not shared.
        signatures: What those on this rank's node start; None if it is alone there, or they cannot
            open each other's memory.
        kept: This rank's cell, stage and board of signatures, to be kept alive.
        why_not: Why memory is not shared, the same on all ranks up to who could not open what.
        cores: How many cores those on this rank's node have between them.
    """

    nodes: list[list[int]]
    team: Team | None
    signatures: Signatures | None
    kept: HostArray | None
    why_not: str
    cores: int


def find_neighbours(comm: MPI.Intracomm, node: Node, agreeing: int, small: bool) -> Neighbours:
    """Collective: find out which ranks share a node, and open their memory.

    Args:
        comm: The ranks.
        node: This rank's memory, and what it has opened so far.
        agreeing: A number that must be the same on all ranks for arrays to be moved through shared
            memory; 0 to move none.
        small: Whether the stage is to be as small as it can be, for tests.

    Cost:
        An all-gather of 184 bytes, and an all-reduce of 8.
    """
    stage_bytes = _SMALLEST_STAGE_LINES * comm.size if small else STAGE_BYTES
    cell_at = BOARD_BYTES
    stage_at = -(-(cell_at + cell_bytes(comm.size)) // _PAGE_BYTES) * _PAGE_BYTES
    arena, kept, at = node.arena, None, -1
    if arena is not None:
        # Of which only what is touched costs memory.
        kept = arena.empty(stage_at + (whole_stage_bytes(stage_bytes) if agreeing else 0))
        if kept is not None:
            kept[:stage_at] = 0
            at = arena.find(kept)
    mine = np.array([*_own_cores(), *node.address, at, agreeing], np.int64)
    told = np.empty((comm.size, mine.size), np.int64)
    poll(comm.Iallgather(mine, told).Test)
    table = told[:, _CORE_NUMBERS:]
    keys: list[int] = table[:, 0].tolist()
    nodes = [[r for r in range(comm.size) if keys[r] == key] for key in dict.fromkeys(keys)]
    members = next(ranks for ranks in nodes if comm.rank in ranks)
    cores = _count(np.bitwise_or.reduce(told[members, :_CORE_NUMBERS]))
    # From here to the reduction the table decides, which all ranks have alike.
    refused = ""
    if not table[:, -1].all():
        refused = "switched off by MPIMESH_NODE_SHARED=never"
    elif len(nodes) == comm.size:
        refused = "each rank is alone on its node"
    elif len(set(table[:, -1].tolist())) > 1:
        refused = "the ranks have measured or set different sizes"
    if len(nodes) == comm.size:
        return Neighbours(nodes, None, None, None, refused, cores)
    team = signatures = None
    why_not = node.why_not or "no memory is left for others to read"
    if arena is not None and kept is not None:
        try:
            memories = [node.open(tuple(table[rank, :-2].tolist())) for rank in members]
        except TransportError as error:
            why_not = str(error)
        else:
            bells = [bell_of(memory) for memory in memories]
            place, parts = members.index(comm.rank), [int(table[rank, -2]) for rank in members]
            boards = [
                memory[part : part + BOARD_BYTES]
                for memory, part in zip(memories, parts, strict=True)
            ]
            if len(members) > 1:
                signatures = Signatures(place, members, boards)
            team = Team(
                place,
                memories,
                [part + cell_at for part in parts],
                [part + stage_at for part in parts],
                arena,
                lambda: comm.Iprobe(MPI.ANY_SOURCE, _POKE_TAG),
                stage_bytes=stage_bytes,
                bells=bells,
            )
    could = np.array([team is not None], np.int64)
    poll(comm.Iallreduce(MPI.IN_PLACE, could, MPI.MIN).Test)
    if could[0]:
        return Neighbours(nodes, None if refused else team, signatures, kept, refused, cores)
    why_not = why_not if team is None else "another rank cannot open its neighbours' memory"
    return Neighbours(nodes, None, None, None, refused or why_not, cores)


def _own_cores() -> list[int]:
    """Return the cores that this process may run on, a bit for each."""
    available = getattr(os, "sched_getaffinity", None)
    cores = range(os.cpu_count() or 1) if available is None else available(0)
    numbers = [0] * _CORE_NUMBERS
    for core in cores:
        place, bit = divmod(core % (_CORE_NUMBERS * _CORE_BITS), _CORE_BITS)
        numbers[place] |= 1 << bit
    return numbers


def _count(numbers: HostArray) -> int:
    return sum(int(number).bit_count() for number in numbers)

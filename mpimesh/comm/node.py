"""The ranks of one node as each other's memory sees them.

Every process has one arena. Which others it can open is found out by doing it:
a rank maps the file of another and looks for the token in it.
"""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mpimesh.arrays.namespace import HostArray
from mpimesh.comm.arena import Arena, bell_of, map_file
from mpimesh.comm.engine import poll
from mpimesh.comm.shared_window import (
    STAGE_BYTES,
    SharedWindow,
    cell_bytes,
    whole_stage_bytes,
)
from mpimesh.comm.signatures import BOARD_BYTES, Signatures
from mpimesh.comm.tuner import KeptSizes
from mpimesh.errors import TransportError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Neighbours", "Node", "find_neighbours"]

_POKE_TAG = 32766
_PAGE_BYTES = 4096
_SMALLEST_STAGE_LINES = 64
_CORE_NUMBERS, _CORE_BITS = 16, 62


class Node:
    """This process's arena, and those of others on its node that it has opened.

    Args:
        part: Stands for a part of the node that is taken for a node of its own.

    Attributes:
        arena: The memory of this process; None if there can be none.
        why_not: Why there is none.
        sizes: From which sizes on it is used, by the setting ``MPIMESH_NODE_SHARED``.
    """

    def __init__(self, part: int = 0) -> None:
        self.arena: Arena | None = None
        self.why_not = ""
        self.sizes: dict[str, KeptSizes] = {}
        self._key = _node_key(part)
        self._opened: dict[tuple[int, ...], HostArray] = {}
        self._kept: list[HostArray | None] = []
        try:
            self.arena = Arena()
        except TransportError as error:
            self.why_not = str(error)

    @property
    def address(self) -> tuple[int, ...]:
        """Node, process, file, token and length: what others need to find this memory."""
        if self.arena is None:
            return (self._key, 0, -1, 0, 0)
        return (self._key, os.getpid(), self.arena.fd, self.arena.token, self.arena.nbytes)

    def keep(self, memory: HostArray | None) -> None:
        """Never hand `memory` out again: other processes may still look at it."""
        self._kept.append(memory)

    def open(self, address: tuple[int, ...]) -> HostArray:
        """Return the memory of the process with this address, as bytes.

        Raises:
            TransportError: If it cannot be opened, or is not what the address says.
        """
        if address not in self._opened:
            self._opened[address] = _open(address)
        return self._opened[address]


def _open(address: tuple[int, ...]) -> HostArray:
    _, pid, fd, token, nbytes = address
    if fd < 0:
        raise TransportError(f"process {pid} has no memory for others")
    try:
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise TransportError(f"the memory of process {pid} cannot be opened: {error}") from None
    try:
        if os.fstat(own).st_size != nbytes:
            raise TransportError(f"file {fd} of process {pid} is not its memory")
        found = map_file(own, nbytes)
    except OSError as error:
        raise TransportError(f"the memory of process {pid} cannot be mapped: {error}") from None
    finally:
        os.close(own)
    if found[:8].view(np.int64)[0] != token:
        raise TransportError(f"file {fd} of process {pid} is not its memory")
    return found


def _node_key(part: int) -> int:
    """Return a number that two processes share only if they see each other's process numbers."""
    facts = [socket.gethostname(), str(part), _boot(), _process_numbers()]
    digest = hashlib.blake2b("|".join(facts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _boot() -> str:
    """Return what tells this start of this machine from all others."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def _process_numbers() -> str:
    """Return the name of the space in which process numbers count: containers have their own."""
    path = Path("/proc/self/ns/pid")
    return str(path.readlink()) if path.is_symlink() else ""


# -- who shares memory with whom ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The ranks of a communicator by nodes.

    Attributes:
        nodes: The ranks of each node, in order.
        window: Those on this rank's node, None if memory is not shared.
        signatures: What those on this rank's node start; None if it is alone there, or they cannot
            open each other's memory.
        kept: This rank's cell, stage and board of signatures, to be kept alive.
        why_not: Why memory is not shared, the same on all ranks up to who could not open what.
        cores: How many cores those on this rank's node have between them.
    """

    nodes: list[list[int]]
    window: SharedWindow | None
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
    from mpi4py import MPI  # late: importing it starts MPI

    stage_bytes = _SMALLEST_STAGE_LINES * comm.size if small else STAGE_BYTES
    cell_at = BOARD_BYTES
    stage_at = -(-(cell_at + cell_bytes()) // _PAGE_BYTES) * _PAGE_BYTES
    arena, kept, at = node.arena, None, -1
    if arena is not None:
        # Of which only what is touched costs memory.
        kept = arena.empty(
            stage_at + (whole_stage_bytes(stage_bytes, comm.size) if agreeing else 0)
        )
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
    window = signatures = None
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
            window = SharedWindow(
                place,
                memories,
                [part + cell_at for part in parts],
                [part + stage_at for part in parts],
                arena,
                lambda: comm.Iprobe(MPI.ANY_SOURCE, _POKE_TAG),
                stage_bytes=stage_bytes,
                bells=bells,
            )
    could = np.array([window is not None], np.int64)
    poll(comm.Iallreduce(MPI.IN_PLACE, could, MPI.MIN).Test)
    if could[0]:
        return Neighbours(nodes, None if refused else window, signatures, kept, refused, cores)
    why_not = why_not if window is None else "another rank cannot open its neighbours' memory"
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

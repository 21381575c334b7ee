"""The ranks of one node as each other's memory sees them.

Every process has one arena. Which others it can open is found out by doing it:
a rank maps the file of another and looks for the token in it.
"""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mpimesh.arrays.types import HostArray
from mpimesh.errors import TransportError
from mpimesh.transport.arena import Arena
from mpimesh.transport.mapping import map_file

if TYPE_CHECKING:
    from mpimesh.transport.choices import Choices

__all__ = ["Node"]


class Node:
    """This process's arena, and those of others on its node that it has opened.

    Args:
        part: Stands for a part of the node that is taken for a node of its own.

    Attributes:
        arena: The memory of this process; None if there can be none.
        why_not: Why there is none.
        choices: What is known about when to use it, by the setting ``MPIMESH_NODE_SHARED``.
    """

    def __init__(self, part: int = 0) -> None:
        self.arena: Arena | None = None
        self.why_not = ""
        self.choices: dict[str, Choices] = {}
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

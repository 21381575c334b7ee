"""Control channels: messages between ranks about the job itself, such as that one leaves it.

A channel is a communicator of mpimesh alone that lives until the process ends: one for the ranks of
the first mesh, and another only for a mesh with ranks that no channel has yet. Nobody listens in
the background. A rank that waits in mpimesh polls the channels every 20 ms, and learns there that a
rank it waits for has left.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.comm import Request
from mpimesh.comm.waiting import poll
from mpimesh.errors import PeerLostError
from mpimesh.runtime.progress import Wait

if TYPE_CHECKING:
    # Importing it starts MPI: who makes a channel has done so.
    from mpimesh.comm.mpi import MPICommunicator

__all__ = ["ControlChannel", "ControlChannels", "PeerExit", "Tag", "decode", "encode"]

_POLL_EVERY_S = 0.02
_GRACE_S = 0.5
"""Seconds that a wait for a rank that has left may go on: its last messages may be under way."""


class Tag(IntEnum):
    """The kinds of messages on a control channel."""

    PEER_EXIT = 1
    WATCHDOG_QUESTION = 2
    WATCHDOG_ANSWER = 3
    DEADLOCK_QUESTION = 4
    DEADLOCK_ANSWER = 5
    DEADLOCK_VERDICT = 6


def encode(value: Any) -> HostArray:
    """Return a value that JSON can say as a message."""
    return np.frombuffer(json.dumps(value).encode(), np.uint8).copy()


def decode(message: HostArray) -> Any:
    """Return the value of a message."""
    return json.loads(bytes(message))


@dataclass(frozen=True, slots=True)
class PeerExit:
    """A rank has left one mesh, or the job.

    Attributes:
        why: What happened, with the rank as subject: ``"ended with exit code 3"``.
        exit_code: The exit code that the job should get from it; 0 if it left in peace.
        family: The mesh that it left; empty for all of them.
        started: For each mesh of a rank that left in peace, how many collectives it has started
            on each group. It has done its part in those, and others may still wait for them.
    """

    why: str
    exit_code: int = 0
    family: str = ""
    started: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def ends(self, wait: Wait) -> bool:
        """Tell whether `wait`, which takes the rank that left, can no longer be done."""
        family = wait.communicator.family
        if self.family and self.family != family:
            return False
        number = getattr(wait.what, "number", 0)
        done = self.started.get(family, {}).get(getattr(wait.what, "group", ""), 0)
        return not 0 < number <= done


class ControlChannel:
    """A communicator over which ranks tell each other about the job.

    Attributes:
        communicator: The communicator; nothing else uses it.
        world_ranks: The number in MPI's world of each of its ranks.
    """

    def __init__(self, communicator: MPICommunicator) -> None:
        self.communicator = communicator
        self.world_ranks = communicator.world_ranks
        self._ranks = {world_rank: rank for rank, world_rank in enumerate(self.world_ranks)}
        self._notifications: list[Request] = []

    def covers(self, world_ranks: Collection[int]) -> bool:
        """Tell whether all of these ranks are on the channel."""
        return self._ranks.keys() >= set(world_ranks)

    def send(self, tag: Tag, value: Any, world_ranks: Collection[int]) -> list[Request]:
        """Send a value to these ranks but this one. Never waits.

        Returns:
            The messages under way, for the caller to keep: MPI reads them until they are done.
        """
        message = encode(value)
        ranks = [self._ranks[world_rank] for world_rank in world_ranks]
        here = self.communicator.rank
        return [self.communicator.isend(message, rank, tag) for rank in ranks if rank != here]

    def receive(self, tag: Tag) -> Iterator[tuple[int, Any]]:
        """Take in all messages that have come: yield senders' ranks in MPI's world, and values."""
        while (pending := self.communicator.probe(tag)) is not None:
            source, size = pending
            message = np.empty(size, np.uint8)
            poll(self.communicator.irecv(message, source, tag).test)
            yield self.world_ranks[source], decode(message)

    def notify(self, peer_exit: PeerExit, world_ranks: Collection[int]) -> None:
        """Tell these ranks but this one that this rank leaves. Never waits."""
        self._notifications += self.send(Tag.PEER_EXIT, asdict(peer_exit), world_ranks)

    def poll(self) -> Iterator[tuple[int, PeerExit]]:
        """Yield the exits that ranks have told, with their ranks in MPI's world."""
        for world_rank, fields in self.receive(Tag.PEER_EXIT):
            yield world_rank, PeerExit(**fields)


class ControlChannels:
    """All control channels of this process, the meshes on them, and the ranks that have left."""

    def __init__(self) -> None:
        self._channels: list[ControlChannel] = []
        self._exits: dict[tuple[int, str], tuple[PeerExit, float]] = {}
        self._next_poll_s = 0.0
        self._meshes_made: dict[tuple[int, ...], int] = {}
        self._meshes: dict[str, tuple[Sequence[int], Callable[[], Mapping[str, int]]]] = {}

    def __iter__(self) -> Iterator[ControlChannel]:
        return iter(self._channels)

    def find(self, world_ranks: Collection[int]) -> ControlChannel | None:
        """Return a channel that has all these ranks."""
        return next((one for one in self._channels if one.covers(world_ranks)), None)

    def add(self, channel: ControlChannel) -> None:
        """Use a new channel from now on."""
        self._channels.append(channel)

    # -- meshes ----------------------------------------------------------------------

    def register_mesh(self, world_ranks: Sequence[int]) -> str:
        """Return the name of a new mesh over these ranks, the same on all of them.

        The ranks of a mesh make all meshes over just these ranks together, so they count alike.
        """
        key = (len(world_ranks), zlib.crc32(np.array(world_ranks).tobytes()))
        self._meshes_made[key] = self._meshes_made.get(key, 0) + 1
        family = ":".join(map(str, (*key, self._meshes_made[key])))
        self._meshes[family] = (world_ranks, dict)
        return family

    def count_by(self, family: str, started: Callable[[], Mapping[str, int]]) -> None:
        """Ask `started` for the number of collectives on each group of a mesh."""
        if family in self._meshes:
            self._meshes[family] = (self._meshes[family][0], started)

    def forget_mesh(self, family: str) -> None:
        """Forget a mesh that is closed, on all its ranks."""
        if self._meshes.pop(family, None) is None:
            return
        self._exits = {key: exit_ for key, exit_ in self._exits.items() if key[1] != family}

    # -- leaving ---------------------------------------------------------------------

    def leave_mesh(self, family: str, why: str, exit_code: int) -> None:
        """Tell the other ranks of a mesh that this one has left it, but not the job."""
        world_ranks, _ = self._meshes.pop(family, ((), None))
        channel = self.find(world_ranks)
        if channel is not None:
            channel.notify(PeerExit(why, exit_code, family), world_ranks)

    def leave(self, why: str, exit_code: int) -> None:
        """Tell all other ranks that this one has left the job.

        Cost:
            One message to each of them; who closes all meshes before has no need of it.
        """
        counts = {family: dict(started()) for family, (_, started) in self._meshes.items()}
        peer_exit = PeerExit(why, exit_code, started={} if exit_code else counts)
        for channel in self._channels:
            channel.notify(peer_exit, channel.world_ranks)

    # -- the exits of others -----------------------------------------------------------

    def poll(self) -> None:
        """Take in the exits that other ranks have told. Never waits."""
        now_s = time.monotonic()
        for channel in self._channels:
            for rank, peer_exit in channel.poll():
                self._exits[rank, peer_exit.family] = (peer_exit, now_s)

    def check(self, wait: Wait) -> None:
        """Poll every now and then during `wait`.

        Raises:
            PeerLostError: If a rank that it takes has left, and it is still not done a moment
                later.
        """
        now_s = time.monotonic()
        if now_s < self._next_poll_s:
            return
        self._next_poll_s = now_s + _POLL_EVERY_S
        self.poll()
        if not self._exits or wait.communicator.kind != "mpi":
            return
        world_ranks: Sequence[int] = wait.communicator.world_ranks  # type: ignore[attr-defined]
        peers = wait.peers
        needed = set(world_ranks if peers is None else (world_ranks[peer] for peer in peers))
        for (rank, _), (peer_exit, received_s) in self._exits.items():
            late = now_s > max(received_s, wait.since_s) + _GRACE_S
            if late and rank in needed and peer_exit.ends(wait):
                error = PeerLostError(
                    f"this rank waits in {wait.what}, but rank {rank} of the job {peer_exit.why}"
                )
                error.exit_code = peer_exit.exit_code or 1
                raise error

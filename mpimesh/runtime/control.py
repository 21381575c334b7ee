"""Control channels: messages between ranks about the job itself, such as that one leaves it.

A channel is a communicator of mpimesh alone that lives until the process ends: one for the ranks of
the first mesh, and another only for a mesh with ranks that no channel has yet. Nobody listens in
the background. A rank that waits in mpimesh polls the channels every 20 ms, and learns there that a
rank it waits for has left.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from mpimesh.comm import Communicator
from mpimesh.comm.engine import poll
from mpimesh.errors import PeerLostError
from mpimesh.runtime.launch import Launch, exit_status
from mpimesh.runtime.progress import Wait
from mpimesh.runtime.witness import NodeProcesses

if TYPE_CHECKING:
    # Importing it starts MPI.
    from mpimesh.comm.arena import Node

__all__ = [
    "ControlChannel",
    "ControlChannels",
    "PeerExit",
    "Survey",
    "Tag",
    "awaited_ranks",
    "job_ranks",
]

_POLL_EVERY_S = 0.02
_GRACE_S = 0.5
"""Seconds that a wait for a rank that has left may go on: its last messages may be under way."""


def job_ranks(communicator: Communicator) -> Sequence[int]:
    """Return the number in the job of each rank of a communicator; nothing if one has none."""
    ranks: Sequence[int] = getattr(communicator, "world_ranks", ())
    return () if -1 in ranks else ranks


def awaited_ranks(wait: Wait) -> Sequence[int]:
    """Return the ranks of the job that a wait takes, this one among them; nothing if unknown.

    -1 stands for one of another world.
    """
    ranks: Sequence[int] = getattr(wait.communicator, "world_ranks", ())
    return ranks if wait.peers is None or not ranks else [ranks[peer] for peer in wait.peers]


class Tag(IntEnum):
    """The kinds of messages on a control channel."""

    PEER_EXIT = 1
    WATCHDOG_QUESTION = 2
    WATCHDOG_ANSWER = 3
    DEADLOCK_QUESTION = 4
    DEADLOCK_ANSWER = 5
    DEADLOCK_VERDICT = 6
    FAILURE = 32_750
    """Also sent in the world's communicator, before the first mesh; below what every MPI allows."""


class PeerExit(NamedTuple):
    """A rank has left one mesh, or the job.

    Attributes:
        why: What happened, with the rank as subject: ``"ended with exit code 3"``.
        exit_code: The exit code that the job should get from it; 0 if it left in peace.
        mesh: The mesh that it left; empty for all of them.
        started: For each mesh of a rank that left in peace, how many collectives it has started
            on each group. It has done its part in those, and others may still wait for them.
    """

    why: str
    exit_code: int = 0
    mesh: str = ""
    started: Mapping[str, Mapping[str, int]] = {}

    def ends(self, wait: Wait) -> bool:
        """Tell whether `wait`, which takes the rank that left, can no longer be done."""
        if self.mesh and self.mesh != wait.mesh:
            return False
        number = getattr(wait.what, "number", 0)
        done = self.started.get(wait.mesh, {}).get(getattr(wait.what, "group", ""), 0)
        return not 0 < number <= done


class ControlChannel:
    """A communicator over which ranks tell each other about the job.

    Args:
        native: A communicator of mpi4py, whose messages with these tags are the channel's alone.

    Attributes:
        native: The communicator.
        world_ranks: The number in MPI's world of each of its ranks.
        world_rank: That of this rank.
    """

    def __init__(self, native: Any) -> None:
        from mpi4py import MPI  # late: importing it starts MPI

        self.native = native
        self._status = MPI.Status
        self.world_ranks: Sequence[int] = native.Get_group().Translate_ranks(
            None, MPI.COMM_WORLD.Get_group()
        )
        self.world_rank = self.world_ranks[native.rank]
        self._ranks = {world_rank: rank for rank, world_rank in enumerate(self.world_ranks)}
        self._sends: dict[Tag, list[Any]] = {}

    def covers(self, world_ranks: Collection[int]) -> bool:
        """Tell whether all of these ranks are on the channel."""
        return self._ranks.keys() >= set(world_ranks)

    def send(
        self, tag: Tag, value: Any, world_ranks: Collection[int], *, delivery_s: float = 0.0
    ) -> None:
        """Send a value that JSON can say to these ranks but this one.

        Args:
            tag: What kind of message it is; of each kind one thread sends.
            value: The value.
            world_ranks: The ranks.
            delivery_s: How long to stay with each message until it is taken.
        """
        message = json.dumps(value).encode()
        # MPI reads the message until its request is done.
        self._sends[tag] = sends = [one for one in self._sends.get(tag, ()) if not one.Test()]
        for rank in world_ranks:
            if rank != self.world_rank:
                sends.append(self.native.Isend(message, self._ranks[rank], tag))
                poll(sends[-1].Test, delivery_s)

    def receive(self, tag: Tag) -> Iterator[tuple[int, Any]]:
        """Take in all messages that have come: yield senders' ranks in MPI's world, and values."""
        status = self._status()
        while self.native.Iprobe(tag=tag, status=status):
            message = bytearray(status.count)
            self.native.Recv(message, status.source, tag)
            yield self.world_ranks[status.source], json.loads(message)

    def exchange_failures(
        self, failure: int, world_ranks: Collection[int], limit_s: float
    ) -> dict[int, int]:
        """Tell ranks how this one fails, and return how others do, by their ranks in MPI's world.

        Args:
            failure: A number, equal on ranks that fail alike.
            world_ranks: The ranks to tell.
            limit_s: How long to wait for others to fail; it ends when all have.
        """
        self.send(Tag.FAILURE, failure, world_ranks)
        end_s = time.monotonic() + limit_s
        failures: dict[int, int] = {}
        while time.monotonic() < end_s and len(failures) < len(self.world_ranks) - 1:
            time.sleep(0.01)
            failures |= self.receive(Tag.FAILURE)
        return failures


class Survey:
    """Questions of this rank to the others of a channel, and its answers to theirs.

    A rank that has not answered an earlier question yet is not asked another one: it may never poll
    again.

    Args:
        channels: Those to the other ranks.
        question: The tag of questions.
        answer: That of answers.
        state: Returns what this rank answers, which JSON can say.
        delivery_s: How long to stay with an answer until it is taken.

    Attributes:
        answers: Those to the latest question, by rank in MPI's world.
    """

    def __init__(
        self,
        channels: ControlChannels,
        question: Tag,
        answer: Tag,
        state: Callable[[], Any],
        *,
        delivery_s: float = 0.0,
    ) -> None:
        self._channels = channels
        self._question, self._answer, self._state = question, answer, state
        self._delivery_s = delivery_s
        self._number = 0
        self._asked: dict[int, int] = {}
        self.answers: dict[int, Any] = {}

    def ask(self, channel: ControlChannel) -> None:
        """Ask the other ranks of a channel. Never waits."""
        self._number += 1
        self.answers = {}
        ranks = [rank for rank in channel.world_ranks if rank not in self._asked]
        self._asked |= {rank: self._number for rank in ranks if rank != channel.world_rank}
        channel.send(self._question, self._number, ranks)

    @property
    def is_answered(self) -> bool:
        """True if all who were asked the latest question have answered it."""
        return self._number not in self._asked.values()

    def poll(self) -> None:
        """Answer the questions and take in the answers that have come."""
        for channel in self._channels:
            for rank, number in channel.receive(self._question):
                answer = [number, self._state()]
                channel.send(self._answer, answer, [rank], delivery_s=self._delivery_s)
            for rank, (number, state) in channel.receive(self._answer):
                if self._asked.get(rank) == number:
                    del self._asked[rank]
                if number == self._number:
                    self.answers[rank] = state


class ControlChannels:
    """All control channels of this process, the meshes on them, and the ranks that have left.

    Attributes:
        processes: Those of the other ranks of the node that are on a channel.
        communicator: That of the ranks of the first mesh; None before it is made.
    """

    def __init__(self) -> None:
        # By PMIx, Open MPI's ranks learn it and leave, under Slurm, too.
        kills_all = Launch.detect().launcher.startswith("mpiexec") or "PMIX_RANK" in os.environ
        self.processes = NodeProcesses(launcher_kills_all=kills_all)
        self.communicator: Communicator | None = None
        self._channels: list[ControlChannel] = []
        self._watched = 0
        self._exits: dict[tuple[int, str], tuple[PeerExit, float]] = {}
        self._next_poll_s = 0.0
        self._meshes_made: dict[tuple[int, ...], int] = {}
        self._meshes: dict[str, tuple[Sequence[int], Callable[[], Mapping[str, int]]]] = {}

    def __iter__(self) -> Iterator[ControlChannel]:
        return iter(self._channels)

    def find(self, world_ranks: Collection[int]) -> ControlChannel | None:
        """Return a channel that has all these ranks."""
        return next((one for one in self._channels if one.covers(world_ranks)), None)

    def connect(self, communicator: Communicator) -> None:
        """Collective: make sure that the ranks of `communicator` can tell each other that they end.

        All ranks of a channel know it, so those of the communicator decide alike.
        """
        world_ranks = job_ranks(communicator) if communicator.kind == "mpi" else ()
        if not world_ranks or self.find(world_ranks) is not None:
            return  # of another world, whose ranks have no number here; or not the first
        self._channels.append(ControlChannel(communicator.native.Dup()))
        self.communicator = self.communicator or communicator

    def watch(self, node: Node) -> None:
        """Collective: watch the processes of this node that are on a new channel."""
        for channel in self._channels[self._watched :]:
            self.processes.watch(channel.native, channel.world_ranks, node.address[0])
        self._watched = len(self._channels)

    # -- meshes ----------------------------------------------------------------------

    def register_mesh(self, communicator: Communicator) -> str:
        """Name a new mesh over the ranks of `communicator`, alike on all of them.

        The ranks of a mesh make all meshes over just these ranks together, so they count alike.

        Returns:
            The name; empty if the ranks have no numbers in the job.
        """
        world_ranks = job_ranks(communicator) if communicator.kind == "mpi" else ()
        if not world_ranks:
            return ""
        key = (len(world_ranks), zlib.crc32(array("q", world_ranks).tobytes()))
        self._meshes_made[key] = self._meshes_made.get(key, 0) + 1
        mesh = ":".join(map(str, (*key, self._meshes_made[key])))
        self._meshes[mesh] = (world_ranks, dict)
        return mesh

    def count_by(self, mesh: str, started: Callable[[], Mapping[str, int]]) -> None:
        """Ask `started` for the number of collectives on each group of a mesh."""
        if mesh in self._meshes:
            self._meshes[mesh] = (self._meshes[mesh][0], started)

    def forget_mesh(self, mesh: str) -> None:
        """Forget a mesh that is closed, on all its ranks."""
        if self._meshes.pop(mesh, None) is not None:
            self._exits = {key: exit_ for key, exit_ in self._exits.items() if key[1] != mesh}

    # -- leaving ---------------------------------------------------------------------

    def leave_mesh(self, mesh: str, error: BaseException) -> None:
        """Tell the other ranks of a mesh that this one leaves it by `error`, but not the job.

        The error may yet be caught.
        """
        world_ranks, _ = self._meshes.pop(mesh, ((), None))
        channel = self.find(world_ranks)
        if channel is not None:
            exit_code = exit_status(error.code) if isinstance(error, SystemExit) else 0
            why = f"left the mesh by {type(error).__name__}: {error}"
            peer_exit = PeerExit(why, exit_code, mesh)
            channel.send(Tag.PEER_EXIT, peer_exit._asdict(), world_ranks)

    def leave(self, why: str, exit_code: int) -> None:
        """Tell all other ranks that this one has left the job.

        Cost:
            One message to each of them; who closes all meshes before has no need of it.
        """
        counts = {mesh: dict(started()) for mesh, (_, started) in self._meshes.items()}
        peer_exit = PeerExit(why, exit_code, started={} if exit_code else counts)
        for channel in self._channels:
            channel.send(Tag.PEER_EXIT, peer_exit._asdict(), channel.world_ranks)

    # -- the exits of others -----------------------------------------------------------

    def somebody_leaves(self) -> bool:
        """Tell whether another rank has told that it leaves a mesh, or fails. Never waits."""
        self.poll()
        return bool(self._exits) or any(
            channel.native.Iprobe(tag=Tag.FAILURE) for channel in self._channels
        )

    def poll(self) -> None:
        """Take in the exits that other ranks have told. Never waits."""
        now_s = time.monotonic()
        for channel in self._channels:
            for rank, fields in channel.receive(Tag.PEER_EXIT):
                peer_exit = PeerExit(**fields)
                self._exits[rank, peer_exit.mesh] = (peer_exit, now_s)

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
        needed = set(awaited_ranks(wait))
        for (rank, _), (peer_exit, received_s) in self._exits.items():
            late = now_s > max(received_s, wait.since_s) + _GRACE_S
            if late and rank in needed and peer_exit.ends(wait):
                error = PeerLostError(
                    f"this rank waits in {wait.what}, but rank {rank} of the job {peer_exit.why}"
                )
                error.exit_code = peer_exit.exit_code or 1
                raise error

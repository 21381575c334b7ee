"""The lines over which ranks tell each other that they leave.

A line is a communicator of mpimesh alone that lives until the process ends: one
for the ranks of the first mesh, and another only for a mesh with ranks that no
line has yet. Nobody listens in the background. A rank that waits in mpimesh looks
for news every 20 ms, and learns there that a rank it waits for has left.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.errors import PeerLostError
from mpimesh.runtime.progress import Wait
from mpimesh.transport import Request
from mpimesh.transport.waiting import poll

if TYPE_CHECKING:
    # Importing it starts MPI: who makes a line has done so.
    from mpimesh.transport.mpi import MPICommunicator

__all__ = ["Farewell", "Line", "Lines"]

_FAREWELL_TAG = 1
_LOOK_EVERY_S = 0.02
_GRACE_S = 0.5
"""Seconds that a wait for a rank that has left may go on: its last messages may be under way."""


@dataclass(frozen=True, slots=True)
class Farewell:
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

    def to_bytes(self) -> HostArray:
        """Return the farewell as a message."""
        return np.frombuffer(json.dumps(asdict(self)).encode(), np.uint8).copy()

    @classmethod
    def from_bytes(cls, message: HostArray) -> Farewell:
        """Read a message."""
        return cls(**json.loads(bytes(message)))

    def ends(self, wait: Wait) -> bool:
        """Tell whether `wait`, which takes the rank that left, can no longer be done."""
        family = wait.communicator.family
        if self.family and self.family != family:
            return False
        number = getattr(wait.what, "number", 0)
        done = self.started.get(family, {}).get(getattr(wait.what, "group", ""), 0)
        return not 0 < number <= done


class Line:
    """A communicator over which ranks tell that they leave.

    Attributes:
        communicator: The communicator; nothing else uses it.
        world_ranks: The number in MPI's world of each of its ranks.
    """

    def __init__(self, communicator: MPICommunicator) -> None:
        self.communicator = communicator
        self.world_ranks = communicator.world_ranks
        self._places = {rank: place for place, rank in enumerate(self.world_ranks)}
        self._sends: list[Request] = []

    def covers(self, world_ranks: Collection[int]) -> bool:
        """Tell whether all of these ranks are on the line."""
        return self._places.keys() >= set(world_ranks)

    def place(self, world_rank: int) -> int:
        """Return a rank's number on this line."""
        return self._places[world_rank]

    def tell(self, farewell: Farewell, world_ranks: Collection[int]) -> None:
        """Send `farewell` to these ranks but this one. Never waits."""
        message = farewell.to_bytes()
        for rank in world_ranks:
            if self._places[rank] != self.communicator.rank:
                place = self._places[rank]
                self._sends.append(self.communicator.isend(message, place, _FAREWELL_TAG))

    def heard(self) -> Iterator[tuple[int, Farewell]]:
        """Yield the farewells that have come, with their senders' ranks in MPI's world."""
        for rank, message in self.messages(_FAREWELL_TAG):
            yield rank, Farewell.from_bytes(message)

    def messages(self, tag: int) -> Iterator[tuple[int, HostArray]]:
        """Take in all messages that have come, with their senders' ranks in MPI's world."""
        while (found := self.communicator.probe(tag)) is not None:
            source, size = found
            message = np.empty(size, np.uint8)
            poll(self.communicator.irecv(message, source, tag).test)
            yield self.world_ranks[source], message


class Lines:
    """All lines of this process, and what was heard on them."""

    def __init__(self) -> None:
        self._lines: list[Line] = []
        self._heard: dict[tuple[int, str], tuple[Farewell, float]] = {}
        self._look_again_s = 0.0
        self._meshes_made: dict[tuple[int, ...], int] = {}
        self._meshes: dict[str, tuple[Sequence[int], Callable[[], Mapping[str, int]]]] = {}

    def __iter__(self) -> Iterator[Line]:
        return iter(self._lines)

    def find(self, world_ranks: Collection[int]) -> Line | None:
        """Return a line that has all these ranks."""
        return next((line for line in self._lines if line.covers(world_ranks)), None)

    def add(self, line: Line) -> None:
        """Use a new line from now on."""
        self._lines.append(line)

    # -- meshes ----------------------------------------------------------------------

    def join(self, world_ranks: Sequence[int]) -> str:
        """Return the name of a new mesh over these ranks, the same on all of them.

        The ranks of a mesh make all meshes over just these ranks together, so they count alike.
        """
        key = (len(world_ranks), zlib.crc32(np.array(world_ranks).tobytes()))
        self._meshes_made[key] = self._meshes_made.get(key, 0) + 1
        family = ":".join(map(str, (*key, self._meshes_made[key])))
        self._meshes[family] = (world_ranks, dict)
        return family

    def count(self, family: str, started: Callable[[], Mapping[str, int]]) -> None:
        """Ask `started` for the number of collectives on each group of a mesh."""
        if family in self._meshes:
            self._meshes[family] = (self._meshes[family][0], started)

    def part(self, family: str) -> None:
        """A mesh is closed, on all its ranks."""
        if self._meshes.pop(family, None) is None:
            return
        self._heard = {key: heard for key, heard in self._heard.items() if key[1] != family}

    # -- leaving ---------------------------------------------------------------------

    def leave_mesh(self, family: str, why: str, exit_code: int) -> None:
        """Tell the other ranks of a mesh that this one has left it, but not the job."""
        world_ranks, _ = self._meshes.pop(family, ((), None))
        line = self.find(world_ranks)
        if line is not None:
            line.tell(Farewell(why, exit_code, family), world_ranks)

    def leave(self, why: str, exit_code: int) -> None:
        """Tell all other ranks that this one has left the job.

        Cost:
            One message to each of them; who closes all meshes before has no need of it.
        """
        counts = {family: dict(started()) for family, (_, started) in self._meshes.items()}
        farewell = Farewell(why, exit_code, started={} if exit_code else counts)
        for line in self._lines:
            line.tell(farewell, line.world_ranks)

    # -- hearing ---------------------------------------------------------------------

    def listen(self) -> None:
        """Take in what has come. Never waits."""
        now_s = time.monotonic()
        for line in self._lines:
            for rank, farewell in line.heard():
                self._heard[rank, farewell.family] = (farewell, now_s)

    def look(self, wait: Wait) -> None:
        """Listen every now and then during `wait`.

        Raises:
            PeerLostError: If a rank that it takes has left, and it is still not done a moment
                later.
        """
        now_s = time.monotonic()
        if now_s < self._look_again_s:
            return
        self._look_again_s = now_s + _LOOK_EVERY_S
        self.listen()
        if not self._heard or wait.communicator.kind != "mpi":
            return
        world_ranks: Sequence[int] = wait.communicator.world_ranks  # type: ignore[attr-defined]
        peers = wait.peers
        needed = set(world_ranks if peers is None else (world_ranks[peer] for peer in peers))
        for (rank, _), (farewell, heard_s) in self._heard.items():
            late = now_s > max(heard_s, wait.since_s) + _GRACE_S
            if late and rank in needed and farewell.ends(wait):
                error = PeerLostError(
                    f"this rank waits in {wait.what}, but rank {rank} of the job {farewell.why}"
                )
                error.exit_code = farewell.exit_code or 1
                raise error

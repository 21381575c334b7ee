"""The communicator of ranks that are threads of one process."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from mpimesh.arrays.types import HostArray
from mpimesh.errors import TransportError
from mpimesh.transport.base import Communicator, RecvRequest, Request
from mpimesh.transport.mailbox import Mailbox
from mpimesh.transport.virtual_moves import MOVES, Contribution
from mpimesh.transport.virtual_requests import CollectiveRequest, Context, Slot
from mpimesh.transport.virtual_world import VirtualWorld

__all__ = ["VirtualCommunicator", "virtual_communicators"]


class VirtualCommunicator(Communicator):
    """One thread's view of a set of virtual ranks."""

    kind = "virtual"

    def __init__(
        self, world: VirtualWorld, context: Context, rank: int, world_ranks: tuple[int, ...]
    ) -> None:
        self.world = world
        self.rank = rank
        self.size = len(world_ranks)
        self._context = context
        self.world_ranks = world_ranks
        self.signatures = context.signatures(rank, self.size)
        self._sequence = 0

    # -- collectives -------------------------------------------------------------

    def all_reduce(self, send: HostArray | None, recv: HostArray, op: str) -> Request:
        """Reduce over all ranks into `recv` on each, in rank order."""
        return self._join("all_reduce", op, recv if send is None else send, recv)

    def reduce(self, send: HostArray, recv: HostArray | None, op: str, root: int) -> Request:
        """Reduce over all ranks into `recv` on `root`."""
        return self._join("reduce", (op, root), send, recv if self.rank == root else None)

    def reduce_scatter(
        self, send: HostArray, recv: HostArray, counts: Sequence[int], op: str
    ) -> Request:
        """Reduce `send`; rank r gets block r."""
        return self._join("reduce_scatter", op, send, recv, counts)

    def all_gather(self, send: HostArray, recv: HostArray, counts: Sequence[int]) -> Request:
        """Lay the ranks' `send` one after the other in `recv`."""
        return self._join("all_gather", None, send, recv, counts)

    def gather(
        self, send: HostArray, recv: HostArray | None, counts: Sequence[int], root: int
    ) -> Request:
        """Lay the ranks' `send` one after the other in `recv` of `root`."""
        return self._join("gather", root, send, recv if self.rank == root else None, counts)

    def scatter(
        self, send: HostArray | None, recv: HostArray, counts: Sequence[int], root: int
    ) -> Request:
        """Rank r gets block r of root's `send`."""
        return self._join("scatter", root, send if self.rank == root else None, recv, counts)

    def all_to_all(
        self,
        send: HostArray,
        recv: HostArray,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
    ) -> Request:
        """Block d of `send` goes to rank d; block s of `recv` comes from rank s."""
        return self._join("all_to_all", None, send, recv, send_counts)

    def broadcast(self, buffer: HostArray, root: int) -> Request:
        """Copy `buffer` of `root` into `buffer` of every rank."""
        return self._join("broadcast", root, buffer, buffer)

    def barrier(self) -> Request:
        """Done once every rank has started it."""
        return self._join("barrier", None, None, None)

    # -- messages ----------------------------------------------------------------

    def isend(self, buffer: HostArray, dest: int, tag: int) -> Request:
        """Send `buffer`."""
        key = (self.rank, dest, tag)
        return self._context.messages.send(key, buffer, copy=not self.world.rendezvous)

    def irecv(self, buffer: HostArray, source: int, tag: int) -> RecvRequest:
        """Receive into `buffer`."""
        return self._context.messages.receive((source, self.rank, tag), buffer)

    def probe(self, tag: int) -> tuple[int, int] | None:
        """Return (source, bytes) of a message with `tag` that waits to be received."""
        found = self._context.messages.find((r, self.rank, tag) for r in range(self.size))
        return None if found is None else (found[0][0], found[1])

    # -- life --------------------------------------------------------------------

    def wait(
        self,
        ready: Callable[[], bool],
        timeout_s: float | None = None,
        *,
        what: object = "",
        idle: Callable[[], None] | None = None,
    ) -> bool:
        """Sleep until `ready`; the world wakes the thread when something has changed."""
        until_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        return self.world.sleep(self.world_ranks[self.rank], ready, until_s, what)

    def stir(self) -> None:
        """Let a wait of this rank look again soon."""
        self.world.stir()

    def split(self, color: int | None, key: int) -> VirtualCommunicator | None:
        """Make one communicator for each color."""
        request, part = self.start_split(color, key)
        self.wait(request.test, what="split")
        return part()

    def start_split(
        self, color: int | None, key: int
    ) -> tuple[Request, Callable[[], VirtualCommunicator | None]]:
        """Start a split; the second value gives the communicator once the first is done."""
        slot = self._join_slot("split", None, None, None, (color, key))
        return CollectiveRequest(slot), lambda: self._part(slot, color)

    def _part(self, slot: Slot, color: int | None) -> VirtualCommunicator | None:
        groups: dict[int, tuple[Context, tuple[int, ...]]] = slot.outcome  # type: ignore[assignment]
        if color is None:
            return None
        context, members = groups[color]
        world_ranks = tuple(self.world_ranks[member] for member in members)
        part = VirtualCommunicator(self.world, context, members.index(self.rank), world_ranks)
        self.adopt(part)
        return part

    def free(self) -> None:
        """Give back what moves device memory; contexts go with their last user."""
        self.free_device()

    def abort(self, code: int) -> None:
        """End the waits of all ranks."""
        rank = self.world_ranks[self.rank]
        self.world.fail(rank, SystemExit(code))

    # -- helpers -----------------------------------------------------------------

    def _join(
        self,
        kind: str,
        rule: object,
        send: HostArray | None,
        recv: HostArray | None,
        counts: Sequence[int] = (),
    ) -> Request:
        return CollectiveRequest(self._join_slot(kind, rule, send, recv, tuple(counts)))

    def _join_slot(
        self,
        kind: str,
        rule: object,
        send: HostArray | None,
        recv: HostArray | None,
        counts: tuple[int | None, ...],
    ) -> Slot:
        with self.world.changed:
            number = self._sequence
            self._sequence += 1
            slot = self._context.slots.setdefault(number, Slot())
            slot.contributions[self.rank] = Contribution(kind, rule, send, recv, counts)
            if len(slot.contributions) == self.size:
                del self._context.slots[number]
                self._complete(slot)
                self.world.note_change()
        return slot

    def _complete(self, slot: Slot) -> None:
        """Move the bytes of a collective that all ranks have joined."""
        parts = [slot.contributions[rank] for rank in range(self.size)]
        calls = {(part.kind, part.rule) for part in parts}
        if len(calls) > 1:
            rows = "; ".join(f"rank {r}: {p.kind} {p.rule or ''}" for r, p in enumerate(parts))
            slot.error = TransportError(f"ranks met in different collectives: {rows}")
            return
        try:
            if parts[0].kind == "split":
                slot.outcome = _split(self.world, parts)
            else:
                MOVES[parts[0].kind](parts)
        except ValueError as error:
            slot.error = TransportError(f"{parts[0].kind} over virtual ranks failed: {error}")
        slot.contributions.clear()
        slot.done = True


def _split(
    world: VirtualWorld, parts: list[Contribution]
) -> dict[int, tuple[Context, tuple[int, ...]]]:
    members: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for rank, part in enumerate(parts):
        color, key = part.counts
        if color is not None and key is not None:
            members[color].append((key, rank))
    return {
        color: (_context(world), tuple(rank for _, rank in sorted(ranks)))
        for color, ranks in members.items()
    }


def _context(world: VirtualWorld) -> Context:
    return Context(Mailbox(world.changed, world.note_change))


def virtual_communicators(world: VirtualWorld) -> list[VirtualCommunicator]:
    """Return the communicator of all ranks of `world`, as each of them sees it."""
    context = _context(world)
    ranks = tuple(range(world.size))
    return [VirtualCommunicator(world, context, rank, ranks) for rank in ranks]

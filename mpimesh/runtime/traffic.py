"""Bytes and messages that a rank has handed to the transport, and has had from each other rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mpimesh.errors import BudgetError
from mpimesh.runtime.budget import Budget, Late, admit, excess, spend
from mpimesh.runtime.call import Call, call_site, site_text
from mpimesh.runtime.received import Amount, Members, Rule, Tally, from_others
from mpimesh.runtime.traffic_table import traffic_table

__all__ = ["OperationTraffic", "PeerTraffic", "Traffic"]


@dataclass(frozen=True, slots=True)
class OperationTraffic:
    """One rank's counts of one operation.

    Attributes:
        calls: How often it was started.
        bytes: Bytes put in.
        received_bytes: Bytes received from other ranks.
        received_messages: Messages received from other ranks.
    """

    calls: int = 0
    bytes: int = 0
    received_bytes: int = 0
    received_messages: int = 0


@dataclass(frozen=True, slots=True)
class PeerTraffic:
    """One rank's counts of what it has received from another.

    Attributes:
        received_bytes: Bytes of arrays.
        received_messages: Messages.
    """

    received_bytes: int = 0
    received_messages: int = 0


@dataclass
class Traffic:
    """Counters of one rank on one mesh.

    Bytes put in are those of this rank's own arrays: an all-reduce of 1 MiB counts
    1 MiB. Bytes received are those of arrays that come from other ranks of the mesh, whatever
    way they take: what is read in shared memory counts as what is sent. A message is what one rank
    gives another by one operation, if it is more than 0 bytes; a ``send`` or ``shift`` always is
    one. What describes arrays, and what checks compare, does not count.

    all_gather, gather, all_to_all, scatter, broadcast, messages, pipelines
        The arrays or blocks that the others hold. A broadcast is counted as coming from its root.
    all_reduce
        As a reduce-scatter and an all-gather: ``2 (n-1)/n`` of the bytes in ``2 (n-1)`` messages.
        The bytes fall into n blocks, of which the first ``bytes % n`` have one byte more; rank r
        receives blocks r and s from rank s.
    reduce_scatter
        ``n-1`` times this rank's own block, one from each.
    reduce
        On the root, ``n-1`` times its bytes, once from each; elsewhere nothing.

    An operation counts when it starts, or, where only the sender knows how much, when that has
    come. The text of a Traffic is a table of it all. Of a section::

        before = mesh.traffic().snapshot()
        ...
        print(mesh.traffic() - before)

    Attributes:
        calls: Operations started, by name.
        bytes: Bytes put in, by name.
    """

    calls: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # No fields: what they hold is told by methods, and a dict of the fields stays plain.
        self.tally = Tally()
        self.budgets: tuple[Budget, ...] = ()
        self._late: Late | None = None

    # -- counting ----------------------------------------------------------------------------

    def count(self, name: str, nbytes: int, calls: int = 1) -> None:
        """Add operations of one kind."""
        self.calls[name] = self.calls.get(name, 0) + calls
        self.bytes[name] = self.bytes.get(name, 0) + nbytes

    def receive(self, name: str, peer: int, nbytes: int, messages: int = 1) -> None:
        """Add what has come from one rank of the mesh, for code that moves arrays itself.

        Raises:
            BudgetError: If it is more than a budget of this mesh had left. It is counted.
        """
        self.tally.add_from(name, peer, nbytes, messages)
        if self.budgets:
            site = call_site(2)
            error = spend(
                self.budgets, name, lambda: f"{name} at {site_text(site)}", nbytes, messages
            )
            if error is not None:
                self.refuse(error)

    def admit_by(self, call: Call, rule: Rule, members: Members, amount: Amount) -> None:
        """Let budgets count an operation that is about to start, as :meth:`admit` does."""
        if self.budgets and members.size > 1:
            nbytes, messages = from_others(rule, members, amount).sum(axis=1).tolist()
            self.admit(call, nbytes, messages)

    @property
    def refuses(self) -> bool:
        """Whether operations that exceed a budget are refused, and not told of later."""
        return bool(self.budgets) and self._late is None

    def excess(
        self, call: Call, rule: Rule, members: Members, amount: Amount
    ) -> BudgetError | None:
        """Return the error of the budget that an operation would exceed. Nothing is counted."""
        nbytes, messages = from_others(rule, members, amount).sum(axis=1).tolist()
        return excess(self.budgets, call, nbytes, messages)

    def admit(self, call: Call, nbytes: int, messages: int) -> None:
        """Let budgets count an operation that is about to start.

        Raises:
            BudgetError: If it would receive more than one has left. Then nothing is counted.
        """
        if self._late is None:
            admit(self.budgets, call.name, call, nbytes, messages)
        else:
            self._late.keep(spend(self.budgets, call.name, call.__str__, nbytes, messages))

    def refuse(self, error: BudgetError) -> None:
        """Raise `error`, now or later."""
        if self._late is None:
            raise error
        self._late.keep(error)

    @contextmanager
    def late(self) -> Iterator[Late]:
        """Refuse nothing meanwhile, but keep the error: others need this rank to the end."""
        before, self._late = self._late, Late()
        try:
            yield self._late
        finally:
            self._late = before

    # -- looking -----------------------------------------------------------------------------

    @property
    def total_calls(self) -> int:
        """Operations of all kinds."""
        return sum(self.calls.values())

    @property
    def total_bytes(self) -> int:
        """Bytes put into all operations."""
        return sum(self.bytes.values())

    @property
    def received_bytes(self) -> int:
        """Bytes received from other ranks."""
        return sum(one.received_bytes for one in self.by_peer().values())

    @property
    def received_messages(self) -> int:
        """Messages received from other ranks."""
        return sum(one.received_messages for one in self.by_peer().values())

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        """Yield (name, calls, bytes put in) in alphabetical order."""
        return ((name, self.calls[name], self.bytes[name]) for name in sorted(self.calls))

    def by_operation(self) -> dict[str, OperationTraffic]:
        """Return what was put in and received, by operation in alphabetical order."""
        received = self.tally.by_operation()
        return {
            name: OperationTraffic(
                self.calls.get(name, 0),
                self.bytes.get(name, 0),
                sum(nbytes for nbytes, _ in received.get(name, {}).values()),
                sum(messages for _, messages in received.get(name, {}).values()),
            )
            for name in sorted({*self.calls, *received})
        }

    def by_peer(self, operation: str | None = None) -> dict[int, PeerTraffic]:
        """Return what was received, by sender in the order of ranks of the mesh.

        Args:
            operation: Only by this one; by all if None.
        """
        found: dict[int, PeerTraffic] = {}
        for name, peers in self.tally.by_operation().items():
            if operation in (None, name):
                for peer, (nbytes, messages) in peers.items():
                    had = found.get(peer, PeerTraffic())
                    found[peer] = PeerTraffic(
                        had.received_bytes + nbytes, had.received_messages + messages
                    )
        return dict(sorted(found.items()))

    def snapshot(self) -> Traffic:
        """Return a copy that counts no further."""
        return self - Traffic()

    def __sub__(self, earlier: Traffic) -> Traffic:
        """Return what came since `earlier`, a snapshot of this one."""
        if not isinstance(earlier, Traffic):
            return NotImplemented
        section = Traffic()
        for name, calls, nbytes in self:
            calls -= earlier.calls.get(name, 0)
            nbytes -= earlier.bytes.get(name, 0)
            if calls or nbytes:
                section.count(name, nbytes, calls)
        before = earlier.tally.by_operation()
        for name, peers in self.tally.by_operation().items():
            for peer, counts in peers.items():
                had = before.get(name, {}).get(peer, (0, 0))
                if counts != had:
                    section.tally.add_from(name, peer, counts[0] - had[0], counts[1] - had[1])
        return section

    def __eq__(self, other: object) -> bool:
        """Tell whether all counters are equal."""
        return isinstance(other, Traffic) and self.as_dict() == other.as_dict()

    def as_dict(self) -> dict[str, Any]:
        """Return everything as numbers and dicts by text, as JSON has them."""
        operations = self.by_operation()
        return {
            "calls": self.total_calls,
            "bytes": self.total_bytes,
            "received_bytes": self.received_bytes,
            "received_messages": self.received_messages,
            "operations": {
                name: {
                    "calls": one.calls,
                    "bytes": one.bytes,
                    "received_bytes": one.received_bytes,
                    "received_messages": one.received_messages,
                }
                for name, one in operations.items()
            },
            "peers": {
                str(peer): {
                    "received_bytes": one.received_bytes,
                    "received_messages": one.received_messages,
                }
                for peer, one in self.by_peer().items()
            },
        }

    def __str__(self) -> str:
        """Return a table by operation, and one by sender."""
        return traffic_table(
            [
                (name, one.calls, one.bytes, one.received_bytes, one.received_messages)
                for name, one in self.by_operation().items()
            ],
            [
                (peer, one.received_bytes, one.received_messages)
                for peer, one in self.by_peer().items()
            ],
        )

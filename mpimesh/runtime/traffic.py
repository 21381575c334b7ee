"""Bytes and messages that a rank has handed to the transport and received, and budgets of them.

What is received is counted by rules (`received.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

from mpimesh.errors import BudgetError, MeshError
from mpimesh.runtime.call import Call, Site, call_site, site_text
from mpimesh.runtime.received import Amount, Members, Rule, TrafficCounter, from_others

__all__ = [
    "Budget",
    "DeferredError",
    "OperationTraffic",
    "PeerTraffic",
    "Tally",
    "Traffic",
    "spend",
]

# -- budgets ---------------------------------------------------------------------------------------


class Budget:
    """A limit on what a section receives on this rank; made by `DeviceMesh.budget`.

    A context manager, to be entered once. Of nested ones each counts its own section.

    Attributes:
        bytes: The limit of bytes; None for none.
        messages: The limit of messages; None for none.
        used_bytes: Bytes of the section so far.
        used_messages: Messages of the section so far.
        used_by: Bytes and messages of the section so far, by operation.
    """

    def __init__(
        self, traffic: Traffic, rank: int, site: Site, nbytes: Any = None, messages: Any = None
    ) -> None:
        self.bytes = _limit(nbytes, "bytes")
        self.messages = _limit(messages, "messages")
        self.used_bytes = 0
        self.used_messages = 0
        self.used_by: dict[str, tuple[int, int]] = {}
        self._traffic = traffic
        self._rank = rank
        self._site = site
        self._entered = False

    def __enter__(self) -> Self:
        """Count from here on."""
        if self._entered:
            raise MeshError(f"the budget made at {site_text(self._site)} was entered before")
        self._entered = True
        self._traffic.budgets = (*self._traffic.budgets, self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Count no operation that starts from here on."""
        self._traffic.budgets = tuple(one for one in self._traffic.budgets if one is not self)

    def exceeds(self, nbytes: int, messages: int) -> bool:
        """Tell whether there is not so much left."""
        return _over(self.used_bytes, nbytes, self.bytes) or _over(
            self.used_messages, messages, self.messages
        )

    def use(self, name: str, nbytes: int, messages: int) -> None:
        """Count what an operation receives."""
        self.used_bytes += nbytes
        self.used_messages += messages
        had = self.used_by.get(name, (0, 0))
        self.used_by[name] = (had[0] + nbytes, had[1] + messages)

    def error(self, what: object, verb: str, nbytes: int, messages: int) -> BudgetError:
        """Return the error about an operation, with what was used before it."""
        limits = [] if self.bytes is None else [f"{self.bytes} bytes"]
        limits += [] if self.messages is None else [f"{self.messages} messages"]
        used = "nothing"
        if self.used_bytes or self.used_messages:
            rows = sorted(self.used_by.items(), key=lambda row: (-row[1][0], row[0]))
            by = ", ".join(f"{name} {_amount(*counts)}" for name, counts in rows if any(counts))
            used = f"{_amount(self.used_bytes, self.used_messages)} ({by})"
        return BudgetError(
            f"rank {self._rank}: {what} {verb} {_amount(nbytes, messages)}, which exceeds the "
            f"budget of {' and '.join(limits)} given at {site_text(self._site)}; used before: "
            f"{used}. Move less, or give a larger budget, on all ranks"
        )

    def __repr__(self) -> str:
        """Show limits and what is used. Local."""
        limits = f"bytes={self.bytes}, messages={self.messages}"
        return f"<Budget {limits}, used {_amount(self.used_bytes, self.used_messages)}>"


class DeferredError:
    """Keeps the first error of a budget for a moment when all ranks can hear of it."""

    def __init__(self) -> None:
        self.error: BudgetError | None = None

    def keep(self, error: BudgetError | None) -> None:
        """Keep `error` unless there is one already."""
        self.error = self.error or error

    def take(self) -> BudgetError | None:
        """Return the error, if there is one, and keep it no more."""
        error, self.error = self.error, None
        return error

    def check(self) -> None:
        """Raise the error, if there is one."""
        error = self.take()
        try:
            if error is not None:
                raise error
        finally:
            del error  # whose traceback holds this frame


def spend(
    budgets: tuple[Budget, ...],
    name: str,
    what: Callable[[], object],
    nbytes: int,
    messages: int,
) -> BudgetError | None:
    """Count what has come, and return the error if a budget had not so much left."""
    error = None
    for budget in reversed(budgets):
        if error is None and budget.exceeds(nbytes, messages):
            error = budget.error(what(), "received", nbytes, messages)
        budget.use(name, nbytes, messages)
    return error


def _over(used: int, more: int, limit: int | None) -> bool:
    """Tell whether `more` is too much. Nothing is never too much, even where too much was used."""
    return limit is not None and more > 0 and used + more > limit


def _limit(value: Any, what: str) -> int | None:
    if value is None:
        return None
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise MeshError(f"{what} of a budget is a whole number from 0 on, or None, got {value!r}")
    return number


def _amount(nbytes: int, messages: int) -> str:
    return f"{nbytes} bytes in {messages} message{'' if messages == 1 else 's'}"


# -- the counters of a mesh ------------------------------------------------------------------------


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


class Tally:
    """Starts of one plan, which its traffic adds up when somebody looks.

    Args:
        traffic: What they are added to.
        name: The operation.
        nbytes: Bytes that this rank puts into each.
        receives: How what it receives is counted; None if it receives nothing.
        members: The ranks of the group.

    Attributes:
        starts: Operations that have started since.
    """

    __slots__ = ("__weakref__", "_members", "_name", "_nbytes", "_receives", "_traffic", "starts")

    def __init__(
        self,
        traffic: Traffic,
        name: str,
        nbytes: int,
        receives: tuple[Rule, Amount] | None,
        members: Members,
    ) -> None:
        self.starts = 0
        self._traffic = traffic
        self._name = name
        self._nbytes = nbytes
        self._receives = receives
        self._members = members

    def add_up(self) -> None:
        """Let the traffic count the starts so far."""
        starts, self.starts = self.starts, 0
        if starts:
            self._traffic.count(self._name, starts * self._nbytes, starts)
            if self._receives is not None:
                rule, amount = self._receives
                self._traffic.count_received(self._name, rule, self._members, amount, starts)

    def __del__(self) -> None:
        """Lose nothing when its plan is let go."""
        self.add_up()


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
        budgets: Limits of what is received, the outermost first.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.budgets: tuple[Budget, ...] = ()
        self._calls: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        self._counter = TrafficCounter()
        self._tallies: WeakSet[Tally] = WeakSet()
        self._deferred: DeferredError | None = None

    @property
    def calls(self) -> dict[str, int]:
        """Operations started, by name."""
        self._add_up()
        return self._calls

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes put in, by name."""
        self._add_up()
        return self._bytes

    @property
    def counter(self) -> TrafficCounter:
        """Bytes and messages received."""
        self._add_up()
        return self._counter

    # -- counting ----------------------------------------------------------------------------

    def count(self, name: str, nbytes: int, calls: int = 1) -> None:
        """Add operations of one kind."""
        self._calls[name] = self._calls.get(name, 0) + calls
        self._bytes[name] = self._bytes.get(name, 0) + nbytes

    def tally(
        self, name: str, nbytes: int, receives: tuple[Rule, Amount] | None, members: Members
    ) -> Tally:
        """Return what counts operations of one kind by a single addition each."""
        tally = Tally(self, name, nbytes, receives, members)
        self._tallies.add(tally)
        return tally

    def count_received(
        self, name: str, rule: Rule, members: Members, amount: Amount, starts: int = 1
    ) -> None:
        """Add what operations of one kind have received."""
        self._counter.add(name, rule, members, amount, starts)

    def _add_up(self) -> None:
        for tally in self._tallies:
            tally.add_up()

    def receive(self, name: str, peer: int, nbytes: int, messages: int = 1) -> None:
        """Add what has come from one rank of the mesh, for code that moves arrays itself.

        Raises:
            BudgetError: If it is more than a budget of this mesh had left. It is counted.
        """
        self._counter.add_from(name, peer, nbytes, messages)
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
        """True if operations that exceed a budget are refused, and no error is kept for later."""
        return bool(self.budgets) and self._deferred is None

    def excess(
        self, call: Call, rule: Rule, members: Members, amount: Amount
    ) -> BudgetError | None:
        """Return the error of the budget that an operation would exceed. Nothing is counted."""
        nbytes, messages = from_others(rule, members, amount).sum(axis=1).tolist()
        return self._excess(call, nbytes, messages)

    def _excess(self, call: Call, nbytes: int, messages: int) -> BudgetError | None:
        for budget in reversed(self.budgets):  # the innermost first
            if budget.exceeds(nbytes, messages):
                return budget.error(call, "would receive", nbytes, messages)
        return None

    def admit(self, call: Call, nbytes: int, messages: int) -> None:
        """Let budgets count an operation that is about to start.

        Raises:
            BudgetError: If it would receive more than one has left. Then nothing is counted.
        """
        if self._deferred is None:
            error = self._excess(call, nbytes, messages)
            if error is not None:
                raise error
            for budget in self.budgets:
                budget.use(call.name, nbytes, messages)
        else:
            self._deferred.keep(spend(self.budgets, call.name, call.__str__, nbytes, messages))

    def refuse(self, error: BudgetError) -> None:
        """Raise `error`, now or later."""
        if self._deferred is None:
            raise error
        self._deferred.keep(error)

    @contextmanager
    def deferred(self) -> Iterator[DeferredError]:
        """Refuse nothing meanwhile, but keep the error: others need this rank to the end."""
        before, self._deferred = self._deferred, DeferredError()
        try:
            yield self._deferred
        finally:
            self._deferred = before

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
        received = self.counter.by_operation()
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
        totals: dict[int, PeerTraffic] = {}
        for name, peers in self.counter.by_operation().items():
            if operation in (None, name):
                for peer, (nbytes, messages) in peers.items():
                    had = totals.get(peer, PeerTraffic())
                    totals[peer] = PeerTraffic(
                        had.received_bytes + nbytes, had.received_messages + messages
                    )
        return dict(sorted(totals.items()))

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
        before = earlier.counter.by_operation()
        for name, peers in self.counter.by_operation().items():
            for peer, counts in peers.items():
                had = before.get(name, {}).get(peer, (0, 0))
                if counts != had:
                    section.counter.add_from(name, peer, counts[0] - had[0], counts[1] - had[1])
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
        return _table(
            [
                (name, one.calls, one.bytes, one.received_bytes, one.received_messages)
                for name, one in self.by_operation().items()
            ],
            [
                (peer, one.received_bytes, one.received_messages)
                for peer, one in self.by_peer().items()
            ],
        )


# -- the counters as text --------------------------------------------------------------------------


_MOST_PEERS = 16
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def _table(
    operations: Sequence[tuple[str, int, int, int, int]], peers: Sequence[tuple[int, int, int]]
) -> str:
    """Return aligned tables by operation and by sender.

    Args:
        operations: Name, calls, bytes put in, bytes and messages received of each.
        peers: Rank, bytes and messages received of each. Of many, those that sent most are shown.
    """
    everything = [
        *operations,
        (
            "all",
            sum(row[1] for row in operations),
            sum(row[2] for row in operations),
            sum(row[3] for row in operations),
            sum(row[4] for row in operations),
        ),
    ]
    rows = [
        (name, f"{calls:,}", _size(put_in), _size(nbytes), f"{messages:,}")
        for name, calls, put_in, nbytes, messages in everything
    ]
    lines = _aligned([("operation", "calls", "put in", "received", "messages"), *rows])
    if not peers:
        return "\n".join(lines)
    by_bytes = sorted(peers, key=lambda row: (-row[1], row[0]))
    senders = [
        (f"rank {peer}", _size(nbytes), f"{count:,}")
        for peer, nbytes, count in sorted(by_bytes[:_MOST_PEERS])
    ]
    others = by_bytes[_MOST_PEERS:]
    if others:
        nbytes, count = sum(row[1] for row in others), sum(row[2] for row in others)
        senders.append((f"{len(others):,} others", _size(nbytes), f"{count:,}"))
    return "\n".join([*lines, "", *_aligned([("from", "received", "messages"), *senders])])


def _size(nbytes: int) -> str:
    """Return bytes in the largest binary unit of which there is one."""
    power = 0
    while power < len(_UNITS) - 1 and abs(nbytes) >= 1024 ** (power + 1):
        power += 1
    return f"{nbytes} B" if not power else f"{nbytes / 1024**power:.1f} {_UNITS[power]}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows as lines: the first column starts alike, the others end alike."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        )
        for row in rows
    ]

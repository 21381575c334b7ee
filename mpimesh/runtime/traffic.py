"""Bytes and messages that a rank has handed to the transport and received, and budgets of them.

What others give to one result of all has no single sender and depends on the algorithm. So what is
received is counted by rules: an all-reduce as if it were made by a reduce-scatter and an
all-gather, each rank sending every other one exactly what that one lacks. No way of doing it moves
less to a rank that holds 1/n of the work.

A small all-reduce takes a few microseconds, so that all that is noted when it starts is one more
start of its plan, or a rule, its amount and how often. Who sent what is worked out when somebody
asks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar
from weakref import WeakSet

import numpy as np

from mpimesh.arguments import as_int, size_text
from mpimesh.core.call import Counter, Limits
from mpimesh.errors import BudgetError, MeshError
from mpimesh.layout.boxes import even_sizes
from mpimesh.runtime.call import Call, Site, call_site, site_text

__all__ = [
    "Amount",
    "Arrival",
    "Budget",
    "DeferredError",
    "Members",
    "OperationTraffic",
    "PeerTraffic",
    "Rule",
    "Tally",
    "Traffic",
    "all_reduced",
    "from_others",
    "per_rank",
    "sparse",
    "uniform",
]

K = TypeVar("K")

_MOST_PENDING = 512
"""So many different entries are kept before they are added up, that memory stays small."""

# -- rules: who sends how much in an operation -----------------------------------------------------

Amount = int | tuple[int, ...]
"""The size of one operation, as a rule needs it: bytes, or several numbers."""

_Counts: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


class Members:
    """The ranks of a group, as a rank of it counts what they send. Equal only to itself.

    Args:
        ranks: The ranks, as numbered in the mesh.
        rank: This rank among them.
    """

    __slots__ = ("rank", "ranks", "size")

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = rank


Rule = Callable[[int, int, Amount], tuple[_Counts, _Counts]]
"""Gives bytes and messages from each rank of a group.

Called with the group's size, this rank in it and an amount. What a rank has from itself does not
count, whatever stands there.
"""


def all_reduced(size: int, rank: int, amount: Amount) -> tuple[_Counts, _Counts]:
    """An all-reduce of `amount` bytes: 2 (n-1)/n of them, in 2 (n-1) messages.

    The bytes fall into n blocks, of which the first ``amount % n`` have one more. In the
    reduce-scatter each rank sends this one a part for its block, in the all-gather its own block.
    """
    (nbytes,) = np.atleast_1d(amount)
    blocks = np.array(even_sizes(int(nbytes), size))
    mine = blocks[rank]
    return blocks + mine, (blocks > 0).astype(np.int64) + (mine > 0)


def uniform(size: int, rank: int, amount: Amount) -> tuple[_Counts, _Counts]:
    """The same number of bytes from every other rank, in a message each."""
    (nbytes,) = np.atleast_1d(amount)
    return np.full(size, nbytes), np.full(size, int(nbytes > 0))


def per_rank(size: int, rank: int, amount: Amount) -> tuple[_Counts, _Counts]:
    """The bytes of each rank, one after the other, in a message each."""
    nbytes = np.array(amount, np.int64, ndmin=1)
    return nbytes, (nbytes > 0).astype(np.int64)


def sparse(size: int, rank: int, amount: Amount) -> tuple[_Counts, _Counts]:
    """From a few ranks: for each, one after the other, the rank, the bytes and the messages."""
    counts = np.zeros((2, size), np.int64)
    for source, nbytes, messages in np.reshape(amount, (-1, 3)).tolist():
        counts[:, source] += nbytes, messages
    return counts[0], counts[1]


def from_others(rule: Rule, members: Members, amount: Amount) -> _Counts:
    """Return bytes and messages from each rank of a group, with 0 at this rank's own."""
    counts = np.stack(rule(members.size, members.rank, amount))
    counts[:, members.rank] = 0
    return counts


def _sums(rule: Rule, members: Members, amount: Amount) -> tuple[int, int]:
    """Return bytes and messages from all other ranks together."""
    nbytes, messages = from_others(rule, members, amount).sum(axis=1).tolist()
    return nbytes, messages


# -- budgets ---------------------------------------------------------------------------------------


class Budget:
    """A limit on what a section receives on this rank; made by `DeviceMesh.budget`.

    A context manager, to be entered once. Of nested ones each counts its own section.

    Attributes:
        bytes: The limit of bytes; None for none.
        messages: The limit of messages; None for none.
        used_by: Bytes and messages of the section so far, by operation.
    """

    def __init__(
        self, traffic: Traffic, rank: int, site: Site, nbytes: Any = None, messages: Any = None
    ) -> None:
        self.bytes = None if nbytes is None else as_int(nbytes, "bytes of a budget", least=0)
        self.messages = (
            None if messages is None else as_int(messages, "messages of a budget", least=0)
        )
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

    @property
    def used_bytes(self) -> int:
        """Bytes of the section so far."""
        return sum(nbytes for nbytes, _ in self.used_by.values())

    @property
    def used_messages(self) -> int:
        """Messages of the section so far."""
        return sum(messages for _, messages in self.used_by.values())

    def exceeds(self, nbytes: int, messages: int) -> bool:
        """Tell whether there is not so much left; there always is for nothing."""
        rows = (self.bytes, self.used_bytes, nbytes), (self.messages, self.used_messages, messages)
        return any(
            limit is not None and more > 0 and used + more > limit for limit, used, more in rows
        )

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


def _excess(
    budgets: tuple[Budget, ...], what: object, verb: str, nbytes: int, messages: int
) -> BudgetError | None:
    """Return the error of the innermost budget that has not so much left. Nothing is counted."""
    for budget in reversed(budgets):
        if budget.exceeds(nbytes, messages):
            return budget.error(what, verb, nbytes, messages)
    return None


def _use(budgets: tuple[Budget, ...], name: str, nbytes: int, messages: int) -> None:
    """Count what an operation receives."""
    for budget in budgets:
        _add(budget.used_by, name, nbytes, messages)


def _add(counts: dict[K, tuple[int, int]], key: K, nbytes: int, messages: int) -> None:
    """Add bytes and messages to those of `key`."""
    had = counts.get(key, (0, 0))
    counts[key] = (had[0] + nbytes, had[1] + messages)


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


@dataclass(slots=True, weakref_slot=True, eq=False)
class Tally(Counter):
    """Starts of one plan, which its traffic adds up when somebody looks.

    Attributes:
        traffic: What they are added to.
        name: The operation.
        nbytes: Bytes that this rank puts into each.
        receives: How what it receives is counted; None if it receives nothing.
        members: The ranks of the group.
        started: Operations that have started since.
    """

    traffic: Traffic
    name: str
    nbytes: int
    receives: tuple[Rule, Amount] | None
    members: Members

    def add_up(self) -> None:
        """Let the traffic count the starts so far."""
        starts, self.started = self.started, 0
        if starts:
            self.traffic.count(self.name, starts * self.nbytes, starts)
            if self.receives is not None:
                rule, amount = self.receives
                self.traffic.count_received(self.name, rule, self.members, amount, starts)

    def __del__(self) -> None:
        """Lose nothing when its plan is let go; at the end of Python nothing is counted."""
        if not sys.is_finalizing():
            self.add_up()


class Traffic(Limits):
    """Counters of the bytes and messages of one rank on one mesh.

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
        self._calls: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        self._received: dict[tuple[str, int], tuple[int, int]] = {}
        self._pending: dict[tuple[str, Rule, Members, Amount], int] = {}
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
    def received(self) -> dict[tuple[str, int], tuple[int, int]]:
        """Bytes and messages received, by name and sender."""
        self._add_up()
        self._apply_rules()
        return self._received

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
        """Add what operations of one kind have received. Costs a fraction of a microsecond."""
        key = (name, rule, members, amount)
        count = self._pending.get(key)
        if count is None:
            if len(self._pending) >= _MOST_PENDING:
                self._apply_rules()
            count = 0
        self._pending[key] = count + starts

    def count_from(self, name: str, peer: int, nbytes: int, messages: int) -> None:
        """Add what came from one rank of the mesh."""
        _add(self._received, (name, peer), nbytes, messages)

    def _add_up(self) -> None:
        for tally in self._tallies:
            tally.add_up()

    def _apply_rules(self) -> None:
        rows: dict[tuple[str, Members], _Counts] = {}
        for (name, rule, members, amount), count in self._pending.items():
            if members.size > 1:
                row = rows.setdefault((name, members), np.zeros((2, members.size), np.int64))
                row += count * from_others(rule, members, amount)
        self._pending.clear()
        for (name, members), row in rows.items():
            for sender in np.flatnonzero(row.any(axis=0)).tolist():
                nbytes, messages = row[:, sender].tolist()
                self.count_from(name, members.ranks[sender], nbytes, messages)

    def receive(self, name: str, peer: int, nbytes: int, messages: int = 1) -> None:
        """Add what has come from one rank of the mesh, for code that moves arrays itself.

        Raises:
            BudgetError: If it is more than a budget of this mesh had left. It is counted.
        """
        self.count_from(name, peer, nbytes, messages)
        if self.budgets:
            what = f"{name} at {site_text(call_site())}"
            error = _excess(self.budgets, what, "received", nbytes, messages)
            _use(self.budgets, name, nbytes, messages)
            self.refuse(error)

    @property
    def refuses(self) -> bool:
        """True if operations that exceed a budget are refused, and no error is kept for later."""
        return bool(self.budgets) and self._deferred is None

    def excess(
        self, call: Call, rule: Rule, members: Members, amount: Amount
    ) -> BudgetError | None:
        """Return the error of the budget that an operation would exceed. Nothing is counted."""
        return self.excess_of(call, *_sums(rule, members, amount))

    def excess_of(self, what: object, nbytes: int, messages: int) -> BudgetError | None:
        """Return the error of the budget that so much more would exceed. Nothing is counted."""
        return _excess(self.budgets, what, "would receive", nbytes, messages)

    def admit_by(self, call: Call, rule: Rule, members: Members, amount: Amount) -> None:
        """Let budgets count an operation that is about to start, as :meth:`admit` does."""
        if self.budgets and members.size > 1:
            self.admit(call, *_sums(rule, members, amount))

    def admit(self, call: Call, nbytes: int, messages: int) -> None:
        """Let budgets count an operation that is about to start.

        Raises:
            BudgetError: If it would receive more than one has left. Then nothing is counted.
        """
        verb = "would receive" if self.refuses else "received"
        self.refuse(_excess(self.budgets, call, verb, nbytes, messages))
        _use(self.budgets, call.name, nbytes, messages)

    def refuse(self, error: BudgetError | None) -> None:
        """Raise `error`, if there is one, now or later."""
        if self._deferred is not None:
            self._deferred.error = self._deferred.error or error
        elif error is not None:
            raise error

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
        received: dict[str, tuple[int, int]] = {}
        for (name, _), counts in self.received.items():
            _add(received, name, *counts)
        return {
            name: OperationTraffic(
                self._calls.get(name, 0), self._bytes.get(name, 0), *received.get(name, (0, 0))
            )
            for name in sorted({*self._calls, *received})
        }

    def by_peer(self, operation: str | None = None) -> dict[int, PeerTraffic]:
        """Return what was received, by sender in the order of ranks of the mesh.

        Args:
            operation: Only by this one; by all if None.
        """
        totals: dict[int, tuple[int, int]] = {}
        for (name, peer), counts in self.received.items():
            if operation in (None, name):
                _add(totals, peer, *counts)
        return {peer: PeerTraffic(*counts) for peer, counts in sorted(totals.items())}

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
        before = earlier.received
        for (name, peer), counts in self.received.items():
            had = before.get((name, peer), (0, 0))
            if counts != had:
                section.count_from(name, peer, counts[0] - had[0], counts[1] - had[1])
        return section

    def __eq__(self, other: object) -> bool:
        """Tell whether all counters are equal."""
        return isinstance(other, Traffic) and self.as_dict() == other.as_dict()

    def as_dict(self) -> dict[str, Any]:
        """Return everything as numbers and dicts by text, as JSON has them."""
        return {
            "calls": self.total_calls,
            "bytes": self.total_bytes,
            "received_bytes": self.received_bytes,
            "received_messages": self.received_messages,
            "operations": {name: asdict(one) for name, one in self.by_operation().items()},
            "peers": {str(peer): asdict(one) for peer, one in self.by_peer().items()},
        }

    def __str__(self) -> str:
        """Return a table by operation, and one by sender."""
        return _table(self.by_operation(), self.by_peer())


class Arrival:
    """Counts what comes, for the budgets that were open when the operation was called.

    An operation takes part to its end, whatever came: a rank that left it would meet the
    others' next one in the wrong one. So :meth:`settle` is called last.

    Attributes:
        call: The operation, which is to be set before anything is counted.
    """

    __slots__ = ("_budgets", "_error", "_members", "_traffic", "call")

    call: Call

    def __init__(self, traffic: Traffic, members: Members) -> None:
        self._traffic = traffic
        self._budgets = traffic.budgets
        self._members = members
        self._error: BudgetError | None = None

    def came(self, place: int, nbytes: int, messages: int) -> None:
        """Count what came from a place of the group, beside what was counted before."""
        if nbytes or messages:
            name, peer = self.call.name, self._members.ranks[place]
            self._traffic.count_from(name, peer, nbytes, messages)
            self._error = _excess(self._budgets, self.call, "received", nbytes, messages)
            _use(self._budgets, name, nbytes, messages)

    def settle(self) -> None:
        """End the operation.

        Raises:
            BudgetError: If what came was too much.
        """
        self._traffic.refuse(self._error)


# -- the counters as text --------------------------------------------------------------------------


_MOST_PEERS = 16


def _table(operations: Mapping[str, OperationTraffic], peers: Mapping[int, PeerTraffic]) -> str:
    """Return aligned tables by operation and by sender; of many, those that sent most are shown."""
    everything = OperationTraffic(*_sums_of(operations.values()))
    rows = [
        (name, f"{one.calls:,}", size_text(one.bytes), *_received(one))
        for name, one in {**operations, "all": everything}.items()
    ]
    lines = _aligned([("operation", "calls", "put in", "received", "messages"), *rows])
    if not peers:
        return "\n".join(lines)
    by_bytes = sorted(peers.items(), key=lambda item: (-item[1].received_bytes, item[0]))
    senders = [
        (f"rank {peer}", *_received(one))
        for peer, one in sorted(by_bytes[:_MOST_PEERS], key=lambda item: item[0])
    ]
    others = [one for _, one in by_bytes[_MOST_PEERS:]]
    if others:
        senders.append((f"{len(others):,} others", *_received(PeerTraffic(*_sums_of(others)))))
    return "\n".join([*lines, "", *_aligned([("from", "received", "messages"), *senders])])


def _sums_of(rows: Iterable[OperationTraffic | PeerTraffic]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip(*map(astuple, rows), strict=True))


def _received(row: OperationTraffic | PeerTraffic) -> tuple[str, str]:
    return size_text(row.received_bytes), f"{row.received_messages:,}"


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

"""Rules by which what a rank receives is counted: who sends how much in an operation.

What others give to one result of all has no single sender and depends on the algorithm. So it is
counted by a rule: as if the result were made by a reduce-scatter and an all-gather, each rank
sending every other one exactly what that one lacks. No way of doing it moves less to a rank that
holds 1/n of the work.

A small all-reduce takes a few microseconds, so that is all that is written down when it starts: a
rule, its amount and how often. Who sent what is worked out when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

__all__ = [
    "Amount",
    "Members",
    "Rule",
    "TrafficCounter",
    "all_reduced",
    "from_others",
    "per_rank",
    "sparse",
    "uniform",
]

Amount = int | tuple[int, ...]
"""The size of one operation, as a rule needs it: bytes, or several numbers."""

_Counts = npt.NDArray[np.int64]

_MOST_PENDING = 512
"""So many different entries are kept before they are added up, that memory stays small."""


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
    (nbytes,) = _numbers(amount)
    blocks = np.full(size, nbytes // size)
    blocks[: nbytes % size] += 1
    mine = blocks[rank]
    return blocks + mine, (blocks > 0).astype(np.int64) + (mine > 0)


def uniform(size: int, rank: int, amount: Amount) -> tuple[_Counts, _Counts]:
    """The same number of bytes from every other rank, in a message each."""
    (nbytes,) = _numbers(amount)
    return np.full(size, nbytes), np.full(size, int(nbytes > 0))


def per_rank(size: int, rank: int, amount: Amount) -> tuple[_Counts, _Counts]:
    """The bytes of each rank, one after the other, in a message each."""
    nbytes = np.array(_numbers(amount), np.int64)
    return nbytes, (nbytes > 0).astype(np.int64)


def sparse(size: int, rank: int, amount: Amount) -> tuple[_Counts, _Counts]:
    """From a few ranks: for each, one after the other, the rank, the bytes and the messages."""
    counts = np.zeros((2, size), np.int64)
    for source, nbytes, messages in np.reshape(_numbers(amount), (-1, 3)).tolist():
        counts[:, source] += nbytes, messages
    return counts[0], counts[1]


class TrafficCounter:
    """Bytes and messages that a rank has received, by operation and sender."""

    __slots__ = ("_pending", "_received")

    def __init__(self) -> None:
        self._pending: dict[tuple[str, Rule, Members, Amount], int] = {}
        self._received: dict[str, dict[int, tuple[int, int]]] = {}

    def add(self, name: str, rule: Rule, members: Members, amount: Amount, starts: int = 1) -> None:
        """Count operations by a rule. Costs a fraction of a microsecond."""
        key = (name, rule, members, amount)
        count = self._pending.get(key)
        if count is None:
            if len(self._pending) >= _MOST_PENDING:
                self._apply_rules()
            count = 0
        self._pending[key] = count + starts

    def add_from(self, name: str, peer: int, nbytes: int, messages: int) -> None:
        """Count what came from one rank of the mesh."""
        peers = self._received.setdefault(name, {})
        had = peers.get(peer, (0, 0))
        peers[peer] = (had[0] + nbytes, had[1] + messages)

    def by_operation(self) -> dict[str, dict[int, tuple[int, int]]]:
        """Return bytes and messages by operation and sender, as they are until more is added."""
        self._apply_rules()
        return self._received

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
                self.add_from(name, members.ranks[sender], nbytes, messages)


def from_others(rule: Rule, members: Members, amount: Amount) -> _Counts:
    """Return bytes and messages from each rank of a group, with 0 at this rank's own."""
    counts = np.stack(rule(members.size, members.rank, amount))
    counts[:, members.rank] = 0
    return counts


def _numbers(amount: Amount) -> tuple[int, ...]:
    return amount if isinstance(amount, tuple) else (amount,)

"""Sentences, sorted by length and cut into batches that cost the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpimesh.arrays import HostArray

__all__ = ["Batch", "deal", "plan_batches"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Sentences that are computed together.

    Attributes:
        rows: Their places among all sentences.
        length: Tokens of the longest.
    """

    rows: tuple[int, ...]
    length: int

    def arrays(self, ids: Sequence[HostArray]) -> tuple[HostArray, HostArray]:
        """Return the ids, padded with 0 to the longest sentence, and which of them are tokens.

        Shapes:
            ids[i]: (tokens of sentence i,).
            result: (rows, length) and (rows, length), boolean.
        """
        table = np.zeros((len(self.rows), self.length), np.int64)
        mask = np.zeros(table.shape, bool)
        for place, row in enumerate(self.rows):
            table[place, : len(ids[row])] = ids[row]
            mask[place, : len(ids[row])] = True
        return table, mask


def plan_batches(lengths: Sequence[int], *, batch_tokens: int, replicas: int = 1) -> list[Batch]:
    """Cut sentences into batches of about the same cost, the longest sentences first.

    Sentences of like lengths stand together, so that little is padded. The number of batches is a
    multiple of that of the replicas, if there are sentences enough, and the same number of
    tokens goes into each, up to a sentence.

    Args:
        lengths: Tokens of each sentence, at least 1.
        batch_tokens: About how many tokens a batch should have, and hardly more.
        replicas: How many work side by side.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    if not order:
        return []
    ends = np.cumsum([lengths[row] for row in order])
    count = math.ceil(int(ends[-1]) / batch_tokens)
    count = min(math.ceil(count / replicas) * replicas, len(order))
    # The batch of a sentence is that in which the middle of its tokens lies.
    middles = ends - np.array([lengths[row] for row in order]) / 2
    which = (middles * count / ends[-1]).astype(np.int64)
    groups: dict[int, list[int]] = {}
    for row, batch in zip(order, which.tolist(), strict=True):
        groups.setdefault(batch, []).append(row)
    return [Batch(tuple(rows), lengths[rows[0]]) for rows in groups.values()]


def deal(batches: Sequence[Batch], replicas: int) -> list[Batch]:
    """Put batches, the most expensive first, in the order in which replicas take them.

    The first ``len(batches) % replicas`` replicas take one more than the others, each a
    run of the result; there and back again, so that none gets the dearer one each time.
    """
    hands: list[list[Batch]] = [[] for _ in range(replicas)]
    for start in range(0, len(batches), replicas):
        turn = list(batches[start : start + replicas])
        if len(turn) == replicas and start // replicas % 2:
            turn.reverse()
        for hand, batch in zip(hands, turn, strict=False):
            hand.append(batch)
    return [batch for hand in hands for batch in hand]

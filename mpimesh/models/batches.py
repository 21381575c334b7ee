"""Sentences, sorted by length and cut into batches that cost the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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

    The cost of a batch is that of its tokens with padding: its rows times its length. Sentences of
    like lengths stand together, so that little is padded. There are as many batches as are needed
    for none to cost more than `batch_tokens`, or than its only sentence, rounded up to a multiple
    of the replicas; and among these cuts the dearest batch costs as little as it can.

    Args:
        lengths: Tokens of each sentence, at least 1.
        batch_tokens: Most tokens of a batch of several sentences.
        replicas: How many work side by side.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    ordered = [lengths[row] for row in order]
    if not order:
        return []
    longest = ordered[0]
    most = max(batch_tokens, longest)
    count = len(_starts(ordered, most))
    count = min(math.ceil(count / replicas) * replicas, len(order))
    # More may go into a batch that may cost more: the least limit for this number, by halving.
    least = longest
    while least < most:
        limit = (least + most) // 2
        if len(_starts(ordered, limit)) <= count:
            most = limit
        else:
            least = limit + 1
    starts = _starts(ordered, most)
    return [
        Batch(tuple(order[start:stop]), ordered[start])
        for start, stop in pairwise([*starts, len(order)])
    ]


def _starts(ordered: Sequence[int], limit: int) -> list[int]:
    """Return where batches begin, each filled up to `limit`; lengths from long to short."""
    starts, place = [], 0
    while place < len(ordered):
        starts.append(place)
        place += limit // ordered[place]
    return starts


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

"""Compare what the ranks of an all-to-all send each other with what they expect.

The blocks differ from rank to rank, so no fingerprint tells whether they fit. MPI cuts a
block that is larger than expected, or leaves the end of the result as it was.
"""

from __future__ import annotations

import numpy as np

from mpimesh.runtime.blocks import Blocks
from mpimesh.runtime.call import Call
from mpimesh.runtime.checks import compare
from mpimesh.transport import Communicator, Steps

__all__ = ["compare_blocks"]


def compare_blocks(
    communicator: Communicator, call: Call, outgoing: Blocks, incoming: Blocks
) -> Steps:
    """Return if every block has the shape that its receiver expects.

    Raises:
        MismatchError: On every rank alike, if any has another.

    Cost:
        An all-to-all of shapes and an all-reduce of 16 bytes.
    """
    size, ndim = communicator.size, len(outgoing.shape)
    ranks = range(size)
    sent = np.array([outgoing.block_shape(dest) for dest in ranks], np.int64)
    expected = np.array([incoming.block_shape(source) for source in ranks], np.int64)
    came = np.empty_like(sent)
    counts = [ndim] * size
    yield communicator.all_to_all(sent.reshape(-1), came.reshape(-1), counts, counts)
    wrong = np.flatnonzero((came != expected).any(axis=1)).tolist()
    note = "; ".join(
        f"expects a block of shape {tuple(expected[source].tolist())} from rank {source}, "
        f"which sends {tuple(came[source].tolist())}"
        for source in wrong[:2]
    )
    yield from compare(communicator, call, "blocks", note=note)

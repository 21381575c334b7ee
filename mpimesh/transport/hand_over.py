"""A message that says where the array lies, so that the receiver reads it there.

Inside a node nothing needs to be sent: the receiver copies from the sender's memory straight into
its own, one read and one write on the device. The sender's array belongs to the message until the
receiver has said that the copy is done.
"""

from __future__ import annotations

import numpy as np

from mpimesh.arrays.types import Array, HostArray
from mpimesh.errors import TransportError
from mpimesh.transport.cuda_handles import PLACE, Imports, describe, process_key
from mpimesh.transport.device_work import Lane
from mpimesh.transport.engine import Steps

__all__ = ["OFFER_BYTES", "HandOver"]

OFFER_BYTES = PLACE.itemsize


class HandOver:
    """Offers own arrays, and takes those of others.

    Args:
        lane: Copies what is taken.
        process: What tells this process from all others of the node; None for its own key.
    """

    def __init__(self, lane: Lane, *, process: int | None = None) -> None:
        self._lane = lane
        self._process = process_key() if process is None else process
        self._imports = Imports(process=self._process)

    def offer(self, x: Array) -> HostArray | None:
        """Return what the receiver needs to read `x`; None if nobody else can."""
        place = describe(x, process=self._process)
        return None if place["nbytes"] < 0 else np.frombuffer(place.tobytes(), np.uint8)

    def take_steps(self, offer: HostArray, target: Array) -> Steps:
        """Copy what is offered into `target`; the steps' value is False if that cannot be."""
        place = np.frombuffer(offer.tobytes(), PLACE)[0]
        try:
            address = self._imports.open(place)
        except TransportError:
            return False
        self._lane.copy(target.data.ptr, address, target.nbytes)
        yield self._lane.reached()
        self._imports.trim()
        return True

    def free(self) -> None:
        """Close what was opened."""
        self._imports.close()

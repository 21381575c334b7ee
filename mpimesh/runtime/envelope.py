"""A message that says what it is: shape and dtype travel with the data.

MPI delivers bytes. A receiver that expects other bytes than were sent gets wrong
numbers, cut or half-filled arrays. So each array goes as an envelope of at most
4 KiB, which holds dtype, shape and the data itself where it is small enough; larger
data follows as a second message, received straight into its place.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

import numpy as np

from mpimesh.arrays import DType, HostArray
from mpimesh.arrays.dtypes import dtype_from_json, dtype_to_json
from mpimesh.errors import DTypeError
from mpimesh.transport import WHOLE_MESSAGE_BYTES

__all__ = ["ENVELOPE_BYTES", "Envelope", "open_envelope", "seal"]

ENVELOPE_BYTES = WHOLE_MESSAGE_BYTES
_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class Envelope:
    """The contents of an envelope.

    Attributes:
        shape: The array's shape.
        dtype: Its dtype.
        group: Name of the group that it was sent on.
        on_device: Whether its data follows from the memory of a device to that of another.
        inline: Its data, if it was small enough.
    """

    shape: tuple[int, ...]
    dtype: DType
    group: str
    on_device: bool = False
    inline: HostArray | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


def seal(
    data: HostArray | None, shape: tuple[int, ...], dtype: DType, group: str
) -> tuple[HostArray, bool]:
    """Return the envelope for an array, and whether it holds the data already.

    Args:
        data: The array's elements in C order as flat bytes; None if they are on a device.
        shape: Its shape.
        dtype: Its dtype.
        group: Name of the group that it is sent on.

    Raises:
        DTypeError: If the dtype's description does not fit.
    """
    text = json.dumps([shape, dtype_to_json(dtype), group, data is None]).encode()
    head_bytes = _LENGTH_BYTES + len(text)
    if head_bytes > ENVELOPE_BYTES:
        raise DTypeError(
            f"the description of the dtype takes {len(text)} bytes, more than "
            f"{ENVELOPE_BYTES - _LENGTH_BYTES}: shorten its field names"
        )
    inline = data if data is not None and head_bytes + data.size <= ENVELOPE_BYTES else None
    envelope = np.empty(head_bytes + (0 if inline is None else inline.size), np.uint8)
    envelope[:_LENGTH_BYTES] = np.frombuffer(len(text).to_bytes(_LENGTH_BYTES, "little"), np.uint8)
    envelope[_LENGTH_BYTES:head_bytes] = np.frombuffer(text, np.uint8)
    if inline is not None:
        envelope[head_bytes:] = inline
    return envelope, inline is not None


def open_envelope(envelope: HostArray) -> Envelope:
    """Read a received envelope."""
    head_bytes = _LENGTH_BYTES + int.from_bytes(bytes(envelope[:_LENGTH_BYTES]), "little")
    shape, dtype, group, on_device = json.loads(bytes(envelope[_LENGTH_BYTES:head_bytes]))
    described = Envelope(tuple(shape), dtype_from_json(dtype), group, on_device)
    if on_device or head_bytes + described.nbytes > ENVELOPE_BYTES:
        return described
    return replace(described, inline=envelope[head_bytes : head_bytes + described.nbytes])

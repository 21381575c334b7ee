"""Host memory that a GPU copies to and from while the processor does something else.

Allocating pinned memory takes a millisecond and stops the device, so it is kept. A buffer that is
given back may still be read by a copy under way; it is given out again when the event is done
that was recorded after that copy.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from mpimesh.arrays.types import HostArray

__all__ = ["PinnedPool"]

_SMALLEST_BYTES = 4096


class PinnedPool:
    """Pinned buffers of powers of two.

    Args:
        limit_bytes: Most memory kept while it is not in use.
    """

    def __init__(self, *, limit_bytes: int = 256 << 20) -> None:
        self._limit_bytes = limit_bytes
        self._free: list[tuple[HostArray, Any]] = []

    def take(self, nbytes: int) -> HostArray:
        """Return bytes that no copy uses any more; at least `nbytes` of them."""
        size = max(_SMALLEST_BYTES, 1 << (nbytes - 1).bit_length()) if nbytes else _SMALLEST_BYTES
        for place, (buffer, event) in enumerate(self._free):
            if buffer.size == size and event.done:
                del self._free[place]
                return buffer
        memory = sys.modules["cupy"].cuda.alloc_pinned_memory(size)
        return np.frombuffer(memory, np.uint8, size)

    def give(self, buffer: HostArray, event: Any) -> None:
        """Take `buffer` back; copies that use it come before `event`."""
        if buffer.size + sum(kept.size for kept, _ in self._free) <= self._limit_bytes:
            self._free.append((buffer, event))
        elif not event.done:
            # Over the limit, but a copy may still use it: it goes when another comes after it.
            self._free = [(kept, e) for kept, e in self._free if not e.done]
            self._free.append((buffer, event))

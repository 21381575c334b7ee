"""Random numbers of PyTorch that depend on a key, and not on what was drawn before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mpimesh.arrays.counter_bits import key_of
from mpimesh.interop.torch_library import torch

__all__ = ["seeded"]

# The generator is the process's: ranks that are threads take turns.
_TURN = threading.RLock()


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Let PyTorch draw by `key` in this block; afterwards it goes on as if nothing had been drawn.

    Cost:
        Some microseconds: the state of the generator is kept and put back.
    """
    generator = torch.default_generator
    with _TURN:
        before = generator.get_state()
        # Seeds of PyTorch are signed.
        generator.manual_seed(key_of(*key) - (1 << 63))
        try:
            yield
        finally:
            generator.set_state(before)

"""Virtual ranks with a fake GPU each, without the runtime."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mpimesh.comm import ProgressEngine, VirtualWorld, virtual_communicators
from tests.devices.fake_cuda import FakeCupy, installed

__all__ = ["on_ranks"]


@contextmanager
def _fake(devices: int) -> Iterator[FakeCupy]:
    with installed(devices) as cupy:
        yield cupy


def on_ranks(size: int, function: Callable[[Any], Any], *, devices: int = 1) -> list[Any]:
    """Call `function` with the communicator of each of `size` virtual ranks.

    Rank r's current device is ``r % devices``.
    """
    world = VirtualWorld(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def main(communicator: Any) -> None:
        communicator.engine = ProgressEngine()
        cupy.cuda.runtime.setDevice(communicator.rank % devices)
        try:
            results[communicator.rank] = function(communicator)
        except BaseException as error:
            errors.append(error)
            world.fail(communicator.rank, error)
        finally:
            world.leave(communicator.rank)

    with _fake(devices) as cupy:
        threads = [
            threading.Thread(target=main, args=(one,), daemon=True)
            for one in virtual_communicators(world)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a virtual rank hangs"
    if errors:
        raise errors[0]
    return results

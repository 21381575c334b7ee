"""Arrays of CuPy, the fake one or a real one, which come late and are compared where they lie."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mpimesh as mm
from mpimesh.comm import device_communicator
from tests.contract.cases import same
from tests.devices.fake_cuda import FakeCupy, installed
from tests.devices.stand_in import stand_in

__all__ = ["MOVERS", "check", "given", "late", "moved_by", "on_ranks"]

MOVERS = ["stand-in", "device_communicator"]


@contextmanager
def moved_by(mover: str, monkeypatch: Any) -> Iterator[FakeCupy]:
    """Install the fake CuPy, and who moves its arrays: the stand-in or mpimesh itself."""
    if mover == "stand-in":
        monkeypatch.setattr(device_communicator, "device_communicator", stand_in)
    with installed() as fake:
        yield fake


def on_ranks(main: Callable[[Any], Any], size: int = 3) -> list[Any]:
    """Run `main(group)` on virtual ranks."""

    def body() -> Any:
        with mm.DeviceMesh("x=-1") as mesh:
            return main(mesh.group())

    return mm.run_virtual(size, body)


def late() -> None:
    """Make the current stream late, so that nothing is there before it is waited for."""
    cupy = sys.modules["cupy"]
    if isinstance(cupy, FakeCupy):
        cupy.cuda.get_current_stream().delay(7)
    else:  # work for a moment
        square = cupy.ones((1024, 1024), "f4")
        for _ in range(4):
            square = square @ square


def given(array: Any) -> Any:
    """Put an array on the device, where it arrives late."""
    late()
    return sys.modules["cupy"].asarray(array)


def check(got: Any, expected: Any) -> None:
    """Compare a result on the device."""
    assert isinstance(got, sys.modules["cupy"].ndarray), type(got)
    same(got.get(), expected)

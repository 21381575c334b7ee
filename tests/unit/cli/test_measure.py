"""Measuring copies of a device, on a stand-in for CuPy. (The rest runs in tests/launch.)"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from mpimesh.cli.examine import measure_device


class Array:
    """The part of a CuPy array that the measurement needs."""

    def __init__(self, size: int, dtype: Any) -> None:
        self.on_host = np.zeros(size, dtype)

    def set(self, values: np.ndarray) -> None:
        self.on_host[...] = values

    def get(self, *, out: np.ndarray) -> None:
        out[...] = self.on_host


def test_copies_of_a_device_are_timed(monkeypatch):
    waits: list[None] = []
    cupy, cupyx = ModuleType("cupy"), ModuleType("cupyx")
    cupyx.empty_pinned = np.empty  # type: ignore[attr-defined]
    cupy.zeros = Array  # type: ignore[attr-defined]
    cupy.copyto = lambda to, of: np.copyto(to.on_host, of.on_host)  # type: ignore[attr-defined]
    stream = SimpleNamespace(synchronize=lambda: waits.append(None))
    cupy.cuda = SimpleNamespace(get_current_stream=lambda: stream)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupyx", cupyx)
    found = measure_device()
    assert [one.level for one in found] == ["to the GPU", "from the GPU", "within the GPU"]
    assert all(1e6 < one.bytes_per_s < 1e13 for one in found)
    assert len(waits) == 3 * 5, "a copy was not waited for"


def test_without_a_device_nothing_is_measured(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert measure_device() == ()

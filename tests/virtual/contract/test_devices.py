"""Arrays on devices, on virtual ranks, without a device."""

from __future__ import annotations

import sys

import pytest

import mpimesh as mm
from tests.contract import device_memory, devices
from tests.devices.on_device import MOVERS, moved_by
from tests.helpers.depth import deep


@pytest.mark.parametrize("checks", ["0", "1"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", devices.CHECKS)
def test_contract(name, size, checks, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", checks)
    monkeypatch.setitem(sys.modules, "cupy", devices.CupyWithoutDevice())
    mm.run_virtual(size, devices.CHECKS[name], None)


@pytest.mark.parametrize("checks", ["0", *deep("1")])
@pytest.mark.parametrize(("mover", "size"), [(MOVERS[0], 3), *deep((MOVERS[1], 2)), (MOVERS[1], 3)])
@pytest.mark.parametrize("name", device_memory.CHECKS)
def test_device_memory(name, mover, size, checks, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", checks)
    with moved_by(mover, monkeypatch):
        mm.run_virtual(size, device_memory.CHECKS[name], None)

"""Ranks that share a GPU: rank 0 says so, once. With a stand-in for CuPy."""

from __future__ import annotations

import sys
import warnings

import pytest

import mpimesh as mm
from mpimesh.errors import SharedGpuWarning
from mpimesh.runtime import mesh_core
from mpimesh.runtime.world import current_world
from tests.devices.gpu_runtime import CupyOfDevices, uuid_of

DIGITS = [f"{k:032x}" for k in range(0xB0, 0xB8)]


@pytest.fixture
def install(monkeypatch):
    """Give a function that puts CuPy with such devices in place, and forgets what was found."""
    world = current_world()

    def put(*uuids):
        monkeypatch.setitem(sys.modules, "cupy", CupyOfDevices(uuids))
        monkeypatch.setattr(world.hardware, "_devices", ())
        monkeypatch.setattr(mesh_core, "_WARNED", set())

    return put


def warned(comm):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            mm.DeviceMesh("x=-1", comm).close()
    return [one for one in caught if issubclass(one.category, SharedGpuWarning)]


def test_rank_0_warns_once(comm, install):
    install(DIGITS[0])
    found = warned(comm)
    assert len(found) == (comm.rank == 0 and comm.size > 1)
    for one in found:
        assert uuid_of(DIGITS[0]) in str(one.message)
        assert f"ranks 0-{comm.size - 1}: GPU 0 of node " in str(one.message)
        assert one.filename == __file__


def test_nothing_to_warn_of(comm, install):
    install(*DIGITS[: comm.size])
    assert not warned(comm)
    install(DIGITS[comm.rank])  # each sees its own
    assert not warned(comm)


def test_each_rank_has_its_own_current(comm, install):
    install(*DIGITS)
    with mm.DeviceMesh("x=-1", comm) as mesh:
        expected = mesh.local_rank % len(DIGITS)
        assert mesh.local_device().partition_id == uuid_of(DIGITS[expected])
        assert sys.modules["cupy"].cuda.runtime.getDevice() == expected
        sys.modules["cupy"].cuda.Device(7).use()
        mesh.use_device()
        assert sys.modules["cupy"].cuda.runtime.getDevice() == expected

"""Virtual ranks in large numbers: what one of them does does not wake all others."""

from __future__ import annotations

from collections import Counter

import pytest

import mpimesh as mm
from mpimesh.comm import VirtualWorld
from mpimesh.mesh import find_devices


@pytest.mark.parametrize("size", [2, 24])
def test_a_mesh_rings_once_for_each_split(monkeypatch, size):
    counts: Counter[str] = Counter()

    def counted(name, function):
        def count(*arguments):
            counts[name] += 1
            return function(*arguments)

        return count

    monkeypatch.setattr(VirtualWorld, "ring", counted("rings", VirtualWorld.ring))
    monkeypatch.setattr("mpimesh.runtime.world.find_devices", counted("probes", find_devices))

    def main():
        with mm.DeviceMesh("a=2,b=-1") as mesh:
            return mesh.local_rank, mesh.get_device(size - 1)

    found = mm.run_virtual(size, main)
    assert [rank for rank, _ in found] == [*range(size)]
    assert len({device for _, device in found}) == 1
    # Two for all ranks and one for each dim of several; and each rank that returns.
    splits = 2 + 2 * (size > 2)
    assert counts == {"rings": splits + size, "probes": 1}

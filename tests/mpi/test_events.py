"""Clock offsets between hosts that are made up, with clocks that are known to be apart."""

from __future__ import annotations

import time

import pytest

import mpimesh as mm
from mpimesh.runtime.events import clock_offsets


def test_offsets_between_made_up_hosts(comm, monkeypatch):
    """Even ranks are on one host, odd ranks on another, an hour ahead."""
    monkeypatch.setenv("SLURMD_NODENAME", f"node{comm.rank % 2}")
    with mm.DeviceMesh("all=-1", comm) as mesh:
        offsets_s = clock_offsets(mesh, clock=lambda: time.perf_counter() + 3600 * (comm.rank % 2))
    assert list(offsets_s) == list(range(comm.size))
    for rank, offset_s in offsets_s.items():
        assert offset_s == (0.0 if rank % 2 == 0 else pytest.approx(-3600, abs=0.05))

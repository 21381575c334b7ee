"""Clocks that are known to be apart, and events of ranks that have such clocks."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

import mpimesh as mm
from mpimesh.errors import RankError, TraceError
from mpimesh.mesh import DeviceTable
from mpimesh.runtime.events import clock_offsets, gather_events
from mpimesh.trace import Tracer
from tests.helpers.raises import raises

SKEWS_S = {"first": 0.0, "second": 1000.0, "third": -7.5}


def on_hosts(monkeypatch, hosts, body):
    """Run `body(mesh, clock)` on one virtual rank for each host, with that host's clock."""

    def main():
        with mm.DeviceMesh("all=-1") as mesh:
            skew_s = SKEWS_S[hosts[mesh.rank]]
            return body(mesh, lambda: time.perf_counter() + skew_s)

    monkeypatch.setattr(
        "mpimesh.runtime.mesh_core._table_of_threads",
        lambda devices, host, size: DeviceTable(devices[:1] * size, tuple(hosts)),
    )
    return mm.run_virtual(len(hosts), main)


@pytest.mark.parametrize(
    "hosts",
    [
        ["first", "second"],
        ["second", "first", "second", "first"],
        ["first", "first", "third", "second", "third"],
    ],
)
def test_offsets_undo_the_skew_of_each_host(monkeypatch, hosts):
    results = on_hosts(monkeypatch, hosts, lambda mesh, clock: clock_offsets(mesh, clock=clock))
    assert all(result == results[0] for result in results)
    offsets_s = results[0]
    for rank, host in enumerate(hosts):
        assert offsets_s[rank] == pytest.approx(SKEWS_S[hosts[0]] - SKEWS_S[host], abs=0.05)
        assert offsets_s[rank] == offsets_s[hosts.index(host)]
    assert offsets_s[0] == 0.0


def test_one_host_needs_no_message(monkeypatch):
    def body(mesh, clock):
        before = mesh.group()._core.started
        offsets_s = clock_offsets(mesh, clock=clock)
        return offsets_s, mesh.group()._core.started - before

    results = on_hosts(monkeypatch, ["second"] * 3, body)
    assert results == [({0: 0.0, 1: 0.0, 2: 0.0}, 0)] * 3


def test_rounds_below_one_are_refused():
    def main():
        with mm.DeviceMesh("all=-1") as mesh, raises(TraceError, "rounds", 0):
            clock_offsets(mesh, rounds=0)

    mm.run_virtual(2, main)


def test_events_come_together_on_the_first_clock(monkeypatch):
    """A token goes round: with one clock, each rank's event lies after that of the one before."""
    hosts = ["first", "second", "third", "second"]

    def body(mesh, clock):
        tracer = Tracer(0, clock=clock)
        for rank in range(mesh.size):
            if rank == mesh.rank:
                with tracer.span(f"turn of {rank}", "other"):
                    time.sleep(0.02)
            mesh.barrier()
        return gather_events(mesh, tracer, root=1)

    results = on_hosts(monkeypatch, hosts, body)
    assert [len(result) for result in results] == [0, 4, 0, 0]
    events = results[1]
    assert [(event.rank, event.name) for event in events] == [
        (rank, f"turn of {rank}") for rank in range(4)
    ]
    for one, other in pairwise(events):
        assert -0.015 < other.start_s - one.end_s < 5


def test_ranks_may_have_any_number_of_events():
    def main():
        with mm.DeviceMesh("all=-1") as mesh:
            tracer = Tracer(mesh.rank)
            for number in range(5 * mesh.rank):
                tracer.record(str(number), "send", start_s=number, duration_s=1.0, nbytes=number)
            return gather_events(mesh, tracer)

    events = mm.run_virtual(3, main)[0]
    assert [(event.rank, event.name) for event in events] == [
        (rank, str(number)) for rank in range(3) for number in range(5 * rank)
    ]
    assert [event.nbytes for event in events if event.rank == 1] == [0, 1, 2, 3, 4]


def test_a_root_outside_the_mesh_is_refused():
    def main():
        with mm.DeviceMesh("all=-1") as mesh, raises(RankError, "root", "0 to 1", 2):
            gather_events(mesh, Tracer(0), root=2)

    mm.run_virtual(2, main)

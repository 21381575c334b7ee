"""Barriers, waiting for all, and what is counted."""

from __future__ import annotations

import time

import numpy as np
import pytest

from mpimesh.errors import (
    CollectiveTimeoutError,
)
from tests.contract.cases import same
from tests.contract.meshes import groups_of, mesh_of
from tests.helpers.raises import raises


def check_sync_collective_waits_for_all(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        handles = [group.all_reduce(np.full(3, number)) for number in range(5)]
        failing = group.scatter(np.ones(3) if group.rank == 0 else None, axis=3)
        handles[1].resolve()
        mesh.sync_collective()
        for number, handle in enumerate(handles):
            assert handle.done()
            same(handle.assume_resolved(), np.full(3, number * group.size))
        with raises(Exception, "axis 3"):
            failing.resolve()
        mesh.barrier("end", timeout_s=30)


def check_traffic_counts_calls_and_bytes(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        n = group.size
        for _ in range(3):
            group.all_reduce(np.ones(10)).resolve()
        group.all_gather(np.ones(4, "f4")).resolve()
        group.broadcast(np.ones(4, "i2")).resolve()
        group.barrier()
        traffic = mesh.traffic()
        assert traffic.calls["all_reduce"] == 3
        assert traffic.bytes["all_reduce"] == 240
        assert traffic.bytes["all_gather"] == 16
        assert traffic.bytes["broadcast"] == (8 if group.rank == 0 else 0)
        assert traffic.calls["barrier"] == 1
        if n > 1:
            after, before = (group.rank + 1) % n, (group.rank - 1) % n
            send = group.send(np.ones(1000), after)
            group.recv(before).resolve()
            send.resolve()
            assert traffic.bytes["send"] == 8000
        assert traffic.total_calls == sum(calls for _, calls, _ in traffic)
        assert [name for name, _, _ in traffic] == sorted(traffic.calls)


def check_barriers(comm):
    with groups_of(comm, many=True) as groups:
        for group in groups:
            handle = group.start_barrier()
            assert handle.resolve() is None
            group.barrier()
            group.barrier(timeout_s=60)
            group.barrier(timeout_s=60, label="named")


def check_nobody_passes_a_barrier_early(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        if group.size == 1:
            return
        for timeout_s in (None, 60):
            late = group.size - 1
            if group.rank == late:
                time.sleep(0.05)
            came_s = np.array([time.monotonic()])  # one clock for all processes of a machine
            group.barrier(timeout_s=timeout_s)
            passed_s = time.monotonic()
            assert passed_s >= group.all_reduce(came_s, "max").resolve()[0]


def check_a_barrier_names_who_did_not_come(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        n = group.size
        if n < 2:
            return
        late = n - 1
        for _ in range(2):
            if group.rank == late:
                for peer in range(late):
                    group.recv(peer).resolve()  # all others have given up
                group.barrier(timeout_s=30)
            else:
                missing = (f"ranks [{late}]", "group 'world'", "0.05 s", "'roll call'")
                with raises(CollectiveTimeoutError, f"rank {group.rank}", *missing):
                    group.barrier(timeout_s=0.05, label="roll call")
                group.send(np.ones(1), late).resolve()
        group.barrier(timeout_s=30)
        group.barrier()


def check_barriers_of_two_groups_of_the_same_ranks_are_told_apart(comm):
    """A limit that has run out on one group lets nobody pass the barrier of the other."""
    with mesh_of(comm) as mesh:
        group = mesh.group()
        twin = mesh.add_group("twin", list(range(group.size)))
        late = group.size - 1
        if group.size < 2:
            return
        if group.rank == late:
            for peer in range(late):
                group.recv(peer).resolve()  # all others have given up
            group.barrier(timeout_s=30)
            time.sleep(0.2)
            twin.barrier(timeout_s=30)
        else:
            with pytest.raises(CollectiveTimeoutError):
                group.barrier(timeout_s=0.05)
            group.send(np.ones(1), late).resolve()
            start_s = time.monotonic()
            twin.barrier(timeout_s=30)
            assert time.monotonic() - start_s > 0.1
        group.barrier(timeout_s=30)

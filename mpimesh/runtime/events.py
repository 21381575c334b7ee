"""Bring the events of all ranks together, on one clock.

Processes of one machine read the same clock: on Linux :func:`time.perf_counter` counts from the
machine's start. Clocks of different machines differ by anything, so one rank of each machine asks
rank 0 for its time, over and over. The answer was given some time between question and arrival; in
the middle, as far as one can know. The quickest exchange leaves the least room for error: half its
round trip.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.comm import MAX_USER_TAG
from mpimesh.errors import TraceError
from mpimesh.runtime.agreement import agree
from mpimesh.runtime.device_mesh import DeviceMesh
from mpimesh.runtime.group import ProcessGroup
from mpimesh.trace import Event, Tracer, events_from_json, events_to_json

__all__ = ["clock_offsets", "gather_events"]

_TAG = MAX_USER_TAG + 7

Clock = Callable[[], float]


def gather_events(mesh: DeviceMesh, tracer: Tracer, *, root: int = 0) -> list[Event]:
    """Return the events of all ranks of the mesh on `root`, and none elsewhere.

    Collective over the mesh.

    Args:
        mesh: Whose ranks.
        tracer: Where this rank recorded its events. All ranks use the same kind of clock.
        root: The receiving rank, counted in the mesh's world group.

    Returns:
        On `root`, the events rank by rank, each under its rank in the mesh, with times of the first
        rank's clock (see :func:`clock_offsets`).

    Raises:
        RankError: If `root` is not a rank of the mesh.

    Cost:
        One gather of about 60 bytes for each event, and :func:`clock_offsets`.
    """
    group = mesh.group()
    events = [replace(event, rank=mesh.rank) for event in tracer.events()]
    text = np.frombuffer(events_to_json(events).encode(), np.uint8)
    sizes = group.all_gather(np.array([text.size]), label="event sizes").resolve()
    texts = group.gather(text, root=root, sizes=sizes.tolist(), label="events").resolve()
    offsets_s = clock_offsets(mesh, clock=tracer.clock)
    if texts is None:
        return []
    parts = np.split(texts, np.cumsum(sizes)[:-1])
    together = [event for part in parts for event in events_from_json(part.tobytes())]
    return [replace(event, start_s=event.start_s + offsets_s[event.rank]) for event in together]


def clock_offsets(
    mesh: DeviceMesh, *, clock: Clock = time.perf_counter, rounds: int = 16
) -> dict[int, float]:
    """Return, for every rank of the mesh, the seconds to add to its times to get rank 0's.

    Collective over the mesh. "Rank 0" is the first rank of the mesh. Ranks of its host have
    the offset 0.0, and all ranks of one host have the same.

    Args:
        mesh: Whose ranks; :attr:`DeviceMesh.hosts` says which of them share a clock.
        clock: Gives seconds, the same clock on all ranks of a host.
        rounds: Questions that each other host asks, at least 1.

    Returns:
        The offsets by rank, the same on every rank, as ``offsets_s`` of
        :func:`~mpimesh.trace.timeline_svg` and :func:`~mpimesh.trace.chrome_trace`.

    Raises:
        TraceError: If `rounds` is less than 1.

    Cost:
        Nothing on one host. Else ``2 * rounds * latency_s`` for each other host, one after the
        other, and an agreement on small values.
    """
    if rounds < 1:
        raise TraceError(f"rounds must be at least 1, got {rounds}")
    group = mesh.group()
    hosts = [mesh.hosts[rank] for rank in group.ranks]
    # The first rank of each host speaks for it.
    speakers = [place for place, host in enumerate(hosts) if hosts.index(host) == place]
    if len(speakers) == 1:
        return dict.fromkeys(group.ranks, 0.0)
    mine = 0.0
    if group.rank == 0:
        for speaker in speakers[1:]:
            _answer(group, speaker, clock, rounds)
    elif group.rank in speakers:
        mine = _ask(group, clock, rounds)
    offsets_s = agree(group, "the clocks of all nodes", mine)
    return {
        rank: float(offsets_s[hosts.index(host)])
        for rank, host in zip(group.ranks, hosts, strict=True)
    }


def _ask(group: ProcessGroup, clock: Clock, rounds: int) -> float:
    """Return what to add to this rank's times to get those of place 0."""
    best_s, offset_s = float("inf"), 0.0
    there = np.empty(1)
    for _ in range(rounds):
        asked_s = clock()
        _send(group, np.zeros(1), 0)
        _receive(group, there, 0)
        arrived_s = clock()
        if arrived_s - asked_s < best_s:
            best_s = arrived_s - asked_s
            offset_s = float(there[0]) - (asked_s + arrived_s) / 2
    return offset_s


def _answer(group: ProcessGroup, speaker: int, clock: Clock, rounds: int) -> None:
    for _ in range(rounds):
        _receive(group, np.empty(1), speaker)
        _send(group, np.array([clock()]), speaker)


def _send(group: ProcessGroup, note: HostArray, peer: int) -> None:
    request = group.communicator.isend(note, peer, _TAG)
    group._core.wait_for(request, what="clock_offsets", peers=(peer,))


def _receive(group: ProcessGroup, note: HostArray, peer: int) -> None:
    request = group.communicator.irecv(note, peer, _TAG)
    group._core.wait_for(request, what="clock_offsets", peers=(peer,))

"""Whether ranks can read each other's device memory: found out by doing it once.

Every step of the trial is taken by all ranks whatever they have found so far, and what one cannot
do makes all say no.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpimesh.errors import TransportError
from mpimesh.transport.base import Communicator
from mpimesh.transport.cuda_handles import PLACE, Imports, describe, node_key, process_key
from mpimesh.transport.device_work import Lane
from mpimesh.transport.engine import Engine, Steps
from mpimesh.transport.ipc_events import EVENT, NAMES, OwnEvents, PeerEvents

if TYPE_CHECKING:
    from mpimesh.transport.cuda_ipc import CudaIpc

__all__ = ["try_out"]

_TRIAL_NUMBERS = 4


def try_out(
    kind: type[CudaIpc],
    host: Communicator,
    engine: Engine,
    chain: Hashable,
    process: int | None,
) -> Steps:
    """Collective: make a mover of `kind` if it works; the steps' value is (it or None, reason)."""
    own = process_key() if process is None else process
    mine = np.array([node_key()], np.int64)
    nodes = np.empty(host.size, np.int64)
    yield host.all_gather(mine, nodes, [1] * host.size)
    if len(set(nodes.tolist())) > 1:
        return None, "ranks are on several nodes"
    lane = Lane(host)
    with lane.current():
        sample = lane.cupy.full(_TRIAL_NUMBERS, host.rank + 1, np.int64)
        place = np.array([describe(sample, process=own)], PLACE)
    yield lane.reached()
    problem, events = _own_events(own)
    if place["nbytes"][0] < 0:
        problem = "the memory of CuPy's pool has no handle that other processes can open"
    records = np.zeros(len(NAMES), EVENT) if events is None else events.records
    row = np.concatenate([place.view(np.uint8), records.view(np.uint8)])
    rows = np.empty((host.size, row.size), np.uint8)
    yield host.all_gather(row, rows.reshape(-1), [row.size] * host.size)
    peers, imports = None, Imports(process=own)
    copies: Any = None
    if not problem and events is not None:
        try:
            seen = np.ascontiguousarray(rows[:, place.nbytes :]).view(EVENT)
            peers = PeerEvents(events, seen, host.rank, process=own)
            places = np.ascontiguousarray(rows[:, : place.nbytes]).view(PLACE).reshape(-1)
            with lane.current():
                copies = lane.cupy.empty((host.size, _TRIAL_NUMBERS), np.int64)
                for rank, other in enumerate(places):
                    address = imports.open(other) if rank != host.rank else sample.data.ptr
                    lane.copy(copies[rank].data.ptr, address, sample.nbytes)
        except (TransportError, _cuda_error()) as error:
            problem = str(error)
    yield lane.reached()
    if copies is not None and not problem:
        with lane.current():
            right = lane.cupy.asnumpy(copies).tolist()
        if right != [[rank + 1] * _TRIAL_NUMBERS for rank in range(host.size)]:
            problem = "memory of another rank was opened, but does not hold what it should"
    votes = np.array([not problem], np.uint8)
    yield host.all_reduce(None, votes, "min")
    imports.close()
    if not votes[0] or peers is None:
        if peers is not None:
            peers.close()
        return None, problem or "another rank cannot open the memory of this one"
    return kind(host, engine, chain, peers, process=own), ""


def _own_events(process: int) -> tuple[str, OwnEvents | None]:
    try:
        return "", OwnEvents(process=process)
    except _cuda_error() as error:
        return f"CUDA makes no interprocess events here: {error}", None


def _cuda_error() -> type[Exception]:
    error: type[Exception] = sys.modules["cupy"].cuda.runtime.CUDARuntimeError
    return error

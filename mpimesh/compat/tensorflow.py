"""TensorFlow DTensor's heartbeat: all ranks show each other, now and then, that they are alive.

TensorFlow beats in a thread. Here the program beats, where all its ranks come by anyway: a rank
that hangs in its own code is missed, too, and there is no second order of messages beside the
program's.
"""

from __future__ import annotations

import os
import secrets

import numpy as np

from mpimesh.arguments import as_int, as_time, check_kind, rank_names, shown
from mpimesh.arrays import HostArray
from mpimesh.errors import (
    CollectiveTimeoutError,
    GroupError,
    MeshError,
    MismatchError,
    PeerLostError,
    on_all_ranks,
)
from mpimesh.runtime import CollectiveTensor, DeviceMesh
from mpimesh.runtime.tracebacks import write_error
from mpimesh.runtime.watchdog import EXIT_CODE

__all__ = ["Heartbeat", "heartbeat_enabled"]

_SPEAKERS = 2
"""Ranks from this one on are silent about the first strikes: of the others one is there."""


def heartbeat_enabled() -> bool:
    """Tell whether ``DTENSOR_ENABLE_HEARTBEAT`` is unset, ``true`` or ``1``. Local."""
    return os.environ.get("DTENSOR_ENABLE_HEARTBEAT", "true").lower() in ("true", "1")


class Heartbeat:
    """A check of liveness, for a program whose ranks might hang or be stopped without an end.

    Making it is collective over the mesh. What the variable of :func:`heartbeat_enabled` says on
    the first rank holds for all: if it is off, beats do nothing.

    Args:
        mesh: Whose ranks beat.
        timeout_s: Longest wait for the others until a strike.
        strikes: At so many in a row the rank raises.

    Raises:
        MeshError: If `mesh` is no mesh.
        GroupError: If `timeout_s` or `strikes` will not do.

    Example:
        >>> with mm.DeviceMesh("dp=-1") as mesh:
        ...     heartbeat = mm.compat.tensorflow.Heartbeat(mesh, timeout_s=20.0)
        ...     for step in range(3):
        ...         heartbeat.beat()
        ...     heartbeat.beats
        3
    """

    def __init__(self, mesh: DeviceMesh, *, timeout_s: float = 20.0, strikes: int = 3) -> None:
        check_kind(mesh, DeviceMesh, "mesh", MeshError, wanted="a DeviceMesh")
        limit_s = as_time(timeout_s, "timeout_s", GroupError)
        if not limit_s:
            raise GroupError(
                f"timeout_s must be a number of seconds above 0, got {shown(timeout_s)}"
            )
        self.beats = 0
        self._limit_s = limit_s
        self._strikes = as_int(strikes, "strikes", GroupError, least=1)
        self._group = mesh.group()
        token = 1 + secrets.randbelow(2**16 - 1) if heartbeat_enabled() else 0
        self._token = int(self._group.broadcast(np.array([token])).resolve()[0])

    @property
    def enabled(self) -> bool:
        """Whether beats do something: the same on all ranks."""
        return self._token != 0

    def beat(self) -> None:
        """Wait for all ranks of the mesh, each of which shows the token of this job. Collective.

        After `timeout_s` without one of them it is a strike, which the first ranks write to stderr;
        at the last strike the rank raises. If nobody catches that, it ends the job, with exit code
        124 where the launcher hands it on.

        Raises:
            PeerLostError: At the last strike, naming the ranks that have not come.
            MismatchError: On every rank, naming ranks that have shown another token.

        Cost:
            An all-reduce of 8 bytes for each rank, and the messages of a barrier with a limit.
        """
        if not self.enabled:
            return
        group = self._group
        signal = np.zeros(group.size, np.int64)
        signal[group.rank] = self._token
        # Started before the wait: a rank that comes late finds all others in it.
        received = self._wait(group.all_reduce(signal, label="heartbeat"))
        wrong = np.flatnonzero(received != self._token).tolist()
        if wrong:
            raise on_all_ranks(
                MismatchError(
                    f"heartbeat {self.beats} of group {group.name!r}: {rank_names(wrong)} did not "
                    f"show the token {self._token} but {received[wrong[:4]].tolist()}: memory or "
                    "messages are damaged; start the job anew"
                )
            )
        self.beats += 1

    def _wait(self, shown_tokens: CollectiveTensor) -> HostArray:
        group, missing, text = self._group, "", ""
        for strike in range(1, self._strikes + 1):
            try:
                if strike == 1:  # it names who is missing
                    group.barrier(timeout_s=self._limit_s, label="heartbeat")
                tokens: HostArray = shown_tokens.resolve(self._limit_s)
                return tokens
            except CollectiveTimeoutError as error:
                missing = missing or str(error)
                text = f"heartbeat {self.beats}, strike {strike} of {self._strikes}: {missing}"
                if group.world_rank in group.ranks[:_SPEAKERS] and strike < self._strikes:
                    write_error(group.world_rank, f"mpimesh: {text}")
        lost = PeerLostError(
            f"{text}; after {self._strikes} strikes of {self._limit_s:g} s they count as lost, and "
            "this rank ends the job: look at what they do, or give a longer timeout_s"
        )
        lost.exit_code = EXIT_CODE
        raise lost

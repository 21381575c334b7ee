"""Settings of the environment: the only reader of ``MPIMESH_*`` variables.

``MPIMESH_CHECKS`` (default 0)
    0 is off: only ranks of one node compare the collectives that they start, when they take the
    results. 1 compares every collective over all its ranks before data moves, functions of split
    arrays with their values, and batches, optimizers and parameters of replicas; it finds ranks
    that wait for each other, and messages that were not received. 2 also compares the lines that
    led to each call, and shows mpimesh's own frames in tracebacks.
``MPIMESH_TIMEOUT_S`` (default 1800)
    Seconds that a rank may wait in one operation, or in making or closing a mesh, before the
    watchdog reports it and ends the job, from 0.1 on; 0 is off. Unless it is below its default, a
    few ranks of a job write one line about a wait of 30 seconds, and wait on.
``MPIMESH_RECORD_DIR`` (default none)
    Folder, which all ranks see, for the flight record: when a job fails, each rank leaves its last
    1,000 operations there, and ``mpimesh flight`` says where they differ. Without it the
    rank that ends the job writes its last 8 to stderr.
``MPIMESH_CUDA_AWARE`` (default auto)
    Whether device pointers are passed to MPI. auto tries each operation between two child
    processes, once for each MPI, driver and GPU, in a node and by the network, as ranks need it;
    yes and no are believed. A wrong yes is a crash.
``MPIMESH_NODE_SHARED`` (default auto)
    Whether collectives of the ranks of one node go through memory that they share; never is for
    tests and comparisons, as if each rank were a node. Over several nodes, auto does so for
    all-reduces from 64 KiB on, always for all of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from mpimesh.errors import SettingsError

__all__ = ["DEFAULT_TIMEOUT_S", "Settings", "unknown_variables"]

DEFAULT_TIMEOUT_S = 1800.0
_SHORTEST_TIMEOUT_S = 0.1


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one process, read once for each mesh.

    Attributes:
        checks: 0, 1 or 2, see :mod:`mpimesh.settings`.
        timeout_s: Limit of one wait in seconds; 0 means none.
        record_dir: Where the ranks keep their flight record; empty for none.
        cuda_aware: ``"auto"``, ``"yes"`` or ``"no"``.
        node_shared: ``"auto"``, ``"always"`` or ``"never"``.
    """

    checks: int = 0
    timeout_s: float = DEFAULT_TIMEOUT_S
    record_dir: str = ""
    cuda_aware: str = "auto"
    node_shared: str = "auto"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read the settings from `environment`, by default the process's own.

        Raises:
            SettingsError: If the value of a variable is none of those it may have.
        """
        environment = os.environ if environment is None else environment
        return cls(
            checks=int(_word(environment, "MPIMESH_CHECKS", "0", "1", "2")),
            timeout_s=_timeout_s(environment, "MPIMESH_TIMEOUT_S"),
            record_dir=environment.get("MPIMESH_RECORD_DIR", ""),
            cuda_aware=_word(environment, "MPIMESH_CUDA_AWARE", "auto", "yes", "no"),
            node_shared=_word(environment, "MPIMESH_NODE_SHARED", "auto", "always", "never"),
        )


_NAMES = [f"MPIMESH_{field.name.upper()}" for field in fields(Settings)]


def unknown_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """Return a warning of each ``MPIMESH_*`` variable that is no setting."""
    unknown = [
        variable
        for variable in sorted(os.environ if environment is None else environment)
        if variable.startswith("MPIMESH_")
        and not variable.startswith("MPIMESH_BUILD_")
        and variable not in _NAMES
    ]
    if not unknown:
        return []
    from difflib import get_close_matches  # late: it is seldom needed

    nearest = [get_close_matches(one.upper(), _NAMES, n=1, cutoff=0.0)[0] for one in unknown]
    return [
        f"{variable} is no setting of mpimesh and is ignored; the nearest is {near}"
        for variable, near in zip(unknown, nearest, strict=True)
    ]


def _word(environment: Mapping[str, str], variable: str, *words: str) -> str:
    """Return the value of a variable that has one of `words`, by default the first."""
    text = environment.get(variable, words[0])
    if text not in words:
        raise SettingsError(f"{variable} must be one of {', '.join(words)}, got {text!r}")
    return text


def _timeout_s(environment: Mapping[str, str], variable: str) -> float:
    text = environment.get(variable, str(DEFAULT_TIMEOUT_S))
    try:
        value = float(text)
    except ValueError:
        raise SettingsError(f"{variable} must be a number of seconds, got {text!r}") from None
    if not 0 <= value < float("inf"):
        raise SettingsError(f"{variable} must not be negative or infinite, got {text!r}")
    if 0 < value < _SHORTEST_TIMEOUT_S:
        raise SettingsError(
            f"{variable} must be at least {_SHORTEST_TIMEOUT_S} seconds, or 0 for no limit, got "
            f"{text!r}: MPI itself takes longer to start"
        )
    return value

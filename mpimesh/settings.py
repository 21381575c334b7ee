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
from typing import Any

from mpimesh.errors import SettingsError

__all__ = ["DEFAULT_TIMEOUT_S", "Settings"]

DEFAULT_TIMEOUT_S = 1800.0
_SHORTEST_TIMEOUT_S = 0.1

# A setting that is no number, and its words.
_WORDS = {
    "MPIMESH_NODE_SHARED": ("auto", "always", "never"),
    "MPIMESH_CUDA_AWARE": ("auto", "yes", "no"),
}


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
            SettingsError: If a variable is unknown or its value is none of those it may have.
        """
        environment = os.environ if environment is None else environment
        known = {f"MPIMESH_{field.name.upper()}": field for field in fields(cls)}
        values: dict[str, Any] = {}
        for variable in sorted(environment):
            if not variable.startswith("MPIMESH_") or variable.startswith("MPIMESH_BUILD_"):
                continue
            if variable not in known:
                raise SettingsError(
                    f"{variable} is not a variable of mpimesh; known: {', '.join(sorted(known))}"
                )
            field, text = known[variable], environment[variable]
            if variable in _WORDS:
                values[field.name] = _word(variable, text)
            elif field.type == "str":
                values[field.name] = text
            else:
                values[field.name] = _number(variable, text, whole=field.type == "int")
        if values.get("checks", 0) not in (0, 1, 2):
            raise SettingsError(f"MPIMESH_CHECKS must be 0, 1 or 2, got {values['checks']}")
        if 0 < values.get("timeout_s", 0) < _SHORTEST_TIMEOUT_S:
            raise SettingsError(
                f"MPIMESH_TIMEOUT_S must be at least {_SHORTEST_TIMEOUT_S} seconds, or 0 for no "
                f"limit, got {values['timeout_s']:g}: MPI itself takes longer to start"
            )
        return cls(**values)


def _word(variable: str, text: str) -> str:
    if text not in _WORDS[variable]:
        words = ", ".join(_WORDS[variable])
        raise SettingsError(f"{variable} must be one of {words}, got {text!r}")
    return text


def _number(variable: str, text: str, *, whole: bool) -> float | int:
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        kind = "whole number" if whole else "number of seconds"
        raise SettingsError(f"{variable} must be a {kind}, got {text!r}") from None
    if not 0 <= value < float("inf"):
        raise SettingsError(f"{variable} must not be negative or infinite, got {text!r}")
    return value

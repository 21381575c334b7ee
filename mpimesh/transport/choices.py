"""The choices of one process: set, measured in this job, or kept from an earlier one."""

from __future__ import annotations

import json
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpimesh.transport.choice import NEVER, NUMBERS, Choice
from mpimesh.transport.mpi_environment import (
    cache_folder,
    digest,
    loaded_ucx,
    tuning,
    write_json,
)

__all__ = ["Choices"]

_FORMAT = "6"


class Choices:
    """Knowledge about shared memory on this machine, by the number of ranks and of nodes.

    Args:
        mode: ``"auto"``, ``"always"`` or ``"never"``: the setting ``MPIMESH_NODE_SHARED``.
        path: The file that keeps what was measured; None keeps nothing.
    """

    def __init__(self, mode: str, path: Path | None) -> None:
        self.mode = mode
        self._path = path
        self._known = {
            group: Choice.of_numbers(numbers, _KEPT) for group, numbers in _read(path).items()
        }

    @classmethod
    def of_machine(cls, mode: str) -> Choices:
        """Return those that hold for this machine and its MPI. Local."""
        folder = cache_folder()
        name = f"shared-memory-{digest(_FORMAT, *_machine())}.json"
        return cls(mode, None if folder is None else folder / name)

    @property
    def number(self) -> int:
        """The mode as a number that the ranks compare; 0 for never."""
        return ("never", "always", "auto").index(self.mode)

    def of_ranks(self, ranks: int, nodes: int = 1) -> Choice | None:
        """Return the choice for so many ranks on so many nodes; None if it has to be measured."""
        if self.mode == "always":
            return Choice.everything("MPIMESH_NODE_SHARED=always")
        return self._known.get((ranks, nodes))

    def learn(
        self, ranks: int, numbers: list[int], *, nodes: int = 1, measured: bool, keep: bool
    ) -> Choice:
        """Take over what was measured or what another rank knows; `keep` writes it down."""
        known = self._known.get((ranks, nodes))
        if known is not None and known.numbers == numbers:
            return known  # which says when it was measured
        choice = Choice.of_numbers(numbers, _MEASURED if measured else _KEPT)
        self._known[ranks, nodes] = choice
        if keep and self._path is not None:
            table = {**_read(self._path), (ranks, nodes): numbers}
            # Not to be able to keep it costs the next job a tenth of a second, no more.
            with suppress(OSError):
                write_json(self._path, {f"{r} on {n}": row for (r, n), row in table.items()})
        return choice


_KEPT = "faster, as measured on this machine before"
_MEASURED = "faster, as measured in this job"


def _machine() -> list[str]:
    # Imported late: importing it starts MPI.
    from mpi4py import MPI

    model = ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line for line in lines if line.startswith("model name")), "")
    return [
        MPI.Get_library_version(),
        platform.machine(),
        model,
        str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        # The same library sends otherwise by another UCX, or as a person has told it to.
        str(loaded_ucx()),
        *tuning(os.environ),
    ]


def _read(path: Path | None) -> dict[tuple[int, int], list[int]]:
    """Return the numbers for ranks on nodes; nothing if the file is not what it should be."""
    if path is None:
        return {}
    try:
        table: dict[str, Any] = json.loads(path.read_text())
        found = {_group(text): [int(one) for one in numbers] for text, numbers in table.items()}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}
    return {
        group: numbers
        for group, numbers in found.items()
        if len(numbers) == NUMBERS and all(0 < number <= NEVER for number in numbers)
    }


def _group(text: str) -> tuple[int, int]:
    ranks, nodes = text.split(" on ")
    return int(ranks), int(nodes)

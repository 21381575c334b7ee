"""What a rank tells the others when it leaves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.runtime.progress import Wait

__all__ = ["Farewell"]


@dataclass(frozen=True, slots=True)
class Farewell:
    """A rank has left one mesh, or the job.

    Attributes:
        why: What happened, with the rank as subject: ``"ended with exit code 3"``.
        exit_code: The exit code that the job should get from it; 0 if it left in peace.
        family: The mesh that it left; empty for all of them.
        started: For each mesh of a rank that left in peace, how many collectives it has started
            on each group. It has done its part in those, and others may still wait for them.
    """

    why: str
    exit_code: int = 0
    family: str = ""
    started: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def to_bytes(self) -> HostArray:
        """Return the farewell as a message."""
        return np.frombuffer(json.dumps(asdict(self)).encode(), np.uint8).copy()

    @classmethod
    def from_bytes(cls, message: HostArray) -> Farewell:
        """Read a message."""
        return cls(**json.loads(bytes(message)))

    def ends(self, wait: Wait) -> bool:
        """Tell whether `wait`, which takes the rank that left, can no longer be done."""
        family = wait.communicator.family
        if self.family and self.family != family:
            return False
        number = getattr(wait.what, "number", 0)
        done = self.started.get(family, {}).get(getattr(wait.what, "group", ""), 0)
        return not 0 < number <= done

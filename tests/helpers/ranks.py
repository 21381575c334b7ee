"""A function of a live mesh, called on virtual ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpimesh as mm

__all__ = ["on"]


def on(dims: str | mm.Mesh, function: Callable[[mm.DeviceMesh], Any]) -> list[Any]:
    """Return what each rank of the mesh makes of it."""

    def main() -> Any:
        with mm.DeviceMesh(dims) as mesh:
            return function(mesh)

    return mm.run_virtual((dims if isinstance(dims, mm.Mesh) else mm.Mesh(dims)).size, main)

"""Arrays of one element as numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpimesh.errors import RankError, ShapeError, on_all_ranks

if TYPE_CHECKING:
    from mpimesh.dtensor.tensor import DTensor

__all__ = ["item_of"]


def item_of(x: DTensor, what: str) -> Any:
    """Return the element of an array that has one. Collective, unless all ranks have it.

    Args:
        x: The array.
        what: What it is to become, for messages.

    Raises:
        ShapeError: On every rank, if it has another number of elements.
        RankError: If this rank is not in the mesh.
    """
    if x.size != 1:
        raise on_all_ranks(
            ShapeError(
                f"{x!r} has {x.size} elements, and only an array of one can {what}; reduce it "
                "first, with x.any(), x.all() or x.sum(), or take x.full() for the whole array"
            )
        )
    if not x.is_member:
        raise RankError(f"rank {x.mesh.rank} is not in the mesh of {x!r} and has no value of it")
    whole = x.local if x.layout.is_replicated else x.full()
    return whole.item()

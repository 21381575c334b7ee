"""One rank waits for the others in a collective, and they end the mesh."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import mpimesh as mm
from mpimesh.errors import MismatchError
from mpimesh.runtime.persistent import PersistentCollective
from tests.helpers.named_ranks import named_ranks
from tests.helpers.raises import raises

Wait = Callable[[], object]


def again(plan: PersistentCollective) -> Wait:
    """Start it once on all ranks, and then when it is asked for."""
    plan.start().resolve()
    return lambda: plan.start().resolve()


WAITS: dict[str, Callable[[mm.DeviceMesh, mm.ProcessGroup], Wait]] = {
    "all_reduce": lambda _, group: lambda: group.all_reduce(np.ones(3)).resolve(),
    "all_reduce: large": lambda _, group: lambda: group.all_reduce(np.ones(1 << 18)).resolve(),
    "all_reduce: planned": lambda _, group: again(group.all_reduce_init(np.ones(3))),
    "barrier": lambda _, group: group.barrier,
    "broadcast": lambda _, group: lambda: group.broadcast(np.ones(3), root=0).resolve(),
    "shift": lambda _, group: lambda: group.shift(np.ones(3)).resolve(),
    "redistribute": lambda mesh, _: mm.distribute(np.ones((8, 8)), mesh, "dp=S0").full,
    "add_group": lambda mesh, _: lambda: mesh.add_group("more", range(mesh.world_size)),
}
"""What a rank waits in: prepared on all ranks; its name begins as messages call it."""


def all_are_told(comm, name, waiter=1):
    """Let `waiter` wait among all ranks, and the others end the block; all get one error."""

    def main():
        with mm.DeviceMesh("dp=-1", comm) as mesh:
            here.append(mesh)
            wait = WAITS[name](mesh, mesh.group("dp"))
            if mesh.rank == waiter:
                wait()

    here: list[mm.DeviceMesh] = []
    waits = f"rank {waiter}: {name.partition(':')[0]}("
    with raises(MismatchError, waits, "close() of the mesh") as caught:
        main()
    assert here[0].rank in named_ranks(str(caught.value))  # others may not have come there yet
    assert here[0].closed

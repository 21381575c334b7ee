"""Put the outputs of all replicas together, in the order of the batch."""

from __future__ import annotations

from typing import Any

from mpimesh.parallel.engine import Engine
from mpimesh.parallel.interface import Interface, Leaf
from mpimesh.parallel.microbatch import Microbatches, replica_sizes
from mpimesh.parallel.step import Step
from mpimesh.parallel.tree import Structure, Tree, flatten
from mpimesh.runtime import ProcessGroup
from mpimesh.runtime.agreement import exchange

__all__ = ["joined_output"]


def joined_output(engine: Engine, step: Step, *, everywhere: bool) -> Tree | None:
    """Return the outputs of a forward step on ranks of the last stage, or on all. Collective.

    They are one for the whole batch, or Microbatches if it was given so.
    """
    outputs, size = step.outputs, step.size
    if engine.is_last and engine.data.size > 1 and size.rows + size.count:
        if size.count:
            outputs = _given_to_all(engine, engine.data, outputs)
        else:
            sizes = replica_sizes(size.rows, engine.data.size)
            outputs = [_over_replicas(engine, outputs, sizes)]
    if everywhere and engine.pipe.size > 1:
        outputs = _given_to_all(engine, engine.pipe, outputs if engine.is_last else [])
    if not outputs:
        return None
    return Microbatches(outputs) if size.count else outputs[0]


def _over_replicas(engine: Engine, outputs: list[Tree], sizes: list[int]) -> Tree:
    """Put the rows of all replicas together."""
    output = _or_empty(engine, outputs) if 0 in sizes else outputs[0]
    leaves, structure = flatten(output)
    handles = [engine.data.all_gather(leaf, sizes=sizes, label="outputs") for leaf in leaves]
    return structure.unflatten([handle.resolve() for handle in handles])


def _or_empty(engine: Engine, outputs: list[Tree]) -> Tree:
    """Return the output; where a replica had no rows, no rows of what the others have."""
    mine = [_interface(output).to_json() for output in outputs]
    known = next(filter(None, _tell(engine.data, mine, "the shapes of outputs")))
    if outputs:
        return outputs[0]
    interface = Interface.from_json(known[0])
    return interface.structure.unflatten(
        [engine.xp.empty(leaf.shape(0), leaf.dtype) for leaf in interface.leaves]
    )


def _given_to_all(engine: Engine, group: ProcessGroup, outputs: list[Tree]) -> list[Tree]:
    """Return what all ranks of a group have together, in the order of the ranks."""
    mine = [flatten(output)[1].to_json() for output in outputs]
    told = _tell(group, mine, "the structure of outputs")
    taken = []
    for rank, structures in enumerate(told):
        for place, text in enumerate(structures):
            structure = Structure.from_json(text)
            here = rank == group.rank
            leaves = flatten(outputs[place])[0] if here else [None] * structure.num_leaves
            handles = [group.broadcast(leaf, root=None, label="outputs") for leaf in leaves]
            taken.append((structure, handles))
    return [
        structure.unflatten([engine.xp.asarray(handle.resolve()) for handle in handles])
        for structure, handles in taken
    ]


def _tell(group: ProcessGroup, mine: object, what: str) -> list[Any]:
    return exchange(group._core.progress, group.communicator, mine, what=what)


def _interface(output: Tree) -> Interface:
    leaves, structure = flatten(output)
    return Interface(structure, tuple(Leaf(tuple(x.shape[1:]), x.dtype) for x in leaves))

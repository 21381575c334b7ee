"""Put the outputs of all replicas together, in the order of the rows."""

from __future__ import annotations

from typing import Any

from mpimesh.arrays import Array
from mpimesh.parallel.engine import Engine
from mpimesh.parallel.interface import Interface, Leaf
from mpimesh.parallel.microbatch import replica_sizes
from mpimesh.parallel.step import Step
from mpimesh.parallel.tree import Structure, Tree, flatten
from mpimesh.runtime import ProcessGroup
from mpimesh.runtime.agreement import exchange

__all__ = ["joined_output"]


def joined_output(engine: Engine, step: Step, *, everywhere: bool) -> Tree | None:
    """Return the outputs of a forward step on ranks of the last stage, or on all. Collective."""
    output = step.output
    if engine.is_last and engine.data.size > 1 and step.rows:
        output = _over_replicas(engine, output, replica_sizes(step.rows, engine.data.size))
    if everywhere and engine.pipe.size > 1:
        output = _to_all_stages(engine, output if engine.is_last else None)
    return output


def _over_replicas(engine: Engine, output: Tree | None, sizes: list[int]) -> Tree:
    if 0 in sizes:
        output = _or_empty(engine, output)
    leaves, structure = flatten(output)
    handles = [engine.data.all_gather(leaf, sizes=sizes, label="outputs") for leaf in leaves]
    return structure.unflatten([handle.resolve() for handle in handles])


def _or_empty(engine: Engine, output: Tree | None) -> Tree:
    """Return `output`; where a replica had no rows, no rows of what the others have."""
    mine = None if output is None else _interface(output).to_json()
    known = next(filter(None, _tell(engine.data, mine, "the shapes of outputs")))
    if output is not None:
        return output
    interface = Interface.from_json(known)
    return interface.structure.unflatten(
        [engine.xp.empty(leaf.shape(0), leaf.dtype) for leaf in interface.leaves]
    )


def _to_all_stages(engine: Engine, output: Tree | None) -> Tree:
    """Give every rank of a pipeline what its last stage has."""
    leaves, structure = ([], None) if output is None else flatten(output)
    mine = None if structure is None else [structure.to_json()]
    told = next(filter(None, _tell(engine.pipe, mine, "the structure of outputs")))
    structure = Structure.from_json(told[0])
    sent: list[Array | None] = [*leaves] or [None] * structure.num_leaves
    handles = [engine.pipe.broadcast(leaf, root=None, label="outputs") for leaf in sent]
    return structure.unflatten([engine.xp.asarray(handle.resolve()) for handle in handles])


def _tell(group: ProcessGroup, mine: object, what: str) -> list[Any]:
    return exchange(group.progress, group.communicator, mine, what=what)


def _interface(output: Tree) -> Interface:
    leaves, structure = flatten(output)
    return Interface(structure, tuple(Leaf(tuple(x.shape[1:]), x.dtype) for x in leaves))

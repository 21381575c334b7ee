"""Put the outputs of all replicas together, in the order of the rows."""

from __future__ import annotations

import numpy as np

from mpimesh.arrays import Array, DType
from mpimesh.arrays.dtypes import dtype_from_json, dtype_to_json
from mpimesh.parallel.engine import Engine
from mpimesh.parallel.microbatch import replica_sizes
from mpimesh.parallel.step import Step
from mpimesh.runtime.agreement import exchange

__all__ = ["joined_output"]


def joined_output(engine: Engine, step: Step, *, everywhere: bool) -> Array | None:
    """Return the outputs of a forward step on ranks of the last stage, or on all. Collective."""
    output = step.output
    if engine.is_last and engine.data.size > 1 and step.rows:
        sizes = replica_sizes(step.rows, engine.data.size)
        if 0 in sizes:
            output = _or_empty(engine, output)
        output = engine.data.all_gather(output, sizes=sizes, label="outputs").resolve()
    if everywhere and engine.pipe.size > 1:
        output = engine.pipe.broadcast(output if engine.is_last else None, root=None).resolve()
        output = output if engine.xp is np else engine.xp.asarray(output)
    return output


def _or_empty(engine: Engine, output: Array | None) -> Array:
    """Return `output`; where a replica had no rows, no rows of what the others have."""
    mine = None if output is None else [list(output.shape[1:]), dtype_to_json(output.dtype)]
    data = engine.data
    everyone = exchange(data.progress, data.communicator, mine, what="the shapes of outputs")
    known = [told for told in everyone if told]
    row_shape, dtype = known[0]
    kind: DType = dtype_from_json(dtype)
    return engine.xp.empty((0, *row_shape), kind) if output is None else output

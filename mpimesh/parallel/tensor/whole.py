"""A split array put together: of the ranks that have the same part of it, one sends."""

from __future__ import annotations

import numpy as np

from mpimesh.arrays import Array, HostArray, to_numpy
from mpimesh.nn import Parameter
from mpimesh.parallel.tensor.parameter import TensorParameter
from mpimesh.runtime import ProcessGroup

__all__ = ["whole_array"]


def whole_array(parameter: Parameter, part: Array, group: ProcessGroup | None) -> HostArray:
    """Return the array of which this rank has a part, as it has one of a parameter.

    Collective over `group` where the ranks' parts differ, else local.

    Args:
        parameter: Says who has what.
        part: This rank's part: the parameter's values, or something else of their shape.
        group: The ranks over which layers are split; None if none are.

    Cost:
        One all-gather of the whole array, however many ranks have the same part of it.
    """
    values = np.array(to_numpy(part))
    if group is None or not isinstance(parameter, TensorParameter):
        return values
    firsts = [parameter.parts.index(runs) for runs in parameter.parts]
    if not any(firsts):
        return values
    axis = parameter.axis
    sizes = [
        sum(stop - start for start, stop in runs) if firsts[rank] == rank else 0
        for rank, runs in enumerate(parameter.parts)
    ]
    if firsts[parameter.rank] != parameter.rank:
        values = np.take(values, [], axis)
    joined = group.all_gather(values, axis=axis, sizes=sizes).resolve()
    parts = np.split(joined, np.cumsum(sizes)[:-1], axis=axis)
    return parameter.joined([parts[first] for first in firsts])

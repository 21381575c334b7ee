"""Fourier transforms of split arrays: axis by axis, each of which is whole when its turn comes.

Nothing moves for axes that no mesh dim splits. Of several axes those go first; then the split goes
from the others to the longest of those that are done, in one exchange, and the result stays so. An
array as ``S0`` that is transformed along all axes comes out as ``S1`` or ``S2``: the transform back
brings it to where it can go on, and ``redistribute`` where it was. On two mesh dims, ``S0, S1``, an
axis with room for both takes both splits; if none has, they move one after the other (pencils).

A transform of one axis gives its split to the axis that leaves the longest blocks. A row alone,
or fewer lines than ranks, is brought whole to all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np

from mpimesh.dtensor.dispatch import implements
from mpimesh.dtensor.dtensor import DTensor
from mpimesh.dtensor.joining import roll
from mpimesh.dtensor.methods import reduced
from mpimesh.dtensor.run import implements_by_name, moved_to, row_of
from mpimesh.errors import AxisError, ShapeError
from mpimesh.layout import Placement, Shard
from mpimesh.layout.axis_rules import lines_placement, unsplit
from mpimesh.runtime.operands import normal_axis

__all__: list[str] = []


@dataclass(frozen=True, slots=True)
class _Step:
    """The transform of one axis.

    Attributes:
        function: One of NumPy's, of one axis.
        axis: The axis, counted from 0.
        points: How many elements of it are used; zeros are added to fewer.
        length: How many elements it then has.
    """

    function: Callable[..., Any]
    axis: int
    points: int
    length: int


def _transformed(x: DTensor, phases: Sequence[Sequence[_Step]], norm: Any) -> DTensor:
    """Transform axes, one phase after the other: within a phase their order is ours to choose.

    Sums that are waited for stay so, for a transform of a sum is the sum of the transforms.
    """
    if x.layout.partial_op not in ("", "sum", "mean") or x.dtype.kind not in "fc":
        x = reduced(x)
    for phase in phases:
        for step in phase:
            if step.points < 1:
                raise ShapeError.everywhere(
                    f"a transform of axis {step.axis} of shape {x.shape} takes at least 1 "
                    f"point, got {step.points}"
                )
        left = list(phase)
        while left:
            split = {spec.axis for spec in x.placement if isinstance(spec, Shard)}
            ready = [step for step in left if step.axis not in split]
            if not ready:
                x = moved_to(x, _next_placement(x, [step.axis for step in left]))
                continue
            x = _here(x, ready, norm)
            left = [step for step in left if step not in ready]
    return x


def _here(x: DTensor, steps: Sequence[_Step], norm: Any) -> DTensor:
    """Transform axes that are whole on every rank. Local."""
    shape, block, kind = list(x.shape), x.local if x.is_member else None, x.dtype
    before = block
    for step in steps:
        shape[step.axis] = step.length
        kind = step.function(np.zeros(1, kind), step.points).dtype
        if block is None:
            continue
        lengths = (*block.shape[: step.axis], step.length, *block.shape[step.axis + 1 :])
        # What one step has written the next may overwrite, but not what is the caller's.
        same = block is not before and (block.shape, block.dtype) == (lengths, kind)
        into = block if same else x.mesh.shared_empty(lengths, kind)
        block = step.function(block, step.points, step.axis, norm, out=into)
    return DTensor(x.mesh, x.layout, shape, kind, block)


def _next_placement(x: DTensor, left: Sequence[int]) -> Placement:
    """Return where to go on, when all axes that are left are split.

    All of them become whole at once, if those that are done can be split instead. If not, one
    does, and takes the splits of others when it is done. With fewer lines than ranks all have all.
    """

    def without(*axes: int, closed: Sequence[int] = ()) -> Placement | None:
        return lines_placement(x.layout.mesh, x.placement, x.shape, *axes, closed=closed)

    found = without(*left)
    for closed in (left, ()):
        for axis in reversed(left):
            found = found or without(axis, closed=closed)
    return found or unsplit(x.placement, {left[-1]})


# -- one axis ------------------------------------------------------------------------------


def _one_axis(function: Callable[..., Any], length_of: Callable[[int], int]) -> None:
    @implements_by_name(function)
    def do(a: Any, n: Any = None, axis: Any = -1, norm: Any = None) -> DTensor:
        step = _step(function, a.shape, normal_axis(axis, a.ndim), n, length_of)
        return _transformed(a, [[step]], norm)


def _step(
    function: Callable[..., Any],
    shape: tuple[int, ...],
    axis: int,
    points: Any,
    length_of: Callable[[int], int],
) -> _Step:
    if points is None:
        points = shape[axis]
        if function in (np.fft.irfft, np.fft.hfft):
            points = 2 * (points - 1)
    return _Step(function, axis, index(points), length_of(index(points)))


def _same(points: int) -> int:
    return points


def _half(points: int) -> int:
    return points // 2 + 1


for _function in (np.fft.fft, np.fft.ifft, np.fft.irfft, np.fft.hfft):
    _one_axis(_function, _same)
for _function in (np.fft.rfft, np.fft.ihfft):
    _one_axis(_function, _half)


# -- several axes --------------------------------------------------------------------------


def _axes_and_points(x: Any, s: Any, axes: Any) -> Iterator[tuple[int, Any]]:
    if axes is None:
        chosen = tuple(range(0 if s is None else x.ndim - len(s), x.ndim))
    else:
        # One that is named twice is transformed twice.
        chosen = tuple(normal_axis(axis, x.ndim, "axes") for axis in axes)
    points = (None,) * len(chosen) if s is None else tuple(s)
    if len(points) != len(chosen) or any(axis < 0 for axis in chosen):
        raise ShapeError(f"s= and axes= of a transform go in pairs, got s={s} and axes={axes}")
    for axis, one in zip(chosen, points, strict=True):
        yield axis, None if one == -1 else one


def _several(
    functions: Sequence[Callable[..., Any]],
    one: Callable[..., Any],
    last: Callable[..., Any] | None = None,
    *,
    last_first: bool = False,
) -> None:
    """Register transforms of several axes; `last` does the last one, before or after the others."""

    def make(function: Callable[..., Any], default: Any) -> None:
        @implements_by_name(function)
        def do(a: Any, s: Any = None, axes: Any = default, norm: Any = None) -> Any:
            rows = list(_axes_and_points(a, s, axes))
            if last is None:
                return _transformed(a, [[_step(one, a.shape, *row, _same) for row in rows]], norm)
            if not rows:
                raise AxisError(f"np.fft.{function.__name__} takes at least 1 axis")
            others = [_step(one, a.shape, *row, _same) for row in rows[:-1]]
            length_of = _half if last is np.fft.rfft else _same
            ends = [_step(last, a.shape, *rows[-1], length_of)]
            return _transformed(a, [ends, others] if last_first else [others, ends], norm)

    make(functions[0], (-2, -1))
    make(functions[1], None)


_several((np.fft.fft2, np.fft.fftn), np.fft.fft)
_several((np.fft.ifft2, np.fft.ifftn), np.fft.ifft)
_several((np.fft.rfft2, np.fft.rfftn), np.fft.fft, np.fft.rfft, last_first=True)
_several((np.fft.irfft2, np.fft.irfftn), np.fft.ifft, np.fft.irfft)


# -- the frequency 0 in the middle -----------------------------------------------------------


def _shift(function: Callable[..., Any], sign: int) -> None:
    @implements(function)
    def do(x: Any, axes: Any = None) -> DTensor:
        rows = range(x.ndim) if axes is None else row_of(axes)
        every = [normal_axis(axis, x.ndim, "axes") for axis in rows]  # also one twice
        half = [x.shape[axis] // 2 if sign > 0 else -(x.shape[axis] // 2) for axis in every]
        return roll(x, half, every)


_shift(np.fft.fftshift, 1)
_shift(np.fft.ifftshift, -1)

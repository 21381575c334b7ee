"""The part that layers of PyTorch and of JAX share: losses, gradients of outputs, host arrays.

Host arrays are given to other libraries as the same memory, whatever its flags. Inputs from a stage
of another rank are read-only to NumPy, and libraries without read-only arrays refuse such memory,
or warn of it. They get a writable view, and the caller keeps it unwritten.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from mpimesh.arguments import as_function, as_real
from mpimesh.arrays import Array, HostArray, is_cupy
from mpimesh.arrays.dtypes import is_half
from mpimesh.errors import DTypeError, ModuleError, ShapeError
from mpimesh.nn import Module
from mpimesh.parallel.microbatch import Structure, Tree, flatten

__all__ = ["WrappedLoss", "gradients_like", "host_array", "plain_array"]


class WrappedLoss(ABC):
    """A loss of another library, a mean over what it counts; meets :class:`mpimesh.nn.Loss`."""

    def __init__(self, function: Callable[..., Any], count: Callable[[Any], float] | None) -> None:
        self._function = as_function(function, "what wrap_loss takes", ModuleError)
        self._count = count

    def __call__(self, y: Tree, target: Tree) -> float:
        """Return the mean over the rows.

        Raises:
            ShapeError: If there is nothing to take the mean of.
        """
        count = self.count(target)
        if not count:
            raise ShapeError(f"{self!r}: the mean over nothing does not exist")
        return self._compute(y, target, count, grad=False)[0]

    def value_and_grad(self, y: Tree, target: Tree, *, denominator: float) -> tuple[float, Tree]:
        """Return this part's share of the loss, and its gradient by `y`.

        Shapes:
            grad: built as `y`, of its shapes and dtypes; None for arrays that have no gradient.

        Raises:
            ModuleError: If `denominator` is not positive, or the loss is not one number.
        """
        whole = as_real(denominator, f"{self!r}: denominator", ModuleError, above=0)
        return self._compute(y, target, whole, grad=True)

    def count(self, target: Tree) -> float:
        """Return what `target` adds to the denominator of a batch in parts."""
        if self._count is not None:
            return float(self._count(target))
        return float(flatten(target, name="the target")[0][0].shape[0])

    @abstractmethod
    def _compute(
        self, y: Tree, target: Tree, denominator: float, *, grad: bool
    ) -> tuple[float, Tree]: ...

    def __repr__(self) -> str:
        name = getattr(self._function, "__name__", type(self._function).__name__)
        return f"{type(self).__name__}({name})"


def gradients_like(layer: Module, outputs: list[Any], form: Structure, dy: Tree) -> list[Array]:
    """Return the gradient, or None, of each array of a layer's output.

    Raises:
        ShapeError: If `dy` is built otherwise than the output, or one has another shape.
    """
    leaves = form.leaves_of(dy)
    if leaves is None:
        raise ShapeError(
            f"{layer!r}: the gradient must be built like the output, {form}, got "
            f"{type(dy).__name__}"
        )
    for output, leaf, path in zip(outputs, leaves, form.paths(), strict=True):
        if leaf is not None and tuple(leaf.shape) != tuple(output.shape):
            raise ShapeError(
                f"{layer!r}: the gradient of the output{path} must have its shape "
                f"{tuple(output.shape)}, got {tuple(leaf.shape)}"
            )
    return leaves


class _Memory:
    """The memory of an array, which lives as long as this does."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, owner: HostArray) -> None:
        interface: dict[str, Any] = dict(owner.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self.owner = owner


def host_array(x: Any) -> HostArray:
    """Return `x`, if it is an array of numbers in the host's memory; in the native byte order.

    Raises:
        ModuleError: If it is memory of a device.
        DTypeError: If it holds no numbers.
    """
    if is_cupy(x):
        raise ModuleError(
            "modules of other libraries compute on the host's memory, got an array of CuPy: make "
            "the model with xp=numpy"
        )
    array: HostArray = np.asarray(x)
    if array.dtype.kind not in "biufc" and not is_half(array.dtype):
        raise DTypeError(f"modules of other libraries take numbers, got dtype {array.dtype}")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def plain_array(x: Any) -> HostArray:
    """Return `x` as an array that any library takes: aligned, native, not marked as read-only.

    It is the same memory, unless that has strides or a byte order which others do not know.

    Raises:
        ModuleError: If it is memory of a device.
        DTypeError: If it holds no numbers.
    """
    array = host_array(x)
    odd = any(step < 0 or step % array.itemsize for step in array.strides)
    if odd or not array.flags.aligned:
        array = array.copy()
    return array if array.flags.writeable else np.asarray(_Memory(array))

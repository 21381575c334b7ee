"""The contract of a layer: its methods, the context that they save in, checks of its arguments.

Anything with the three methods of `SupportsLayer` is a layer: it may stand in a
`Sequential` or a pipeline stage. What else it has is used when it is there:

| it has | without it |
|---|---|
| ``backward_input``, ``backward_weight`` | `backward` runs for the first, nothing for the second |
| ``materialize(seed=, dtype=, xp=, index=)`` | its parameters are taken as they are |
| ``set_place(seed=, index=)`` | with values of its own it does not learn its place |
| ``num_layers`` | it takes one place in the numbering of layers |
| ``named_parameters()`` | its parameters are called ``param_0``, ``param_1``, ... |
| ``named_buffers()`` | it has no state beside its parameters |
| ``set_training(flag)`` | its mode does not change |
| ``set_part(part)`` | it treats each feature by itself, and gives those that it gets |

Only :class:`~mpimesh.nn.parameter.Parameter` objects belong into `parameters()`;
a layer without any returns an empty list. What a forward saves for its
backward belongs into the context (``ctx.save``, ``ctx.take``), not into the
layer, or the layer can serve one microbatch at a time only.

A layer may take or give a tuple, or a dict with text keys, of arrays, nested, instead of one array.
The gradient is built alike, with None in the place of an array whose dtype is not floating.

Behind a layer that is split by its outputs a rank has some of the features only, a
:class:`FeaturePart`, up to a layer that is split by its inputs. The layers between learn it by
`set_part`, which returns the features of their output.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, Protocol, TypeAlias, TypeGuard, TypeVar, runtime_checkable

import numpy as np

from mpimesh.arguments import as_flag, as_int
from mpimesh.arrays.dtypes import is_half
from mpimesh.arrays.namespace import Array, DType
from mpimesh.errors import DTypeError, ModuleError, ModuleStateError, ShapeError
from mpimesh.nn.parameter import FLOAT_NAMES, Buffer, Parameter, is_float_dtype

__all__ = [
    "Allocate",
    "Context",
    "FeaturePart",
    "SupportsLayer",
    "Visited",
    "backward_input",
    "backward_weight",
    "check_context",
    "check_extent",
    "check_features",
    "check_floats",
    "check_integers",
    "check_mask",
    "check_sequence",
    "first_outside",
    "has_gradient",
    "is_layer",
    "joined",
    "layer_advice",
    "loss_advice",
    "materialize",
    "named_buffers",
    "named_parameters",
    "num_layers",
    "parted",
    "set_part",
    "set_place",
    "set_training",
    "tensor_advice",
]

T = TypeVar("T")

Allocate: TypeAlias = "Callable[[tuple[int, ...], DType], Array | None]"
"""Returns memory for an array of a shape and dtype; None if it has none to give."""


class _Records:
    """The records of one layer. Holds the layer, so that its id stays its own."""

    __slots__ = ("deferred", "module", "saved")

    def __init__(self, module: object) -> None:
        self.module = module
        self.saved: list[tuple[Any, ...]] = []
        self.deferred: deque[tuple[Any, ...]] = deque()


class Context:
    """One microbatch's life through one stage: from its forward to its weight gradients.

    Any number of microbatches can be in flight through the same layer: each has a context, and they
    may finish in any order.

    Arrays are saved by reference. Until its backward is done, an array that went into or came out
    of a forward with this context must not be written to.

    A context may also have memory for the result of one layer where others are to read it:
    :meth:`empty` returns it to that layer, and None to all others.

    A layer's record passes two places in a context::

        forward --save--> saved --take--> backward_input --defer--> deferred
            --take_deferred--> backward_weight

    A layer that a model uses twice has two records. Backward runs through a model
    from its end, so `saved` gives the last record first; `deferred` gives the first
    one first, so that weight gradients are added in the same order, to the bit,
    whether they are computed at once or later.

    Attributes:
        step: Number of the training step; dropout draws other masks at each.
        first_row: Index, in the global batch, of the microbatch's first row.
        training: False makes dropout the identity while backward still works.

    Args:
        memory: Gives memory for the results of all layers, as :data:`Allocate` does; None has each
            layer take its own.

    Raises:
        ModuleError: If a number is negative.
    """

    __slots__ = ("_for", "_made", "_memory", "_records", "_room", "first_row", "step", "training")

    def __init__(
        self,
        *,
        step: int = 0,
        first_row: int = 0,
        training: bool = True,
        memory: Allocate | None = None,
    ) -> None:
        self.step = as_int(step, "step", ModuleError, least=0)
        self.first_row = as_int(first_row, "first_row", ModuleError, least=0)
        self.training = as_flag(training, "training", ModuleError)
        self._records: dict[int, _Records] = {}
        self._made: dict[int, tuple[object, object]] = {}
        self._for: object = None
        self._room: Allocate | None = None
        self._memory = memory

    def offer(self, module: object, room: Allocate | None) -> None:
        """Let :meth:`empty` give `module`, and no other layer, what `room` returns.

        Args:
            module: The layer whose result, or gradient, is to lie there.
            room: Returns an uninitialised array of a shape and dtype, or None.
        """
        self._for = module
        self._room = room

    def empty(self, module: object, shape: tuple[int, ...], dtype: DType) -> Array | None:
        """Return memory to write the result of `module` into; None if it is to take its own.

        A layer need not ask. One that does saves a copy of what a pipeline hands on, in forward
        and in backward, and gets memory that steps use again and again:
        ``np.add(a, b, out=ctx.empty(self, a.shape, a.dtype))``.
        """
        if self._for is module and self._room is not None:
            return self._room(shape, dtype)
        return None if self._memory is None else self._memory(shape, dtype)

    def once(self, source: object, make: Callable[[], T]) -> T:
        """Return what `make` gave when it was first called for this very `source`.

        For what several layers make of one and the same array that passes through them all. It is
        stored as long as the context, or up to :meth:`clear`.
        """
        # With the source itself, so that its id stays its own.
        if id(source) not in self._made:
            self._made[id(source)] = source, make()
        found: Any = self._made[id(source)][1]
        return found  # type: ignore[no-any-return]

    def save(self, module: object, *values: Any) -> None:
        """Keep `values` for the backward of `module`."""
        self._of(module).saved.append(values)

    def peek(self, module: object) -> tuple[Any, ...]:
        """Return what `take` would, and keep it.

        Raises:
            ModuleStateError: If nothing is saved, see `take`.
        """
        records = self._records.get(id(module))
        if records is None:
            raise ModuleStateError(
                f"{module!r}: backward needs what forward saved, but forward did not run with "
                f"{self!r}; call forward(x, ctx) with the same Context first"
            )
        if not records.saved:
            raise ModuleStateError(
                f"{module!r}: backward already ran for each forward with {self!r}; what forward "
                "saved is freed by it, so call forward(x, ctx) again first"
            )
        return records.saved[-1]

    def take(self, module: object) -> tuple[Any, ...]:
        """Give up and return the values that `module` saved last.

        Raises:
            ModuleStateError: If forward did not run with this context, or each
                of its runs had its backward.
        """
        values = self.peek(module)
        self._records[id(module)].saved.pop()
        return values

    def defer(self, module: object, *values: Any) -> None:
        """Keep `values` for the `backward_weight` of `module`."""
        self._of(module).deferred.append(values)

    def take_deferred(self, module: object) -> tuple[Any, ...]:
        """Give up and return the values that `module` deferred first.

        Raises:
            ModuleStateError: If `backward_input` did not run with this context,
                or each of its runs had its `backward_weight`.
        """
        records = self._records.get(id(module))
        if records is None or not records.deferred:
            raise ModuleStateError(
                f"{module!r}: backward_weight needs a backward_input before it with {self!r}, "
                "and each backward_input allows exactly one backward_weight"
            )
        return records.deferred.popleft()

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits: each forward had its backward, with weights."""
        return not any(records.saved or records.deferred for records in self._records.values())

    def clear(self) -> None:
        """Drop all records, for a microbatch whose backward will not run."""
        self._records.clear()
        self._made.clear()

    def drop(self, module: object) -> None:
        """Drop the records of `module`."""
        self._records.pop(id(module), None)

    def _of(self, module: object) -> _Records:
        records = self._records.get(id(module))
        if records is None:
            records = self._records[id(module)] = _Records(module)
        return records

    def __repr__(self) -> str:
        training = "" if self.training else ", training=False"
        return f"Context(step={self.step}, first_row={self.first_row}{training})"


@runtime_checkable
class SupportsLayer(Protocol):
    """The least that a layer is."""

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return the output. With a context, save in it what backward needs.

        Must not write into `x`: the layer before may need it again. May return
        `x` or a view of it.
        """
        ...

    def backward(self, dy: Array, ctx: Context) -> Array | None:
        """Add the parameters' gradients (`Parameter.accumulate`) and return the input's.

        `dy` has the shape and dtype of the output and must not be written to.
        None says that the input has no gradient, as with integers.
        """
        ...

    def parameters(self) -> Sequence[Parameter]:
        """Return the parameters, in an order that never changes."""
        ...


@dataclass(frozen=True, slots=True)
class FeaturePart:
    """Which places of the last axis of an array a rank has, where others have the others.

    Attributes:
        start: The first.
        stop: The one behind the last.
        extent: How many there are over all ranks.
    """

    start: int
    stop: int
    extent: int

    @property
    def size(self) -> int:
        """Number of elements that this rank has."""
        return self.stop - self.start


def has_gradient(dtype: DType) -> bool:
    """Tell whether an array of `dtype` between layers has a gradient: it is floating."""
    return dtype.kind in "fc" or is_half(dtype)


def is_layer(one: object) -> TypeGuard[SupportsLayer]:
    """Tell whether `one` has the methods of a layer. A class is none."""
    return not isinstance(one, type) and all(
        callable(getattr(one, name, None)) for name in ("forward", "backward", "parameters")
    )


def backward_input(layer: SupportsLayer, dy: Array, ctx: Context) -> Array | None:
    """Run the input's half of `layer`'s backward, or all of it where it has no halves."""
    half = getattr(layer, "backward_input", None)
    return layer.backward(dy, ctx) if half is None else half(dy, ctx)


def backward_weight(layer: SupportsLayer, ctx: Context) -> None:
    """Run the weights' half of `layer`'s backward, if it has halves."""
    half = getattr(layer, "backward_weight", None)
    if half is not None:
        half(ctx)


class Visited:
    """Layers and parameters that were visited before: the first place of each counts.

    Args:
        parameters: Those that keep the values that they have.
    """

    def __init__(self, parameters: Iterable[Parameter] = ()) -> None:
        # The objects themselves, too, so that no other one gets their ids.
        self._found: dict[int, object] = {}
        self.add(*parameters)

    def add(self, *objects: object) -> None:
        """Mark `objects` as visited."""
        self._found.update((id(one), one) for one in objects)

    def __contains__(self, one: object) -> bool:
        """Tell whether this very object was visited."""
        return id(one) in self._found


def materialize(
    layer: SupportsLayer,
    *,
    seed: int,
    dtype: Any,
    xp: ModuleType,
    index: int,
    visited: Visited | None = None,
) -> None:
    """Let `layer` allocate its parameters, if it knows how.

    Args:
        layer: The layer.
        seed: The seed of the whole model.
        dtype: Dtype of the parameters.
        xp: `numpy` or `cupy`.
        index: Number of layers before this one in the whole model.
        visited: Layers and parameters of the model before this one. Such parameters keep their
            values, and such a layer is left as it is; those of `layer` are added.
    """
    visited = Visited() if visited is None else visited
    if layer in visited:
        return
    earlier = [
        (parameter, parameter.data) for parameter in layer.parameters() if parameter in visited
    ]
    method = getattr(layer, "materialize", None)
    if method is not None:
        method(seed=seed, dtype=dtype, xp=xp, index=index)
    for parameter, data in earlier:
        parameter.data = data
    visited.add(layer, *(one for one in layer.parameters() if one.data is not None))


def set_place(layer: SupportsLayer, *, seed: int, index: int) -> None:
    """Tell `layer`, which keeps the values that it has, where it stands, if it wants to know.

    Args:
        layer: The layer.
        seed: The seed of the whole model.
        index: Number of layers before this one in the whole model.
    """
    method = getattr(layer, "set_place", None)
    if method is not None:
        method(seed=seed, index=index)


def set_part(layer: SupportsLayer, part: FeaturePart | None) -> FeaturePart | None:
    """Tell `layer` which features it gets, None for all; return which it gives.

    Raises:
        ModuleError: If it needs others.
    """
    method = getattr(layer, "set_part", None)
    if method is None:
        return part
    output: FeaturePart | None = method(part)
    return output


def num_layers(layer: SupportsLayer) -> int:
    """Return how many places `layer` takes in the numbering of layers."""
    return int(getattr(layer, "num_layers", 1))


def named_parameters(layer: SupportsLayer) -> list[tuple[str, Parameter]]:
    """Return `layer`'s parameters with names.

    Raises:
        ModuleError: If it gives something else.
    """
    method = getattr(layer, "named_parameters", None)
    if method is not None:
        named = list(method())
    else:
        named = [(f"param_{i}", one) for i, one in enumerate(layer.parameters())]
    for name, one in named:
        if not isinstance(one, Parameter):
            raise ModuleError(
                f"{layer!r} has forward, backward and parameters like a layer, but {name!r} is of "
                f"type {type(one).__name__}, no nn.Parameter. To keep something else than a layer, "
                "put it into a dict, or behind a function"
            )
    return named


def named_buffers(layer: SupportsLayer) -> list[tuple[str, Buffer]]:
    """Return with their names the arrays of `layer`'s state that are no parameters."""
    method = getattr(layer, "named_buffers", None)
    return [] if method is None else list(method())


def set_training(layer: SupportsLayer, training: bool) -> None:
    """Tell `layer` whether it is trained, if it wants to know."""
    method = getattr(layer, "set_training", None)
    if method is not None:
        method(training)


# -- checks of arguments ---------------------------------------------------------------------------


def check_context(layer: object, ctx: object) -> None:
    """Refuse a context that is none, such as a mask given beside `x`.

    Raises:
        ModuleError: If `ctx` is refused.
    """
    if ctx is not None and not isinstance(ctx, Context):
        raise ModuleError(
            f"{layer!r}: beside x a layer takes an nn.Context, or None for inference, got "
            f"{type(ctx).__name__}; a mask goes with x, in a tuple: (x, mask)"
        )


def check_floats(layer: object, x: Array, dtype: DType | None = None, *, name: str = "x") -> None:
    """Refuse an input that is no float array of rows, or not of the layer's dtype.

    Raises:
        DTypeError: If `x` is refused for its dtype.
        ShapeError: If it has no axis.
    """
    found = getattr(x, "dtype", None)
    # NumPy takes None for float64, also in a comparison.
    if found is None or not is_float_dtype(found):
        got = type(x).__name__ if found is None else found
        raise DTypeError(
            f"{layer!r}: {name} must be an array of {FLOAT_NAMES}, got {got}"
            f"{tensor_advice(name, x)}"
        )
    if not x.shape:
        raise ShapeError(f"{layer!r}: {name} must have rows, that is shape (rows, ...), got ()")
    if dtype is not None and found != dtype:
        raise DTypeError(
            f"{layer!r}: {name} must be {dtype} like the parameters, got {found}; "
            f"use {name}.astype('{dtype}'), or make the model with dtype='{found}'"
        )


def check_integers(layer: object, x: Array) -> None:
    """Refuse an input that is no array of integers.

    Raises:
        DTypeError: If `x` is refused.
    """
    dtype = getattr(x, "dtype", None)
    # A dtype of another library has no kind.
    if getattr(dtype, "kind", "") not in ("i", "u"):
        got = type(x).__name__ if dtype is None else dtype
        raise DTypeError(
            f"{layer!r}: x must be an array of integers, got {got}{tensor_advice('x', x)}"
        )


def check_features(layer: object, x: Array, features: int) -> None:
    """Refuse an input whose last axis is not `features` long.

    Raises:
        ShapeError: If `x` is refused.
    """
    if x.ndim == 0 or x.shape[-1] != features:
        raise ShapeError(f"{layer!r}: x must have shape (..., {features}), got {tuple(x.shape)}")


def check_extent(name: str, value: Any) -> int:
    """Return `value` as an int of at least 1.

    Raises:
        ModuleError: If it is none.
    """
    return as_int(value, name, ModuleError, least=1)


def first_outside(values: Array, wrong: Array) -> str:
    """Return text on the first of `values` where `wrong` holds, with its place."""
    flat = int(wrong.reshape(-1).argmax())
    place = tuple(int(i) for i in np.unravel_index(flat, values.shape))
    return f"{int(values.reshape(-1)[flat])} at {place}"


def parted(
    layer: object, x: Any, ctx: object = None, *, what: str = "x"
) -> tuple[Array, Array | None]:
    """Return the array and the mask of ``(array, mask)``, or an array alone and None.

    Args:
        layer: The layer, for messages.
        x: The argument.
        ctx: The second argument, which may be the mask by mistake.
        what: What `x` is called.

    Raises:
        ModuleError: If `x` is a tuple of something else, or `ctx` is no Context.
    """
    check_context(layer, ctx)
    if not isinstance(x, tuple):
        return x, None
    if len(x) != 2:
        raise ModuleError(
            f"{layer!r}: {what} must be an array, or the tuple (array, mask), got {len(x)} items"
        )
    return x


def joined(x: Array, mask: object) -> Any:
    """Return what goes on behind a layer: `x` with what stands for its mask, if it has one."""
    return x if mask is None else (x, mask)


def check_mask(mask: Array, shape: tuple[int, int]) -> None:
    """Refuse a mask that is not boolean or of another shape.

    Raises:
        ShapeError: If its shape differs.
        DTypeError: If it is not boolean.
    """
    if getattr(mask, "dtype", None) != np.dtype(bool):
        got = getattr(mask, "dtype", type(mask).__name__)
        raise DTypeError(
            "a mask must be a boolean array, True where there is a token, False where there is "
            f"padding, got {got}; use mask != 0 on one of numbers"
        )
    if tuple(mask.shape) != shape:
        raise ShapeError(f"the mask must have shape (batch, keys), {shape}, got {mask.shape}")


def check_sequence(layer: object, x: Array, mask: Array | None) -> None:
    """Refuse what is no batch of sequences of vectors, or a mask that is not its.

    Raises:
        ShapeError: If `x` is not of shape (batch, tokens, features), or the mask does not fit.
        DTypeError: If `x` is no float array, or the mask not boolean.
    """
    check_floats(layer, x)
    if x.ndim != 3:
        raise ShapeError(f"{layer!r}: x must have shape (batch, tokens, features), got {x.shape}")
    if mask is not None:
        check_mask(mask, tuple(x.shape[:2]))


def layer_advice(one: object) -> str:
    """Return what to do with a module that is no layer; nothing if it is not PyTorch's."""
    return _if_torch(one, "; for a module of PyTorch, use mpimesh.interop.torch.wrap")


def loss_advice(one: object) -> str:
    """Return what to do with a module that is no loss; nothing if it is not PyTorch's."""
    return _if_torch(one, "; for a loss of PyTorch, use mpimesh.interop.torch.wrap_loss") or (
        "; for a function of PyTorch's tensors, use mpimesh.interop.torch.wrap_loss"
        if isinstance(one, FunctionType) and "torch" in sys.modules
        else ""
    )


def tensor_advice(name: str, one: object) -> str:
    """Return what to do with the tensor called `name`; nothing if it is not PyTorch's."""
    return _if_torch(one, f"; for a tensor of PyTorch, use {name}.numpy()")


def _if_torch(one: object, advice: str) -> str:
    # Any class that PyTorch has made, or that derives from one; or a function or a class of its.
    return advice if any(_package(this) == "torch" for this in (one, *type(one).__mro__)) else ""


def _package(one: object) -> str:
    return str(getattr(one, "__module__", "")).partition(".")[0]

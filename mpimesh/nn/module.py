"""The base of mpimesh's layers: parameters, modes, and a backward in two halves.

Who writes a layer derives from `Module` (or writes any class that meets
:class:`~mpimesh.nn.protocol.SupportsLayer`) and gives it `forward` and one of

- `backward_input`, and `backward_weight` if it has parameters: then schedules
  that delay weight gradients can use it to the full;
- `backward` alone.

Rules of the two halves
1. `backward_input` computes the gradient of the input only, and keeps with
   ``ctx.defer`` just what `backward_weight` needs. `backward_weight` adds the
   parameters' gradients and frees that. `backward` is the one after the other,
   with the same bits.
2. A layer whose input has no gradient (`Embedding`: its input is integers)
   returns None. It must then be the first layer that has a trainable parameter.
3. All state of a microbatch is in its context, so that microbatches may be in
   flight together and finish in any order. Without a context (inference),
   nothing is saved.

Numbering. Every leaf layer, with parameters or not, takes one place in the
numbering that first values and dropout masks depend on; a container takes as
many as its layers together. A model cut into pipeline stages is materialised
stage by stage, each with ``index`` = the sum of `num_layers` of the stages before
it, which any rank computes without their memory; it gets the weights of the
uncut model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Self

import numpy as np

from mpimesh.arguments import as_flag, as_int, shape_of, shown
from mpimesh.arrays import DTypeLike, moved
from mpimesh.arrays.namespace import Array
from mpimesh.errors import DTypeError, ModuleError, ModuleStateError, ShapeError
from mpimesh.nn import protocol
from mpimesh.nn.parameter import (
    Buffer,
    Parameter,
    check_buffers,
    check_state,
    check_values,
    float_dtype,
    refuse_names,
)
from mpimesh.nn.protocol import Context, FeaturePart, SupportsLayer, check_context, is_layer
from mpimesh.nn.split import SequenceSplit

__all__ = ["Composite", "Module", "leaves", "stands_for"]


class Module(ABC):
    """A layer, or several under one name. ``module(x, ctx)`` is ``module.forward(x, ctx)``.

    Attributes that are a `Parameter`, a layer, or a list or tuple of layers are
    found by themselves, in the order in which they were set. Layers are modules
    and whatever else meets :class:`~mpimesh.nn.protocol.SupportsLayer`.

    Attributes:
        input_grad: Set it False on the first layer of a model to spare the
            gradient that is not read: where it costs something, `backward_input`
            then returns None.
        mixes_features: Whether a value of the result depends on several features
            of the input, so that the layer cannot do with a rank's part of them.
        sequence: How the sequences that it treats are split over ranks, if they are; see
            :meth:`set_sequence`.

    Example:
        >>> class Scale(nn.Module):
        ...     def __init__(self, features):
        ...         self.scale = nn.Parameter("scale", (features,), nn.Constant(1.0))
        ...
        ...     def forward(self, x, ctx=None):
        ...         if ctx is not None:
        ...             ctx.save(self, x)
        ...         return x * self.scale.value()
        ...
        ...     def backward(self, dy, ctx):
        ...         (x,) = ctx.take(self)
        ...         self.scale.accumulate((dy * x).sum(axis=0))
        ...         return dy * self.scale.value()
    """

    input_grad: bool = True
    mixes_features: bool = False
    _training: bool = True
    sequence: SequenceSplit | None = None
    _part: FeaturePart | None = None
    _buffers: tuple[str, ...] = ()  # names of attributes
    _place: tuple[int, int] | None = None  # the model's seed, and the layer's global index

    @abstractmethod
    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return the output for `x`; with a context, save what backward needs."""

    def backward_input(self, dy: Array, ctx: Context) -> Array | None:
        """Return the gradient of the input; keep what `backward_weight` needs.

        Shapes:
            dy: that of forward's output, and its dtype.
            result: that of forward's input, and its dtype; or None.

        Raises:
            ShapeError: If `dy` has another shape.
            DTypeError: If `dy` has another dtype.
            ModuleStateError: If forward did not run with `ctx`, or its backward
                ran already.
        """
        if type(self).backward is Module.backward:
            raise ModuleStateError(
                f"{type(self).__name__} has neither backward nor backward_input: define one"
            )
        return self.backward(dy, ctx)

    def backward_weight(self, ctx: Context) -> None:  # noqa: B027 - no parameters, nothing to do
        """Add the parameters' gradients and free what was saved for them.

        Raises:
            ModuleStateError: If a layer with parameters had no `backward_input`
                with `ctx`, or ran this already.
        """

    def backward(self, dy: Array, ctx: Context) -> Array | None:
        """Run both halves; see `backward_input` for shapes and errors."""
        dx = self.backward_input(dy, ctx)
        self.backward_weight(ctx)
        return dx

    def __call__(self, x: Array, ctx: Context | None = None) -> Array:
        """Run `forward`.

        Raises:
            ModuleError: If `ctx` is no Context.
        """
        check_context(self, ctx)
        return self.forward(x, ctx)

    # -- parameters -------------------------------------------------------------

    def named_children(self) -> list[tuple[str, SupportsLayer]]:
        """Return the layers directly under this one, with their names."""
        children: list[tuple[str, SupportsLayer]] = []
        for name, value in vars(self).items():
            if is_layer(value):
                children.append((name, value))
            elif isinstance(value, list | tuple):
                children += [
                    (f"{name}.{i}", item) for i, item in enumerate(value) if is_layer(item)
                ]
        return children

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        """Return all parameters as ("0.weight", parameter), each once, in a fixed order.

        Raises:
            ModuleError: If two parameters of one layer have the same name, or a layer within gives
                something else than parameters.
        """
        found: dict[int, tuple[str, Parameter]] = {}
        for parameter in self._own_parameters():
            found.setdefault(id(parameter), (parameter.name, parameter))
        for child_name, child in self.named_children():
            for name, parameter in protocol.named_parameters(child):
                found.setdefault(id(parameter), (f"{child_name}.{name}", parameter))
        return list(found.values())

    def register_buffer(self, name: str, array: Array) -> None:
        """Let attribute `name` be `array`, and belong to the layer's state, which is saved.

        For what forward keeps up to date and no optimizer changes, such as a running mean or a
        count. Write into the array, or put another one of its shape and dtype into the attribute.

        Args:
            name: The name of the attribute.
            array: Its first value, of NumPy or CuPy.

        Raises:
            ModuleError: If `name` is no name, or taken, or `array` is no array of numbers.
        """
        if not isinstance(name, str) or not name.isidentifier() or hasattr(self, name):
            raise ModuleError(f"a buffer needs the name of a new attribute, got {shown(name)}")
        dtype = getattr(array, "dtype", None)
        if not isinstance(dtype, np.dtype) or dtype.hasobject or not hasattr(array, "ndim"):
            raise ModuleError(f"buffer {name!r} must be an array of numbers, got {shown(array)}")
        setattr(self, name, array)
        self._buffers = (*self._buffers, name)

    def named_buffers(self) -> list[tuple[str, Buffer]]:
        """Return all buffers as ("0.mean", buffer), each once, in a fixed order.

        Raises:
            ModuleError: If a parameter of the same layer has the name of one.
        """
        found: dict[tuple[int, str], tuple[str, Buffer]] = {}
        for name in self._buffers:
            buffer = Buffer(self, name)
            found[buffer.key] = name, buffer
        if found and not {one.name for one in self._own_parameters()}.isdisjoint(self._buffers):
            raise ModuleError(f"{self!r} has a parameter and a buffer of one name")
        for child_name, child in self.named_children():
            for name, buffer in protocol.named_buffers(child):
                found.setdefault(buffer.key, (f"{child_name}.{name}", buffer))
        return list(found.values())

    def parameters(self) -> list[Parameter]:
        """Return all parameters in the order of `named_parameters`."""
        return [parameter for _, parameter in self.named_parameters()]

    def num_parameters(self) -> int:
        """Return the number of elements of all parameters."""
        return sum(parameter.size for parameter in self.parameters())

    def trainable_params_count(self) -> int:
        """Return the number of elements of all parameters that are not frozen."""
        return sum(parameter.size for parameter in self.parameters() if parameter.requires_grad)

    def frozen_parameters(self) -> list[Parameter]:
        """Return the parameters that are frozen."""
        return [parameter for parameter in self.parameters() if not parameter.requires_grad]

    def freeze(self) -> Self:
        """Freeze all parameters: no gradients, no updates. Returns the module."""
        for parameter in self.parameters():
            parameter.requires_grad = False
        return self

    def unfreeze(self) -> Self:
        """Undo `freeze` for all parameters. Returns the module."""
        for parameter in self.parameters():
            parameter.requires_grad = True
        return self

    # -- memory -----------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        """Number of places that this module takes in the numbering of layers."""
        children = self.named_children()
        own = 1 if self._own_parameters() or not children else 0
        return own + sum(protocol.num_layers(child) for _, child in children)

    def materialize(
        self, *, seed: int, dtype: DTypeLike = np.float32, xp: ModuleType = np, index: int = 0
    ) -> None:
        """Allocate the parameters and give them their first values.

        The values depend on `seed`, the layer's global index and the parameter's
        name only: they are the same on any mesh, and up to rounding in any dtype.
        A parameter that several layers share gets those of its first place, by its
        own initializer.

        Args:
            seed: The seed of the whole model, not negative.
            dtype: float16, float32, float64 or, with NumPy, bfloat16 (of the package ml_dtypes).
                The results of layers, and gradients, are of it, too. NumPy computes products of
                bfloat16 in float32, and rounds the results, at a speed near that of float32; of
                float16 it computes them element by element, tens of times slower.
            xp: `numpy` or `cupy`, whose memory to use.
            index: Number of layers (see `num_layers`) that stand before this one
                in the whole model.

        Raises:
            DTypeError: If `dtype` is another one, or CuPy's memory is to hold bfloat16.
            ModuleError: If `seed` or `index` is negative.
        """
        dtype = float_dtype(dtype, xp=xp)
        seed, index = (
            as_int(seed, "seed", ModuleError, least=0),
            as_int(index, "index", ModuleError, least=0),
        )
        if not hasattr(xp, "asarray"):
            raise ModuleError(f"xp must be numpy or cupy, got {shown(xp)}")
        own = self._own_parameters()
        for parameter in own:
            parameter.materialize(seed=seed, dtype=dtype, xp=xp, index=index)
        for name in self._buffers:
            setattr(self, name, moved(Buffer(self, name).value(), xp))
        visited = protocol.Visited(own)
        for child, place in self._numbered_children(index):
            protocol.materialize(child, seed=seed, dtype=dtype, xp=xp, index=place, visited=visited)
        self._place = (seed, index)

    def set_place(self, *, seed: int, index: int) -> None:
        """Tell all layers under this one their `seed` and place, that of the first being `index`.

        :meth:`materialize` does so, too; a model calls this for layers that keep their values.
        """
        for child, place in self._numbered_children(index):
            protocol.set_place(child, seed=seed, index=place)
        self._place = (seed, index)

    def set_part(self, part: FeaturePart | None) -> FeaturePart | None:
        """Tell the layer which features of its input this rank has; return which it gives.

        A :class:`Sequential` tells its layers, and a model those of all its stages. A layer that
        works on each feature by itself has nothing to do. One whose result has other features
        than its input defines this, to return which, None for all.

        Args:
            part: The features, None for all.

        Raises:
            ModuleError: If the layer needs all of them.
        """
        if part is not None and self.mixes_features:
            raise ModuleError(
                f"{self!r} needs all {part.extent} features, but stands where this rank has "
                f"{part.start} to {part.stop} of them: put it behind the RowParallelLinear, or use "
                "ColumnParallelLinear(..., gather_output=True)"
            )
        return part

    def set_sequence(self, sequence: SequenceSplit) -> Self:
        """Treat this rank's places of split sequences from now on; returns the module. Local.

        For a layer that treats each place by itself, before it has memory. All parameters under it
        become such whose gradients are summed over the ranks.

        Args:
            sequence: How sequences are split.

        Raises:
            ModuleError: If a parameter has memory, or is split already.
        """
        for parameter in self._own_parameters():
            if parameter.data is not None or parameter.layout is not None:
                raise ModuleError(
                    f"{self!r}: parameter {parameter.name!r} has memory, or is split; "
                    "set_sequence comes before materialize, once"
                )
            sequence.ranks.lay(parameter, None)
        for _, child in self.named_children():
            if isinstance(child, Module):
                child.set_sequence(sequence)
        self.sequence = sequence
        return self

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters."""
        for parameter in self.parameters():
            parameter.zero_grad()

    def state_dict(self) -> dict[str, Array]:
        """Return copies of the values of parameters and buffers, by name.

        What happens to the module later does not change them, nor the other way round. Where there
        is no room for copies, :func:`mpimesh.save` needs none, and ``parameter.value()`` is the
        memory itself.

        Raises:
            ModuleStateError: If a parameter has no memory yet.
        """
        values = {name: parameter.value() for name, parameter in self.named_parameters()}
        values |= {name: buffer.value() for name, buffer in self.named_buffers()}
        return {name: array.copy() for name, array in values.items()}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Copy values into the memory of parameters and buffers; all or, on an error, none.

        Shapes:
            state[name]: that of the parameter or buffer; rounded to its dtype.

        Raises:
            ModuleError: If names are missing or unknown.
            ShapeError: If a shape differs.
            DTypeError: If values are no numbers, or of a buffer of another kind.
            ModuleStateError: If a parameter has no memory yet.
        """
        check_state(state)
        named, buffers = dict(self.named_parameters()), dict(self.named_buffers())
        known = {**named, **buffers}
        refuse_names(
            "a state must name each parameter and each buffer once",
            known.keys() - state.keys(),
            state.keys() - known.keys(),
            buffers,
            "",
        )
        for data, values in [*check_values(named, state), *check_buffers(buffers, state)]:
            data[...] = values

    # -- modes ------------------------------------------------------------------

    def is_training(self) -> bool:
        """Tell whether the module is in training mode, as it is at first."""
        return self._training

    def set_training(self, training: bool) -> None:
        """Choose training or evaluation for this module and all under it."""
        self._training = as_flag(training, "training", ModuleError)
        for _, child in self.named_children():
            protocol.set_training(child, self._training)

    def train(self) -> Self:
        """Choose training; returns the module."""
        self.set_training(True)
        return self

    def eval(self) -> Self:
        """Choose evaluation: dropout is the identity. Returns the module."""
        self.set_training(False)
        return self

    # -- for layers -------------------------------------------------------------

    def _own_parameters(self) -> list[Parameter]:
        own = [value for value in vars(self).values() if isinstance(value, Parameter)]
        names = [parameter.name for parameter in own]
        if len(set(names)) < len(names):
            raise ModuleError(f"{type(self).__name__} has two parameters of one name: {names}")
        return own

    def _numbered_children(self, index: int) -> Iterator[tuple[SupportsLayer, int]]:
        """Yield the layers directly under this one, which stands at `index`, and their indices."""
        children = self.named_children()
        index += 1 if self._own_parameters() or not children else 0
        for _, child in children:
            yield child, index
            index += protocol.num_layers(child)

    def _save(self, ctx: Context | None, y: Array, *values: Any) -> Array:
        """Return the output `y`, for whose backward a context, if there is one, saves `values`."""
        if ctx is not None:
            ctx.save(self, y.shape, y.dtype, *values)
        return y

    def _take(self, dy: Array, ctx: Context | None) -> tuple[Any, ...]:
        """Take what :meth:`_save` saved, if `dy` fits the output.

        Returns the values. On an error everything stays saved.
        """
        ctx = self._context(ctx)
        shape, dtype, *values = ctx.peek(self)
        found = shape_of(dy)
        if found != shape:
            raise ShapeError(
                f"{self!r}: dy, the gradient of the output, must have its shape {shape}, "
                f"got {shown(dy) if found is None else found}; the backward of the layer behind "
                "it returns the gradient of its x, of the shape of x"
            )
        if dy.dtype != dtype:
            raise DTypeError(
                f"{self!r}: dy, the gradient of the output, must be {dtype} like it, got "
                f"{dy.dtype}; use dy.astype('{dtype}')"
            )
        ctx.take(self)
        return tuple(values)

    def _context(self, ctx: Context | None) -> Context:
        """Return the context that backward got, if it is one."""
        if not isinstance(ctx, Context):
            raise ModuleStateError(
                f"{self!r}: backward needs the Context of its forward as ctx, got {shown(ctx)}"
            )
        return ctx

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def leaves(layer: Any) -> Iterator[Any]:
    """Yield `layer` and all below it, each as often as it stands there."""
    yield layer
    if isinstance(layer, Module):
        for _, child in layer.named_children():
            yield from leaves(child)


class Composite(Module):
    """A layer whose parameters are those of the layers that are its attributes.

    These may be replaced before the first use by others that do the same, such as layers that
    are split over ranks.
    """

    mixes_features = True

    def backward_weight(self, ctx: Context) -> None:
        """Run the `backward_weight` of the layers within, from last to first."""
        for _, child in reversed(self.named_children()):
            protocol.backward_weight(child, ctx)

    def _back(self, layer: protocol.SupportsLayer, dy: Array, ctx: Context) -> Array:
        """Run the input's half of the backward of a layer within.

        Raises:
            ModuleStateError: If it gives no gradient.
        """
        dx = protocol.backward_input(layer, dy, ctx)
        if dx is None:
            raise ModuleStateError(
                f"{layer!r} gives no gradient for its input, which {self!r} needs: leave its "
                "input_grad at True"
            )
        return dx


def stands_for(name: str) -> str:
    """Say what stands for a name of another library that this room has not."""
    ours = {"CrossEntropyLoss": "CrossEntropy", "MSELoss": "MeanSquaredError"}.get(name)
    if ours is not None:
        return f"it is nn.{ours} here"
    return (
        "layers of PyTorch and JAX are wrapped by mpimesh.interop.torch and .jax, and "
        "docs/how-to/own-layers.md says how to write one"
    )

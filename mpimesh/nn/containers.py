"""Layers made of layers: in sequence, checkpointed; and layers that merge arrays."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Self, TypeGuard

import numpy as np

from mpimesh.arrays import DTypeLike
from mpimesh.arrays.dtypes import sum_dtype
from mpimesh.arrays.namespace import Array, DType, namespace
from mpimesh.errors import DTypeError, ModuleError, ModuleStateError, ShapeError
from mpimesh.nn import protocol
from mpimesh.nn.module import Module
from mpimesh.nn.parameter import Buffer, Parameter, is_float_dtype
from mpimesh.nn.protocol import (
    Context,
    FeaturePart,
    SupportsLayer,
    check_context,
    check_sequence,
    is_layer,
    layer_advice,
    parted,
)
from mpimesh.nn.recompute import state_before, with_state

__all__ = ["Add", "Checkpoint", "Concat", "MeanPool", "Sequential", "is_plain"]


class Sequential(Module):
    """Layers in order, each fed with the output of the one before; without layers, the identity.

    ``Sequential(a, b)`` and ``Sequential([a, b])`` are the same. Any
    :class:`~mpimesh.nn.protocol.SupportsLayer` may stand in it.

    In the numbering of layers it takes no place itself: ``Sequential(a, b, c)``
    materialised at index 0 has the weights of `a`, `b` and `c` materialised on
    three pipeline stages at 0, ``a.num_layers`` and ``a.num_layers + b.num_layers``.

    Attributes:
        before: Called with each layer before it runs, and whether it runs backward; None calls
            nothing. Training that has a layer's values only while it runs brings them so.

    Raises:
        ModuleError: If something given is no layer.
    """

    def __init__(self, *layers: SupportsLayer | Iterable[SupportsLayer]) -> None:
        self._layers: list[SupportsLayer] = []
        self.before: Callable[[SupportsLayer, bool], None] | None = None
        for layer in layers:
            for one in layer if isinstance(layer, list | tuple) else (layer,):
                self.append(one)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, without the hook."""
        return {**self.__dict__, "before": None}

    def append(self, layer: SupportsLayer) -> Self:
        """Add `layer` at the end and return the module, so that calls can be chained.

        Raises:
            ModuleError: If `layer` lacks forward, backward or parameters.
        """
        if not is_layer(layer):
            got = layer.__name__ + " (a class, not an object)" if isinstance(layer, type) else layer
            raise ModuleError(
                f"a layer has methods forward, backward and parameters, got {got}"
                f"{layer_advice(layer)}"
            )
        self._layers.append(layer)
        return self

    @property
    def layers(self) -> Sequence[SupportsLayer]:
        """The layers, in order."""
        return tuple(self._layers)

    def named_children(self) -> list[tuple[str, SupportsLayer]]:
        """Return the layers, called "0", "1", ..."""
        return [(str(i), layer) for i, layer in enumerate(self._layers)]

    @property
    def num_layers(self) -> int:
        """The places of all layers together; none if there are no layers."""
        return sum(protocol.num_layers(layer) for layer in self._layers)

    def materialize(
        self, *, seed: int, dtype: DTypeLike = np.float32, xp: ModuleType = np, index: int = 0
    ) -> None:
        """Give all layers memory and tell them where they stand; see :meth:`Module.materialize`.

        Raises:
            DTypeError: If `dtype` is not a float one.
            ModuleError: If `seed` or `index` is negative, or a layer needs features that this rank
                has not.
        """
        super().materialize(seed=seed, dtype=dtype, xp=xp, index=index)
        self.set_part(self._part)

    def set_place(self, *, seed: int, index: int) -> None:
        """As :meth:`Module.set_place`, and raises as :meth:`set_part`."""
        super().set_place(seed=seed, index=index)
        self.set_part(self._part)

    def set_part(self, part: FeaturePart | None) -> FeaturePart | None:
        """Tell each layer which features it gets from the one before; return the last one's.

        Raises:
            ModuleError: If a layer needs others, or one that stands twice would get some here and
                others there.
        """
        self._part = part
        parts: dict[int, FeaturePart | None] = {}
        for layer in self._layers:
            keeps = "_part" in getattr(layer, "__dict__", ())
            if keeps and parts.get(id(layer), part) != part:
                raise ModuleError(
                    f"{layer!r} stands where this rank has all features and where it has some, and "
                    "cannot serve both: give each place a layer of its own"
                )
            parts[id(layer)] = part
            part = protocol.set_part(layer, part)
        return part

    @property
    def input_grad(self) -> bool:
        """Whether the first layer returns the gradient of its input; set it for a first stage."""
        return getattr(self._layers[0], "input_grad", True) if self._layers else True

    @input_grad.setter
    def input_grad(self, wanted: bool) -> None:
        # A backward of its own may read what the first layer returns.
        if is_plain(self) and self._layers and isinstance(self._layers[0], Module):
            self._layers[0].input_grad = wanted

    def forward(self, x: Array, ctx: Context | None = None) -> Array:
        """Return the output of the last layer.

        Raises:
            ModuleError: If `ctx` is no Context.
        """
        check_context(self, ctx)
        before = self.before
        for layer in self._layers:
            if before is not None:
                before(layer, False)
            x = layer.forward(x, ctx)
        return x

    def backward_input(self, dy: Array, ctx: Context) -> Array | None:
        """Run the layers' `backward_input` from last to first.

        Raises:
            ModuleStateError: If a layer returns no gradient while a layer before
                it has parameters to train.
        """
        return self._run_back(protocol.backward_input, dy, ctx)

    def backward_weight(self, ctx: Context) -> None:
        """Run the layers' `backward_weight` from last to first, as `backward` does."""
        for layer in reversed(self._layers):
            if self.before is not None:
                self.before(layer, True)
            protocol.backward_weight(layer, ctx)

    def backward(self, dy: Array, ctx: Context) -> Array | None:
        """Run the layers' `backward` from last to first.

        The gradients have the bits of the two halves one after the other, but
        the last layer's are ready, and its memory is free, before the first
        layer's turn.
        """
        return self._run_back(lambda layer, dx, ctx: layer.backward(dx, ctx), dy, ctx)

    def _run_back(
        self,
        back: Callable[[SupportsLayer, Array, Context], Array | None],
        dy: Array,
        ctx: Context,
    ) -> Array | None:
        """Run `back` of the layers from last to first, up to one whose input has no gradient."""
        dx: Array | None = dy
        left = list(self._layers)
        while left and dx is not None:
            layer = left.pop()
            if self.before is not None:
                self.before(layer, True)
            dx = back(layer, dx, ctx)
        if dx is None:
            for before in left:
                if before.parameters():
                    raise ModuleStateError(
                        f"{layer!r} gives no gradient for its input, so {before!r} before it would "
                        "never be trained: put it after that layer"
                    )
            for before in left:  # whose backward will not run
                _drop(before, ctx)
        return dx

    def __len__(self) -> int:
        return len(self._layers)

    # Any, as a layer has more than SupportsLayer says: `model[0].weight` is to type-check.

    def __iter__(self) -> Iterator[Any]:
        return iter(self._layers)

    def __getitem__(self, place: int) -> Any:
        return self._layers[place]

    def __repr__(self) -> str:
        return f"Sequential({', '.join(map(repr, self._layers))})"


_METHODS = ("forward", "backward", "backward_input", "backward_weight")


def is_plain(layer: object) -> TypeGuard[Sequential]:
    """Tell whether a layer is a Sequential that runs its layers as that class does."""
    return isinstance(layer, Sequential) and not any(
        name in vars(layer) or getattr(type(layer), name) is not getattr(Sequential, name)
        for name in _METHODS
    )


def _drop(layer: SupportsLayer, ctx: Context) -> None:
    ctx.drop(layer)
    if isinstance(layer, Module):
        for _, child in layer.named_children():
            _drop(child, ctx)


class Checkpoint(Module):
    """A layer of which forward keeps its input only; backward runs forward again.

    In a pipeline that is part of the action that computes the input's gradient, ``B`` or ``I``;
    between the two halves of a backward what the weights' half needs is saved, as without. What a
    layer draws depends on the context and on its place in the model, so the second forward gives
    the bits of the first, and so do the gradients. Collectives of split layers run again, too, on
    all ranks alike. What forward changes in attributes of layers and modules of PyTorch, such as
    BatchNorm's statistics, counters and generators of their own, it changes once: the second run
    begins with numbers, arrays, generators, and containers of these as the first one did, and
    leaves them as they are by then. What lies elsewhere, as in globals, sees both.

    Names of parameters, states, numbers of layers and first values are those of the layer.

    Shapes:
        x, result: those of the layer.

    Cost:
        A second forward. While a microbatch is in flight its input is saved, with copies of such
        arrays, and in its backward
        what forward of this one layer keeps: a model of n layers, each in a Checkpoint, keeps n
        inputs and one layer's activations.

    Args:
        layer: A layer, or several in a :class:`Sequential`. One that draws from a generator that is
            not its own, such as that of ``np.random``, would draw others in backward. Neither its
            mode nor its values may change between forward and backward.

    Raises:
        ModuleError: If `layer` lacks forward, backward or parameters.

    Example:
        >>> blocks = [nn.Checkpoint(nn.GptBlock(16, 2)) for _ in range(4)]
        >>> model = nn.Sequential(nn.Embedding(256, 16), *blocks, nn.Linear(16, 256))
        >>> model.named_parameters()[1][0]
        '1.attention_norm.weight'
    """

    def __init__(self, layer: SupportsLayer) -> None:
        if not is_layer(layer):
            raise ModuleError(
                f"layer must have methods forward, backward and parameters, got {layer!r}"
                f"{layer_advice(layer)}"
            )
        self.layer = layer

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        """Return the layer's parameters, under its names."""
        return protocol.named_parameters(self.layer)

    def named_buffers(self) -> list[tuple[str, Buffer]]:
        """Return the layer's buffers, under its names."""
        return protocol.named_buffers(self.layer)

    def set_part(self, part: FeaturePart | None) -> FeaturePart | None:
        """Tell the layer which features it gets; see `Module.set_part`."""
        self._part = part
        return protocol.set_part(self.layer, part)

    @property
    def input_grad(self) -> bool:
        """True if the layer returns the gradient of its input; set it for a first layer."""
        return getattr(self.layer, "input_grad", True)

    @input_grad.setter
    def input_grad(self, wanted: bool) -> None:
        if isinstance(self.layer, Module):
            self.layer.input_grad = wanted

    def forward(self, x: Any, ctx: Context | None = None) -> Any:
        """Return the layer's output; with a context, save `x` in it.

        Raises:
            ModuleError: If `ctx` is no Context; and whatever the layer raises.
        """
        check_context(self, ctx)
        if ctx is None:
            return self.layer.forward(x)
        inner = _Forgetful(step=ctx.step, first_row=ctx.first_row, training=ctx.training)
        inner.offer(self.layer, partial(ctx.empty, self))
        before = state_before(self.layer)
        y = self.layer.forward(x, inner)
        ctx.save(self, x, before)
        return y

    def backward_input(self, dy: Any, ctx: Context) -> Any:
        """Run the layer's forward again, and the input's half of its backward."""
        inner = self._again(ctx)
        dx = protocol.backward_input(self.layer, dy, inner)
        ctx.take(self)
        ctx.defer(self, inner)
        return dx

    def backward_weight(self, ctx: Context) -> None:
        """Run the weights' half of the layer's backward."""
        (inner,) = ctx.take_deferred(self)
        protocol.backward_weight(self.layer, inner)

    def backward(self, dy: Any, ctx: Context) -> Any:
        """Run the layer's forward again, and its backward."""
        dx = self.layer.backward(dy, self._again(ctx))
        ctx.take(self)
        return dx

    def _again(self, ctx: Context) -> Context:
        """Return a context of the microbatch with what forward saves in it."""
        x, before = self._context(ctx).peek(self)
        inner = Context(step=ctx.step, first_row=ctx.first_row, training=ctx.training)
        with with_state(before):
            self.layer.forward(x, inner)
        inner.offer(self.layer, partial(ctx.empty, self))  # room for the gradient, not for y
        return inner

    def __repr__(self) -> str:
        return f"Checkpoint({self.layer!r})"


class _Forgetful(Context):
    """A context that keeps nothing for backward."""

    __slots__ = ()

    def save(self, module: object, *values: Array) -> None:
        """Let go of `values`."""


class _Merge(Module):
    """The base of both: the arrays are of one float dtype, or become so, and have no gradient."""

    def forward(self, x: tuple[Array, ...], ctx: Context | None = None) -> Array:
        """Return the arrays as one."""
        if not isinstance(x, tuple) or not x or not all(hasattr(one, "shape") for one in x):
            raise ModuleError(f"{self!r}: x must be a tuple of arrays, got {_kinds(x)}")
        floats = sorted({str(one.dtype) for one in x if _is_float(one)})
        if len(floats) != 1:
            raise DTypeError(
                f"{self!r}: the arrays must be of one float dtype, beside integers and booleans, "
                f"got {', '.join(str(one.dtype) for one in x)}"
            )
        dtype: DType = next(one.dtype for one in x if _is_float(one))
        y = self._merged(tuple(one.astype(dtype, copy=False) for one in x))
        return self._save(ctx, y, [(_is_float(one), tuple(one.shape)) for one in x])

    def backward_input(self, dy: Array, ctx: Context) -> tuple[Array | None, ...]:
        """Return each array's gradient; None for integers and booleans."""
        (saved,) = self._take(dy, ctx)
        parts = self._split(dy, [shape for _, shape in saved])
        return tuple(
            part if floating else None for part, (floating, _) in zip(parts, saved, strict=True)
        )

    @abstractmethod
    def _merged(self, x: tuple[Array, ...]) -> Array: ...

    @abstractmethod
    def _split(self, dy: Array, shapes: list[tuple[int, ...]]) -> list[Array]: ...


class Concat(_Merge):
    """The arrays of a tuple one after the other along an axis.

    Shapes:
        x[i]: (rows, ...), the same but along `axis`. Integers and booleans take the dtype of
            the others, which are floats of one dtype.
        result: (rows, ...).

    Args:
        axis: The axis; not 0, that of the rows.

    Raises:
        ModuleError: If `axis` is 0 or no whole number.

    Example:
        >>> y = nn.Concat()((np.ones((2, 3)), np.zeros((2, 1))))
        >>> y.shape
        (2, 4)
    """

    def __init__(self, axis: int = -1) -> None:
        if not isinstance(axis, int) or axis == 0:
            raise ModuleError(f"axis must be a whole number other than 0, the rows, got {axis!r}")
        self.axis = axis

    def _merged(self, x: tuple[Array, ...]) -> Array:
        shapes = [tuple(one.shape) for one in x]
        ndim = len(shapes[0])
        if not -ndim < self.axis < ndim:
            raise ShapeError(f"{self!r}: the arrays need that axis after the rows, got {shapes}")
        place = self.axis % ndim
        if len({(len(shape), shape[:place], shape[place + 1 :]) for shape in shapes}) > 1:
            raise ShapeError(f"{self!r}: the arrays may differ along that axis only, got {shapes}")
        return namespace(x[0]).concatenate(x, axis=place)

    def _split(self, dy: Array, shapes: list[tuple[int, ...]]) -> list[Array]:
        ends: list[int] = []
        for shape in shapes[:-1]:
            ends.append((ends[-1] if ends else 0) + shape[self.axis])
        parts: list[Array] = namespace(dy).split(dy, ends, axis=self.axis)
        return parts

    def __repr__(self) -> str:
        return f"Concat(axis={self.axis})"


class Add(_Merge):
    """The sum of the arrays of a tuple, from first to last.

    Shapes:
        x[i], result: the same; nothing is broadcast. Integers and booleans take the dtype of the
            others, which are floats of one dtype.

    Example:
        >>> nn.Add()((np.ones(2), np.array([1, 2])))
        array([2., 3.])
    """

    def _merged(self, x: tuple[Array, ...]) -> Array:
        shapes = [tuple(one.shape) for one in x]
        if len(set(shapes)) > 1:
            raise ShapeError(f"{self!r}: the arrays must have the same shape, got {shapes}")
        y = x[0].copy()
        for one in x[1:]:
            y += one
        return y

    def _split(self, dy: Array, shapes: list[tuple[int, ...]]) -> list[Array]:
        return [dy] * len(shapes)


class MeanPool(Module):
    """The mean of a sequence's vectors, without those of padding; 0 where there is no token.

    Shapes:
        x: (batch, tokens, features), or that and a mask of shape (batch, tokens), True where
            there is a token, in a tuple.
        result: (batch, features).

    Cost:
        Saves the mask.
    """

    def forward(self, x: Any, ctx: Context | None = None) -> Array:
        """Return the means.

        Raises:
            ShapeError: If `x` has another shape, or the mask does not fit it.
            DTypeError: If `x` is no float array, or the mask not boolean.
            ModuleError: If `x` is a tuple of something else.
        """
        x, mask = parted(self, x, ctx)
        check_sequence(self, x, mask)
        share = self._share(x.shape, mask, sum_dtype(x.dtype), namespace(x))
        y = (x * share[..., None]).sum(axis=1, dtype=share.dtype).astype(x.dtype, copy=False)
        return self._save(ctx, y, share, mask is not None)

    def backward_input(self, dy: Array, ctx: Context) -> Any:
        """Return to each token its share of `dy`; with a mask, a tuple of that and None."""
        share, masked = self._take(dy, ctx)
        dx = (share[..., None] * dy[:, None]).astype(dy.dtype, copy=False)
        return (dx, None) if masked else dx

    @staticmethod
    def _share(shape: tuple[int, ...], mask: Array | None, wide: Any, xp: Any) -> Array:
        """Return what each token's vector counts in the mean: (batch, tokens)."""
        if mask is None:
            return xp.full(shape[:2], 1.0 / max(shape[1], 1), wide)
        share = mask.astype(wide)
        share /= xp.maximum(share.sum(axis=1, keepdims=True), wide.type(1))
        return share


def _is_float(x: Array) -> bool:
    return is_float_dtype(x.dtype)


def _kinds(x: Any) -> str:
    """Return what was given instead of a tuple of arrays."""
    if not isinstance(x, tuple):
        return type(x).__name__
    return f"({', '.join(type(one).__name__ for one in x)})"

"""Functions of JAX in models of mpimesh: trained over MPI, without JAX's own distribution.

::

    from mpimesh.interop import jax as mj

    def dense(params, x):
        return jax.nn.relu(x @ params["w"] + params["b"])

    layer = mj.wrap(dense, {"w": w, "b": b})
    model = mm.DataParallel(layer, mesh, loss=mj.wrap_loss(mean_squared_error))
    optimizer = mm.optim.AdamW(model.parameters())
    model.train_step(x, target, optimizer=optimizer)

Importing this module imports JAX; without it, that raises
:class:`~mpimesh.errors.MissingPackageError`.

**Memory.** JAX's arrays cannot be changed, so the parameters are copies in memory of NumPy, which
optimizers of :mod:`mpimesh.optim` change in place; the compiled functions read them there.
:attr:`JaxLayer.params` gives them as the tree that `wrap` was given. Gradients are added into the
buckets when the backward of the whole layer has ended: the finer the layers, the more of their
sums is hidden.

**Compilation.** Forward and backward are compiled once for each shape of a microbatch: take
microbatches of even length.

**float64** is JAX's affair: without ``jax_enable_x64`` it computes in float32, and parameters that
are given as float64 are kept in float32.

**Threads.** Ranks of a node share its cores, and JAX takes them all for each rank. With
``XLA_FLAGS=--xla_cpu_multi_thread_eigen=false`` in the environment, before JAX starts, a rank
computes in one thread.

**Random numbers.** With ``key=True`` the function gets a third argument in training: a key that
depends on the model's seed, the layer's place, the step and the first row of the microbatch. In
inference it gets None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from mpimesh.arrays import Array, HostArray
from mpimesh.arrays.random_bits import key_of
from mpimesh.errors import (
    DTypeError,
    MissingPackageError,
    ModuleError,
    ModuleStateError,
)
from mpimesh.interop.wrapped import WrappedLoss, gradients_like, host_array
from mpimesh.nn import Constant, Context, Module, Parameter
from mpimesh.nn.protocol import has_gradient
from mpimesh.parallel.microbatch import Tree, flatten, tree_map

__all__ = ["JaxLayer", "JaxLoss", "wrap", "wrap_loss"]


try:
    import jax
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise MissingPackageError(
        "mpimesh.interop.jax needs JAX, which is not installed: pip install jax"
    ) from None


class JaxLayer(Module):
    """A function of parameters and an input among the layers of a model; `wrap` makes it.

    Forward is `jax.vjp`, backward what that returns, both compiled: `jax.vjp` gives a function that
    is a tree of arrays, which a compiled forward can return. The arrays are what the microbatch
    saves, and the function's code is compiled once for each shape of input, too.

    The parameters are mpimesh's, in memory of NumPy, named by their places in `params`.
    """

    def __init__(self, function: Callable[..., Any], params: Any, *, key: bool = False) -> None:
        if not callable(function):
            raise ModuleError(f"wrap takes a function of parameters and an input, got {function!r}")
        try:
            hash(function)
        except TypeError:
            raise ModuleError(
                f"compiled code is found again by its function, and {function!r} cannot be hashed: "
                "wrap a function that calls it"
            ) from None
        self.function = function
        self._takes_key = bool(key)
        self._place: tuple[int, int] = (0, 0)
        self._init = params if callable(params) else None
        known = jax.eval_shape(params, jax.random.key(0)) if callable(params) else params
        paths, self._tree = jax.tree_util.tree_flatten_with_path(
            known, is_leaf=lambda one: isinstance(one, Parameter)
        )
        self._leaves = [_leaf(_name(path), leaf) for path, leaf in paths]
        if self._leaves and not self.named_parameters():
            dtypes = ", ".join(f"{name!r} of {leaf.dtype}" for name, leaf in self._leaves)
            raise DTypeError(
                f"nothing in params would be trained, as none of it has a float dtype: {dtypes}; "
                "use .astype('float32') for what is to be trained, and keep constants in the "
                "function"
            )

    # -- parameters --------------------------------------------------------------------------

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        """Return the parameters, each once, in the order of JAX."""
        found: dict[int, tuple[str, Parameter]] = {}
        for name, leaf in self._leaves:
            if isinstance(leaf, Parameter):
                found.setdefault(id(leaf), (name, leaf))
        return list(found.values())

    def materialize(
        self, *, seed: int, dtype: Any = np.float32, xp: ModuleType = np, index: int = 0
    ) -> None:
        """Give memory and first values to parameters that have none, by the function for that.

        It draws by `seed` and `index` alone; its dtypes are kept, whatever `dtype` says.

        Raises:
            ModuleError: If `xp` is not NumPy.
        """
        if xp is not np:
            raise ModuleError(
                f"{self!r} computes on the host's memory: make the model with xp=numpy"
            )
        self.set_place(seed=seed, index=index)
        if self._init is None:
            return
        values = jax.tree_util.tree_leaves(_INIT(self._init, _words(seed, index)))
        for (_, leaf), value in zip(self._leaves, values, strict=True):
            if isinstance(leaf, Parameter):
                leaf.data = np.array(value)
                leaf.detach_grad()

    def set_place(self, *, seed: int, index: int) -> None:
        """Take note of the model's seed and of the layer's place: its keys depend on them."""
        self._place = (seed, index)

    @property
    def params(self) -> Any:
        """The values as the tree that `wrap` was given: live arrays of NumPy, not copies."""
        leaves = [leaf.value() if isinstance(leaf, Parameter) else leaf for _, leaf in self._leaves]
        return jax.tree_util.tree_unflatten(self._tree, leaves)

    # -- computing ------------------------------------------------------------------------------

    def forward(self, x: Tree, ctx: Context | None = None) -> Tree:
        """Return the function's output; with a context, keep what its backward needs.

        Raises:
            ModuleStateError: If a parameter has no memory yet.
        """
        leaves, structure = flatten(x, name="the input")
        inputs = structure.unflatten([host_array(leaf) for leaf in leaves])
        trained, fixed = self._values()
        drawn = None
        if self._takes_key and ctx is not None and ctx.training:
            drawn = _words(*self._place, ctx.step, ctx.first_row)
        code = _Code(self.function, self._tree, self._takes_key, self.input_grad)
        if ctx is None:
            return self._output(_INFERENCE(code, trained, fixed, inputs, drawn))
        y, back = _FORWARD(code, trained, fixed, inputs, drawn)
        output = self._output(y)
        ctx.save(self, back, y, structure, [leaf.dtype for leaf in leaves])
        return output

    def backward(self, dy: Tree, ctx: Context) -> Tree | None:
        """Add the parameters' gradients and return the input's.

        Raises:
            ShapeError: If `dy` is built otherwise than the output, or an array has another shape.
            ModuleStateError: If forward did not run with `ctx`, or its backward ran already.
        """
        if ctx is None:
            raise ModuleStateError(f"{self!r}: backward needs the Context of its forward")
        back, y, structure, dtypes = ctx.peek(self)
        outputs, form = flatten(y, name=f"the output of {self!r}")
        leaves = gradients_like(self, outputs, form, dy)
        gradients = [None if leaf is None else host_array(leaf) for leaf in leaves]
        ctx.take(self)
        of_trained, dx = _BACKWARD(back, y, gradients)
        for place, gradient in reversed(of_trained.items()):
            self._leaves[place][1].accumulate(np.asarray(gradient))
        if dx is None:
            return None
        found = [
            None if one is None else np.asarray(one).astype(dtype, copy=False)
            for one, dtype in zip(structure.leaves_of(dx) or [], dtypes, strict=True)
        ]
        return structure.unflatten(found) if any(one is not None for one in found) else None

    def _output(self, y: Any) -> Tree:
        """Return an output as arrays; waits until they are computed."""
        leaves, form = flatten(y, name=f"the output of {self!r}")
        return form.unflatten([np.asarray(leaf) for leaf in leaves])

    def _values(self) -> tuple[dict[int, HostArray], dict[int, Array]]:
        """Return what is trained, and what is not, by the place in the tree."""
        trained: dict[int, HostArray] = {}
        fixed: dict[int, Array] = {}
        for place, (_, leaf) in enumerate(self._leaves):
            if isinstance(leaf, Parameter):
                (trained if leaf.requires_grad else fixed)[place] = leaf.value()
            else:
                fixed[place] = leaf
        return trained, fixed

    def __repr__(self) -> str:
        return f"JaxLayer({getattr(self.function, '__name__', type(self.function).__name__)})"


def _leaf(name: str, leaf: Any) -> tuple[str, Any]:
    """Return a parameter for an array that has a gradient, else the array."""
    if isinstance(leaf, Parameter):
        return name, leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        if not has_gradient(leaf.dtype) or leaf.dtype.kind == "c":
            raise ModuleError(
                f"parameter {name!r} is made by a function and must be of a float dtype, got "
                f"{leaf.dtype}"
            )
        return name, Parameter(name, tuple(leaf.shape), Constant(0.0))
    array = np.array(leaf, order="C")
    # As JAX would hold it: without 64 bits in them it would turn it into that in each step.
    array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
    if not has_gradient(array.dtype):
        return name, array
    if array.dtype.kind == "c":
        raise DTypeError(f"parameter {name!r} must be of a real dtype, got {array.dtype}")
    parameter = Parameter(name, array.shape, Constant(0.0))
    parameter.data = array
    return name, parameter


def _name(path: tuple[Any, ...]) -> str:
    """Return where a leaf stands, as ``"layers.0.weight"``."""
    words = (
        next(getattr(one, at) for at in ("key", "idx", "name") if hasattr(one, at)) for one in path
    )
    return ".".join(map(str, words)) or "param"


def _words(*numbers: int) -> HostArray:
    """Return two words that a key is made of; another array of the same shape for other numbers."""
    words: HostArray = np.array([key_of(*numbers)], np.uint64).view(np.uint32)
    return words


def _key(words: Any) -> Any:
    return jax.random.fold_in(jax.random.key(words[0]), words[1])


def _cotangent(output: Any, gradient: Any) -> Any:
    if not has_gradient(output.dtype):
        return np.zeros(output.shape, jax.dtypes.float0)
    if gradient is None:
        return jax.numpy.zeros_like(output)
    return gradient.astype(output.dtype)


def _real(gradient: Any) -> Any:
    """Return a gradient; None for that of an integer, which JAX has as zeros of no bytes."""
    return None if gradient.dtype == jax.dtypes.float0 else gradient


# -- what is compiled: once for all layers of one function ---------------------------------


@dataclass(frozen=True, slots=True)
class _Code:
    """The key by which compiled code is found, beside the shapes and dtypes of arrays.

    Attributes:
        function: The function of the layer.
        tree: How its parameters are put together.
        takes_key: Whether it takes a key.
        wants: Whether the input's gradient is wanted.
    """

    function: Callable[..., Any]
    tree: Any
    takes_key: bool
    wants: bool

    def __call__(self, trained: Any, fixed: Any, x: Any, words: Any) -> Any:
        every = trained | fixed
        params = jax.tree_util.tree_unflatten(self.tree, [every[i] for i in range(len(every))])
        if self.takes_key:
            return self.function(params, x, None if words is None else _key(words))
        return self.function(params, x)


def _forward(code: _Code, trained: Any, fixed: Any, x: Any, words: Any) -> Any:
    """Return the output, and what its backward needs."""
    if code.wants:
        return jax.vjp(lambda p, x: code(p, fixed, x, words), trained, x)
    return jax.vjp(lambda p: code(p, fixed, x, words), trained)


def _backward(back: Any, y: Any, dy: Any) -> Any:
    """Return the gradients of what is trained, and of the input if it was wanted."""
    leaves, form = jax.tree_util.tree_flatten(y)
    cotangents = [_cotangent(*pair) for pair in zip(leaves, dy, strict=True)]
    of_trained, *dx = back(jax.tree_util.tree_unflatten(form, cotangents))
    return of_trained, jax.tree_util.tree_map(_real, dx[0]) if dx else None


_INFERENCE = jax.jit(_Code.__call__, static_argnums=0)
_FORWARD = jax.jit(_forward, static_argnums=0)
_BACKWARD = jax.jit(_backward)
_INIT = jax.jit(lambda init, words: init(_key(words)), static_argnums=0)


class JaxLoss(WrappedLoss):
    """The result of :func:`wrap_loss`."""

    def __init__(
        self, function: Callable[..., Any], count: Callable[[Any], float] | None = None
    ) -> None:
        super().__init__(function, count)
        self._value = jax.jit(function)
        self._value_and_grad = jax.jit(self._both)

    def _compute(
        self, y: Tree, target: Tree, denominator: float, *, grad: bool
    ) -> tuple[float, Tree]:
        if not grad:
            return float(self._value(_host(y), _host(target))), None
        leaves, structure = flatten(_host(y), name="the output")
        share = self.count(target) / denominator
        if not share or not leaves[0].shape[0]:
            none = [np.zeros_like(leaf) if has_gradient(leaf.dtype) else None for leaf in leaves]
            return 0.0, structure.unflatten(none)
        real = {place: leaf for place, leaf in enumerate(leaves) if has_gradient(leaf.dtype)}
        rest = {place: leaf for place, leaf in enumerate(leaves) if place not in real}
        # A tree of zeros tells how `y` is put together.
        form = structure.unflatten([0] * len(leaves))
        value, gradients = self._value_and_grad(real, rest, form, _host(target), np.float64(share))
        found = [
            np.asarray(gradients[place]).astype(leaf.dtype, copy=False) if place in real else None
            for place, leaf in enumerate(leaves)
        ]
        return float(value), structure.unflatten(found)

    def _both(self, real: Any, rest: Any, form: Any, target: Any, share: Any) -> Any:
        treedef = jax.tree_util.tree_structure(form)

        def scaled(real: Any) -> Any:
            every = real | rest
            y = jax.tree_util.tree_unflatten(treedef, [every[i] for i in range(len(every))])
            return self._function(y, target) * share

        return jax.value_and_grad(scaled)(real)


def wrap(function: Callable[..., Any], params: Any, *, key: bool = False) -> JaxLayer:
    """Return ``function(params, x)`` as a layer, for a stage or a replica. Local.

    `x` and the result are arrays, or tuples and dicts of them, with a row for each sample.

    Args:
        function: A function that JAX can compile, without side effects.
        params: A tree of arrays. Those of a float dtype become parameters, the others stay as they
            are: constants of the program, which are not saved with the layer. A
            :class:`~mpimesh.nn.Parameter` of another layer may stand in it: then both share it. Or
            a function of a key that makes the tree: then only ranks that run the layer
            give memory to it, and the values depend on the model's seed and the layer's place.
        key: Whether the function takes a key as its third argument.

    Raises:
        ModuleError: If `function` cannot be called or hashed, or a function for the first values
            makes anything but floats.
        DTypeError: If a parameter is complex, or there are arrays in `params`, but none of a
            float dtype.
    """
    return JaxLayer(function, params, key=key)


def wrap_loss(
    function: Callable[..., Any], *, count: Callable[[Any], float] | None = None
) -> JaxLoss:
    """Return a loss of JAX as ``loss=`` of a training step. Local.

    Args:
        function: A function of the output and the target that gives one number, the mean over the
            rows.
        count: What a target counts in such a mean, if that is not its rows.

    Raises:
        ModuleError: If it cannot be called.
    """
    return JaxLoss(function, count)


def _host(tree: Tree) -> Tree:
    return tree_map(lambda leaf, _: host_array(leaf), tree)

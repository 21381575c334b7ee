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
from typing import Any

from mpimesh.interop.jax_layer import JaxLayer
from mpimesh.interop.jax_loss import JaxLoss, wrap_loss

__all__ = ["JaxLayer", "JaxLoss", "wrap", "wrap_loss"]


def wrap(function: Callable[..., Any], params: Any, *, key: bool = False) -> JaxLayer:
    """Return ``function(params, x)`` as a layer, for a stage or a replica. Local.

    `x` and the result are arrays, or tuples and dicts of them, with a row for each sample.

    Args:
        function: A function that JAX can compile, without side effects.
        params: A tree of arrays. Those of a float dtype become parameters, the others stay as they
            are. A :class:`~mpimesh.nn.Parameter` of another layer may stand in it: then both share
            it. Or a function of a key that makes the tree: then only ranks that run the layer
            give memory to it, and the values depend on the model's seed and the layer's place.
        key: Whether the function takes a key as its third argument.

    Raises:
        ModuleError: If `function` cannot be called or hashed, or a function for the first values
            makes anything but floats.
        DTypeError: If a parameter is complex, or there are arrays in `params`, but none of a
            float dtype.
    """
    return JaxLayer(function, params, key=key)

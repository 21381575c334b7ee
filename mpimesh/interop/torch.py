"""Modules and losses of PyTorch in models of mpimesh: trained over MPI, by any build of PyTorch.

::

    import mpimesh as mm
    from mpimesh.interop import torch as mt

    layers = mt.wrap_each(torch.nn.Sequential(...))   # or mt.wrap(module), one by one
    stages = [mm.PipelineStage(0).add_layer(layers[0]), ...]
    pipe = mm.PipelineParallel(stages, 8, mesh=mesh)
    optimizer = torch.optim.AdamW(mt.tensors(pipe))   # or mm.optim.AdamW(pipe.parameters())
    loss = pipe.train_step(x, target, loss=mt.wrap_loss(torch.nn.CrossEntropyLoss()),
                           optimizer=optimizer)

Importing this module imports PyTorch; without it, that raises
:class:`~mpimesh.errors.MissingPackageError`.

**Memory.** Values and gradients are one memory for both libraries. The module's own optimizer, its
``state_dict`` and ``load_state_dict`` work on it as ever. Inputs and outputs are not copied
either. Gradients of a step stay until the next one begins, so ``optimizer.zero_grad()`` of
PyTorch's is not needed. All is in the host's memory, and so must the modules be: a module on a GPU
is refused. Batches may be tensors as well as arrays.

**Parameters without a gradient** in a step have one of zeros, on all ranks alike, so that weight
decay and momentum go on. PyTorch alone, where their gradient is None, leaves them as they are.
Freeze what is not to be trained.

**Changes.** Wrap a module when it is complete: parameters that are added or replaced later are
refused at the next forward. What a module writes into its input, as a function in place does, is
refused, too, for a stage before may need it; modules with an attribute ``inplace``, such as
``ReLU(inplace=True)``, get a copy.

**First values.** Make the modules after ``torch.manual_seed(...)``, the same on every rank; or on
the "meta" device: then a rank gives memory to its own stages only, and the values, of the modules'
``reset_parameters``, depend on the model's `seed` and the layer's place, on any mesh.

**Random numbers**, such as dropout's, are drawn by the model's seed, the layer's place, the step
and the first row of the microbatch: a run can be repeated, and replicas and microbatches draw
differently. Another cut into microbatches draws others, unlike :class:`mpimesh.nn.Dropout`'s.
PyTorch's own generator is left as it was.

**Buffers**, such as the means of BatchNorm, are each rank's own: they follow the rows that it saw,
microbatch by microbatch, and are not summed over replicas. :func:`full_state_dict` takes those of
the first replica.

**Threads.** Ranks of a node share its cores. PyTorch takes them all for each rank unless
``OMP_NUM_THREADS`` is set before it starts, or ``torch.set_num_threads`` says how many.

**Halves.** Schedules that put off weight gradients, as ``zb1p`` does, run both halves of a backward
apart where nothing is computed twice by that: in modules without modules in them, as
:func:`wrap_each` often makes them. Others compute all in the first half, unless ``halves=True``.
"""

from __future__ import annotations

from collections.abc import Iterable

from mpimesh.errors import ModuleError
from mpimesh.interop.torch_layer import TorchLayer
from mpimesh.interop.torch_library import torch
from mpimesh.interop.torch_loss import TorchLoss, wrap_loss
from mpimesh.interop.torch_parameter import TorchParameter
from mpimesh.interop.torch_state import full_state_dict, load_full_state_dict
from mpimesh.parallel.model import ParallelModel

__all__ = [
    "TorchLayer",
    "TorchLoss",
    "TorchParameter",
    "full_state_dict",
    "load_full_state_dict",
    "tensors",
    "wrap",
    "wrap_each",
    "wrap_loss",
]


def wrap(module: torch.nn.Module, *, spread: bool = True, halves: bool | None = None) -> TorchLayer:
    """Return `module` as a layer, for a stage or a :class:`~mpimesh.DataParallel`. Local.

    It may take and give arrays, tuples and dicts of them. Rows must be independent, as everywhere
    in a pipeline.

    Args:
        module: The module, in the host's memory or on the "meta" device.
        spread: Whether a tuple goes to the module as several arguments, and a dict as named ones.
            Else as one.
        halves: Whether the two halves of a backward run apart, where a schedule wants that. The
            second then goes through the module once more. None says yes for a module without
            modules in it, which gains by it in any case.

    Raises:
        ModuleError: If it is no module, or its parameters are on a GPU or have no shape yet.
        DTypeError: If a parameter is not of a float dtype.
    """
    return TorchLayer(module, spread=spread, halves=halves)


def wrap_each(modules: torch.nn.Sequential) -> list[TorchLayer]:
    """Return each module of a `torch.nn.Sequential` as a layer of its own. Local.

    In one pipeline, or one :class:`~mpimesh.nn.Sequential`, the parameters have the very names
    that they have in `modules`.

    Raises:
        ModuleError: As :func:`wrap`, or if it holds no modules in order.
    """
    if not isinstance(modules, Iterable):
        raise ModuleError(
            "wrap_each takes a torch.nn.Sequential, whose modules become layers one by one, got "
            f"{modules!r}: use wrap for one module"
        )
    return [wrap(module) for module in modules]


def tensors(model: ParallelModel) -> list[torch.nn.Parameter]:
    """Return the parameters of PyTorch that live on this rank, for its optimizers. Local.

    A rank whose stages have none needs an optimizer, too: one of PyTorch's takes an empty list in
    a group, ``AdamW([{"params": mt.tensors(model)}])``.

    Raises:
        ModuleError: If some parameters are not PyTorch's, which its optimizers cannot change.
    """
    others = [name for name, one in model.named_parameters() if not isinstance(one, TorchParameter)]
    if others:
        raise ModuleError(
            f"parameters {others} are not of PyTorch: train this model with an optimizer of "
            "mpimesh.optim"
        )
    return [one.tensor for one in model.parameters() if isinstance(one, TorchParameter)]

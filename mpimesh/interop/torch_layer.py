"""A module of PyTorch as a layer: its forward is recorded by autograd, its backward is autograd's.

What one forward records is in the microbatch's context, so that any number of microbatches are in
flight and end in any order. Backward adds to the gradients where they lie in the buckets, and each
tells its bucket at once, while PyTorch goes on with the layers before.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import is_
from types import ModuleType
from typing import Any

import numpy as np

from mpimesh.arrays import Array, HostArray
from mpimesh.errors import DTypeError, ModuleError, ModuleStateError, ShapeError
from mpimesh.interop.torch_arrays import as_array, as_tensor, host_leaf
from mpimesh.interop.torch_first_values import give_first_values
from mpimesh.interop.torch_library import torch
from mpimesh.interop.torch_parameter import TorchParameter, parameter_of
from mpimesh.interop.torch_random import seeded
from mpimesh.nn import Context, Module
from mpimesh.nn.protocol import SupportsLayer
from mpimesh.parallel.tree import Structure, Tree, flatten

__all__ = ["TorchLayer"]


class TorchLayer(Module):
    """A `torch.nn.Module` among the layers of a model; :func:`wrap` makes it.

    It has the module's parameters, under the module's names, in the module's own memory. A
    parameter that stands in several modules is one parameter, whether they are wrapped together or
    one by one, so that tied weights stay tied over the stages.

    Attributes:
        module: The module.
    """

    def __init__(
        self, module: torch.nn.Module, *, spread: bool = True, halves: bool | None = None
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise ModuleError(f"wrap takes an object of torch.nn.Module, got {module!r}")
        self.module = module
        self._spread = bool(spread)
        self._training = bool(module.training)
        self._place: tuple[int, int] | None = None
        names = {id(tensor): name for name, tensor in module.named_parameters()}
        self._standing: list[TorchParameter] = []
        for owner, at, tensor in _places(module):
            parameter = parameter_of(names[id(tensor)], tensor)
            parameter.add_place(owner, at)
            self._standing.append(parameter)
        self._named = list(
            {id(one): (names[id(one.tensor)], one) for one in self._standing}.values()
        )
        whole = not any(True for _ in module.children()) if halves is None else bool(halves)
        self._halves = whole and bool(self._named)
        self._writes = any(getattr(one, "inplace", False) for one in module.modules())

    # -- parameters: the module's --------------------------------------------------------

    def named_children(self) -> list[tuple[str, SupportsLayer]]:
        """Return nothing: what is in the module is its own affair."""
        return []

    def named_parameters(self) -> list[tuple[str, TorchParameter]]:  # type: ignore[override]
        """Return the parameters under the module's own names, each once."""
        return list(self._named)

    def materialize(
        self, *, seed: int, dtype: Any = np.float32, xp: ModuleType = np, index: int = 0
    ) -> None:
        """Give memory and first values to what the module has on the "meta" device.

        The values are those of the modules' own ``reset_parameters``, drawn by `seed` and `index`
        alone, and have the dtypes that the module was made with, whatever `dtype` says. What has
        memory keeps its values.

        Raises:
            ModuleError: If a module with such a parameter or buffer has no ``reset_parameters``,
                or that leaves one without values, or `xp` is not NumPy.
        """
        if xp is not np:
            raise ModuleError(
                f"{self!r} computes on the host's memory: make the model with xp=numpy"
            )
        self.set_place(seed=seed, index=index)

    def set_place(self, *, seed: int, index: int) -> None:
        """Take note of the model's seed and of the layer's place: what it draws depends on them.

        What has no memory, such as buffers where all parameters have it, gets memory and values.

        Raises:
            ModuleError: As :meth:`materialize`.
        """
        self._place = (seed, index)
        give_first_values(self.module, [one for _, one in self._named], seed=seed, index=index)

    def set_training(self, training: bool) -> None:
        """Choose training or evaluation, for all modules in it."""
        self._training = bool(training)
        self.module.train(self._training)

    # -- computing -------------------------------------------------------------------------

    def forward(self, x: Tree, ctx: Context | None = None) -> Tree:
        """Return the module's output; with a context, keep what autograd has recorded.

        Raises:
            ModuleStateError: If the module has got other parameters, or more of them.
            ModuleError: If the module gives anything but tensors, or tuples and dicts of them, or
                has written into its input.
            DTypeError: If PyTorch or NumPy lacks a dtype.
        """
        self._check_standing()
        given, structure = flatten(x, name="the input")
        leaves = [host_leaf(leaf) for leaf in given]
        wants = ctx is not None and self.input_grad
        tensors = [_input(leaf, wants=wants) for leaf in leaves]
        with self._mode(ctx):
            # One that may write into its input gets a copy: others read that.
            taken = [one.clone() for one in tensors] if self._writes else tensors
            y = self._call(structure.unflatten(taken))
        if any(tensor._version for tensor in tensors):
            raise ModuleError(
                f"{self!r} has written into its input, which others may read: let it write into "
                "memory of its own, or give it an attribute inplace=True, so that it gets a copy"
            )
        outputs, form = flatten(y, name=f"the output of {self!r}")
        for output in outputs:
            if not isinstance(output, torch.Tensor):
                raise ModuleError(
                    f"{self!r} gave a {type(output).__name__} where a tensor should be"
                )
        if ctx is not None:
            ctx.save(self, tensors, structure, outputs, form)
        locked = {
            tensor.untyped_storage().data_ptr()
            for tensor, leaf in zip(tensors, leaves, strict=True)
            if not leaf.flags.writeable
        }
        return form.unflatten([_output(output, locked) for output in outputs])

    def backward(self, dy: Tree, ctx: Context) -> Tree | None:
        """Run autograd's backward: it adds to the parameters' gradients, and gives the input's.

        The gradient of an input that did not matter is zeros.

        Raises:
            ShapeError: If `dy` is built otherwise than the output, or an array has another shape.
            DTypeError: If an array has another dtype.
            ModuleStateError: If forward did not run with `ctx`, or its backward ran already.
        """
        tensors, structure, gradients = self._take_record(dy, ctx)
        for _, parameter in self._named:
            parameter.tie()
        if gradients:
            torch.autograd.backward(*zip(*gradients, strict=True))
        return _gradients_of(tensors, structure, [one.grad for one in tensors])

    def backward_input(self, dy: Tree, ctx: Context) -> Tree | None:
        """Return the gradient of the input; keep what autograd recorded for the other half.

        Without halves it is all of `backward`, which see for what it raises.
        """
        if not self._halves:
            return self.backward(dy, ctx)
        tensors, structure, gradients = self._take_record(dy, ctx)
        ctx.defer(self, gradients)
        wanted = [one for one in tensors if one.requires_grad]
        if not gradients or not wanted:
            return _gradients_of(tensors, structure, [None] * len(tensors))
        outputs, given = zip(*gradients, strict=True)
        found = iter(
            torch.autograd.grad(outputs, wanted, given, retain_graph=True, allow_unused=True)
        )
        return _gradients_of(
            tensors, structure, [next(found) if one.requires_grad else None for one in tensors]
        )

    def backward_weight(self, ctx: Context) -> None:
        """Add to the gradients of the parameters; nothing without halves.

        Raises:
            ModuleStateError: If there was no `backward_input` with `ctx`, or this ran already.
        """
        if not self._halves:
            return
        (gradients,) = ctx.take_deferred(self)
        trained = [one.tensor for _, one in self._named if one.requires_grad]
        for _, parameter in self._named:
            parameter.tie()
        if gradients and trained:
            outputs, given = zip(*gradients, strict=True)
            torch.autograd.backward(outputs, given, inputs=trained)

    def _take_record(
        self, dy: Tree, ctx: Context
    ) -> tuple[list[torch.Tensor], Structure, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Give up what forward kept, if `dy` fits it; return the inputs, and where to go back."""
        if ctx is None:
            raise ModuleStateError(f"{self!r}: backward needs the Context that forward was given")
        tensors, structure, outputs, form = ctx.peek(self)
        gradients = self._gradients(dy, outputs, form)
        ctx.take(self)
        return tensors, structure, gradients

    def _check_standing(self) -> None:
        """Check that the module has the very parameters that it had when it was wrapped."""
        standing = [tensor for _, _, tensor in _places(self.module)]
        known = [one.tensor for one in self._standing]
        if len(standing) == len(known) and all(map(is_, standing, known)):
            return
        now = dict(self.module.named_parameters(remove_duplicate=False))
        changed = [name for name, one in now.items() if not any(map(partial(is_, one), known))]
        changed += [
            name for name, one in self._named if not any(map(partial(is_, one.tensor), standing))
        ]
        raise ModuleStateError(
            f"parameters {sorted({*changed})} of {self!r} were replaced, added or removed after it "
            "was wrapped, and would not be trained: wrap the module when it is complete, or copy "
            "values into the parameters that it has"
        )

    def _call(self, x: Any) -> Any:
        if self._spread and isinstance(x, tuple):
            return self.module(*x)
        if self._spread and isinstance(x, dict):
            return self.module(**x)
        return self.module(x)

    @contextmanager
    def _mode(self, ctx: Context | None) -> Iterator[None]:
        """Record or not, draw by the place in the model and the batch, train or evaluate."""
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(ctx is not None))
            if ctx is not None and ctx.training:
                if self._place is not None:
                    stack.enter_context(seeded(*self._place, ctx.step, ctx.first_row))
                yield
                return
            trained = [one for one in self.module.modules() if one.training]
            for one in trained:
                one.training = False
            try:
                yield
            finally:
                for one in trained:
                    one.training = True

    def _gradients(
        self, dy: Tree, outputs: list[torch.Tensor], form: Structure
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the outputs that autograd goes back from, with their gradients."""
        leaves = form.leaves_of(dy)
        if leaves is None:
            raise ShapeError(
                f"{self!r}: the gradient must be built like the output, {form}, got "
                f"{type(dy).__name__}"
            )
        found = []
        for output, leaf, path in zip(outputs, leaves, form.paths(), strict=True):
            if leaf is None or not output.requires_grad:
                continue
            gradient = as_tensor(leaf)
            if gradient.shape != output.shape:
                raise ShapeError(
                    f"{self!r}: the gradient of the output{path} must have its shape "
                    f"{tuple(output.shape)}, got {tuple(gradient.shape)}"
                )
            if gradient.dtype != output.dtype:
                raise DTypeError(
                    f"{self!r}: the gradient of the output{path} must be {output.dtype} like it, "
                    f"got {gradient.dtype}"
                )
            found.append((output, gradient))
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchLayer:
        """Return a layer of a copy of the module, with memory of its own."""
        twin = TorchLayer(
            copy.deepcopy(self.module, memo), spread=self._spread, halves=self._halves
        )
        twin._place = self._place
        twin.input_grad = self.input_grad
        return twin

    def __repr__(self) -> str:
        return f"TorchLayer({type(self.module).__name__})"


def _places(
    module: torch.nn.Module,
) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    """Yield each place where a parameter stands: the module that has it, and its name there."""
    for owner in module.modules():
        for at, tensor in owner._parameters.items():
            if tensor is not None:
                yield owner, at, tensor


def _input(leaf: Array, *, wants: bool) -> torch.Tensor:
    """Return an input as a tensor, a leaf of what autograd will record."""
    tensor = as_tensor(leaf)
    if wants and (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.requires_grad_()  # autograd itself refuses to write into it
    return tensor if leaf.flags.writeable else tensor.clone()


def _output(tensor: torch.Tensor, locked: set[int]) -> HostArray:
    """Return an output as an array: read-only if it lies in an input that is."""
    array = as_array(tensor)
    if locked and tensor.untyped_storage().data_ptr() in locked:
        array.flags.writeable = False
    return array


def _gradients_of(
    tensors: list[torch.Tensor], structure: Structure, found: list[torch.Tensor | None]
) -> Tree | None:
    """Return the gradients of the inputs, put together; None if there are none."""
    if not any(one.requires_grad for one in tensors):
        return None
    return structure.unflatten(
        [
            None
            if not tensor.requires_grad
            else as_array(torch.zeros_like(tensor) if gradient is None else gradient)
            for tensor, gradient in zip(tensors, found, strict=True)
        ]
    )

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
microbatch by microbatch, and are not summed over replicas. Checkpoints and states have those of
the first replica, and all replicas load them. What is registered with ``persistent=False`` is in
none, as in PyTorch; extra state (``get_extra_state``) is refused when a model is saved.

**Threads.** Ranks of a node share its cores. PyTorch takes them all for each rank unless
``OMP_NUM_THREADS`` is set before it starts, or ``torch.set_num_threads`` says how many.

**Halves.** Schedules that put off weight gradients, as ``zb1p`` does, run both halves of a backward
apart where nothing is computed twice by that: in modules without modules in them, as
:func:`wrap_each` often makes them. Others compute all in the first half, unless ``halves=True``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import is_
from types import ModuleType
from typing import Any

import numpy as np

from mpimesh.arrays import Array, HostArray
from mpimesh.errors import DTypeError, ModuleError, ModuleStateError, ShapeError
from mpimesh.interop.torch_tensors import (
    EXTRA_STATE,
    TorchBuffer,
    TorchParameter,
    as_array,
    as_tensor,
    give_first_values,
    host_leaf,
    parameter_of,
    seeded,
    torch,
)
from mpimesh.interop.wrapped import WrappedLoss, gradients_like
from mpimesh.nn import Context, Module
from mpimesh.nn.parameter import Buffer
from mpimesh.nn.protocol import SupportsLayer
from mpimesh.nn.recompute import Holder
from mpimesh.parallel.microbatch import Structure, Tree, flatten, tree_map
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


_OF_MODULES = frozenset(vars(torch.nn.Module()))  # all that PyTorch itself keeps


class TorchLayer(Module):
    """A `torch.nn.Module` among the layers of a model; :func:`wrap` makes it.

    Autograd records its forward and runs its backward. What one forward records is in the
    microbatch's context, so that any number of microbatches are in flight and end in any order.
    Backward adds to the gradients in the buckets, and each starts its bucket's sum as soon as it
    is complete, while PyTorch goes on with the layers before.

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

    def named_buffers(self) -> list[tuple[str, Buffer]]:
        """Return what the module's state has beside parameters, under the module's own names."""
        found: list[tuple[str, Buffer]] = []
        for prefix, owner in self.module.named_modules():
            names = [
                name
                for name, tensor in owner._buffers.items()
                if tensor is not None and name not in owner._non_persistent_buffers_set
            ]
            if type(owner).get_extra_state is not torch.nn.Module.get_extra_state:
                names.append(EXTRA_STATE)
            found += [(f"{prefix}.{at}" if prefix else at, TorchBuffer(owner, at)) for at in names]
        return found

    def state_holders(self) -> list[Holder]:
        """Return the dicts of what a forward may change; see :mod:`mpimesh.nn.recompute`."""
        modules = [*self.module.modules()]
        attributes: list[Holder] = [(vars(one), _OF_MODULES) for one in modules]
        return [*attributes, *((one._buffers, ()) for one in modules)]

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
        inputs, structure = flatten(x, name="the input")
        leaves = [host_leaf(leaf) for leaf in inputs]
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
        outputs, dy_outputs = zip(*gradients, strict=True)
        found = iter(
            torch.autograd.grad(outputs, wanted, dy_outputs, retain_graph=True, allow_unused=True)
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
            outputs, dy_outputs = zip(*gradients, strict=True)
            torch.autograd.backward(outputs, dy_outputs, inputs=trained)

    def _take_record(
        self, dy: Tree, ctx: Context
    ) -> tuple[list[torch.Tensor], Structure, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Take what forward saved, if `dy` fits it: inputs, and outputs with their gradients."""
        if ctx is None:
            raise ModuleStateError(f"{self!r}: backward needs the Context of its forward")
        tensors, structure, outputs, form = ctx.peek(self)
        found = []
        leaves = gradients_like(self, outputs, form, dy)
        for output, leaf, path in zip(outputs, leaves, form.paths(), strict=True):
            if leaf is None or not output.requires_grad:
                continue
            gradient = as_tensor(leaf)
            if gradient.dtype != output.dtype:
                raise DTypeError(
                    f"{self!r}: the gradient of the output{path} must be {output.dtype} like it, "
                    f"got {gradient.dtype}"
                )
            found.append((output, gradient))
        ctx.take(self)
        return tensors, structure, found

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
    """Return an output as an array: read-only if it shares memory with an input that is."""
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


_Count = Callable[[Any], float]


class TorchLoss(WrappedLoss):
    """The result of :func:`wrap_loss`."""

    def __init__(self, function: Callable[..., Any], count: _Count | None = None) -> None:
        super().__init__(function, count)
        reduction = getattr(function, "reduction", "mean")
        if reduction not in ("mean", "sum"):
            raise ModuleError(
                f"a loss gives one number: make it with reduction='mean' or 'sum', not "
                f"{reduction!r}"
            )
        self._is_mean = reduction == "mean"

    def count(self, target: Tree) -> float:
        """Return what `target` adds to the denominator of a batch in parts."""
        if self._count is not None:
            return float(self._count(tree_map(lambda leaf, _: as_tensor(leaf), target)))
        module = self._function
        if module is torch.nn.functional.cross_entropy:
            module = torch.nn.CrossEntropyLoss()
        elif module is torch.nn.functional.nll_loss:
            module = torch.nn.NLLLoss()
        if self._is_mean and isinstance(module, torch.nn.CrossEntropyLoss | torch.nn.NLLLoss):
            classes = as_tensor(flatten(target, name="the target")[0][0])
            if not classes.is_floating_point():  # no probabilities of all classes
                counted = classes != module.ignore_index
                weight = module.weight
                return float((counted if weight is None else weight[classes[counted]]).sum())
        return super().count(target)

    def _compute(
        self, y: Tree, target: Tree, denominator: float, *, grad: bool
    ) -> tuple[float, Tree]:
        leaves, structure = flatten(y, name="the output")
        tensors = [as_tensor(leaf) for leaf in leaves]
        if grad:
            for tensor in tensors:
                if tensor.is_floating_point():
                    tensor.requires_grad_()
        share = self.count(target) / denominator if self._is_mean else 1.0 / denominator
        value = 0.0
        if share and leaves[0].shape[0]:
            targets = tree_map(lambda leaf, _: as_tensor(leaf), target)
            with torch.set_grad_enabled(grad):
                result = self._function(structure.unflatten(tensors), targets)
                if not isinstance(result, torch.Tensor) or result.numel() != 1:
                    raise ModuleError(f"{self!r} must give a tensor of one number, got {result!r}")
                scaled = result * share
            value = float(scaled.detach())
            if grad and scaled.requires_grad:
                scaled.backward()
        if not grad:
            return value, None
        return value, structure.unflatten([_gradient(tensor) for tensor in tensors])


def wrap_loss(function: Callable[..., Any], *, count: _Count | None = None) -> TorchLoss:
    """Return a loss of PyTorch as ``loss=`` of a training step. Local.

    Over the whole batch, in any cut, it is the loss of all rows at once: for a mean, the parts are
    weighted by their counts: rows, or for `torch.nn.CrossEntropyLoss` and `NLLLoss` (or their
    functions) with class numbers, the weights of targets that are not ignored. A loss with
    ``reduction="sum"`` is divided by the rows; ``denominator=1`` in the step gives the sum itself.

    Args:
        function: A loss of `torch.nn`, or any function of the output and the target that gives a
            tensor of one number, the mean over what it counts.
        count: What a target counts in such a mean, if that is not its rows.

    Raises:
        ModuleError: If it gives more than one number, by its ``reduction``.
    """
    return TorchLoss(function, count)


def _gradient(tensor: torch.Tensor) -> Array | None:
    if not tensor.requires_grad:
        return None
    return as_array(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)


def full_state_dict(model: ParallelModel, root: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what ``root.state_dict()`` is in one process: all values, and buffers. Collective.

    ``root.load_state_dict`` takes it, on this mesh or without any.

    Args:
        model: A pipeline or replicas of wrapped modules.
        root: The module whose parts were wrapped, the same on every rank; parts that were not are
            taken as they are here.

    Raises:
        ModuleError: If a wrapped module is no part of `root`, or a value is no tensor.

    Cost:
        Two broadcasts for each parameter and buffer, over the stages.
    """
    engine = model._engine
    engine.check_ready()
    state = {
        name: _tensor(name, value).detach().clone() for name, value in root.state_dict().items()
    }
    collected: set[str] = set()
    for number, layer, names in _names_in_root(model, root):
        buffers = dict(layer.module.named_buffers(remove_duplicate=False))
        for name, value in layer.module.state_dict().items():
            if collected.issuperset(names[name]):  # tied to one before
                continue
            collected.update(names[name])
            mine = as_array(value).copy() if number in engine.local else None
            whole: Array = engine.everywhere(mine, name)
            if name in buffers:  # those of replicas differ
                whole = engine.data.broadcast(whole, root=0).resolve()
            for place in names[name]:
                state[place] = as_tensor(whole).clone()
    return state


def load_full_state_dict(
    model: ParallelModel, root: torch.nn.Module, state: Mapping[str, torch.Tensor]
) -> None:
    """Take over a state of the whole model, into the modules of this rank's stages. Local.

    What ``root.load_state_dict(state)`` does in one process, also where modules of other stages
    have no memory here. Load on all ranks, or the replicas differ.

    Args:
        model: A pipeline or replicas of wrapped modules.
        root: The module whose parts were wrapped.
        state: What :func:`full_state_dict` gave, or ``root.state_dict()`` of any process.

    Raises:
        ModuleError: If names are missing or unknown, or a wrapped module is no part of `root`.
        ShapeError: If a shape differs.
    """
    expected = root.state_dict()
    if expected.keys() != state.keys():
        missing, unknown = expected.keys() - state.keys(), state.keys() - expected.keys()
        raise ModuleError(
            f"a state must name each value of the root module once; missing: "
            f"{sorted(missing) or 'none'}, unknown: {sorted(unknown) or 'none'}"
        )
    for name, value in expected.items():
        shape = _tensor(name, value).shape
        if shape != _tensor(name, state[name]).shape:
            raise ShapeError(
                f"state of {name!r} must have its shape {tuple(shape)}, got "
                f"{tuple(state[name].shape)}"
            )
    for number, layer, names in _names_in_root(model, root):
        if number in model._engine.local:
            # Of several names of one tensor the last counts, as where PyTorch loads the root.
            layer.module.load_state_dict({name: state[names[name][-1]] for name in names})


def _names_in_root(
    model: ParallelModel, root: torch.nn.Module
) -> list[tuple[int, TorchLayer, dict[str, list[str]]]]:
    """Return each wrapped module with its stage, and all names in `root` of what is in its state.

    A tensor that stands in several modules, or in one that stands in several places, has several.
    """
    prefixes = {id(module): name for name, module in root.named_modules()}
    known: dict[int, list[str]] = {}
    whole = root.state_dict(keep_vars=True)  # alive, so that each id stays that of one tensor
    for name, value in whole.items():
        known.setdefault(id(value), []).append(name)
    found = []
    for number, stage in enumerate(model._engine.stages):
        for layer in _wrapped(stage):
            names = {}
            for name, value in layer.module.state_dict(keep_vars=True).items():
                names[name] = known.get(id(value), [])
                prefix = prefixes.get(id(layer.module))
                if not names[name] and prefix is not None:  # made for this state alone
                    names[name] = [f"{prefix}.{name}" if prefix else name]
                if not names[name]:
                    raise ModuleError(f"{layer!r} of stage {number} is no part of the root module")
            found.append((number, layer, names))
    return found


def _tensor(name: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise ModuleError(
            f"{name!r} is a {type(value).__name__}: a state that goes over ranks has tensors only"
        )
    return value


def _wrapped(layer: SupportsLayer) -> list[TorchLayer]:
    if isinstance(layer, TorchLayer):
        return [layer]
    if not isinstance(layer, Module):
        return []
    return [one for _, child in layer.named_children() for one in _wrapped(child)]


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

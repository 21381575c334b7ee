"""Layers, plain optimizers and objects of PyTorch in a checkpoint, by name.

A layer has its parameters by their names. An optimizer has the state of each parameter by the
parameter's name in its model, so that it fits the model on any mesh: ``NAME.steps``, a number, and
arrays such as ``NAME.mean``; and by their own names its numbers, such as ``lr``, and ``optimizer``,
the name of its class. A :class:`~mpimesh.ParallelOptimizer` has the same, and each loads what the
other saved.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count as count_up, takewhile
from types import ModuleType
from typing import Any

import numpy as np

from mpimesh.arrays import Array, HostArray, namespace
from mpimesh.arrays.dtypes import is_half, sum_dtype
from mpimesh.errors import DTypeError, ModuleError, ModuleStateError, ShapeError
from mpimesh.layout.boxes import Box, extent, flat_fragments, global_box, volume
from mpimesh.nn import Module, Parameter
from mpimesh.nn.parameter import Buffer, refuse_names
from mpimesh.optim import Optimizer
from mpimesh.optim.optimizer import MASTER, check_steps
from mpimesh.store.format import narrow_dtype
from mpimesh.store.parts import Parts, Saved, Value

__all__ = [
    "OPTIMIZER",
    "STEP",
    "STORED",
    "FlatSpan",
    "StateNames",
    "buffer_targets",
    "check_names",
    "has_names",
    "module_parts",
    "optimizer_parts",
    "parameter_target",
    "restored_module",
    "restored_optimizer",
    "restored_torch_optimizer",
    "state_parts",
    "state_target",
    "take_torch_state",
    "torch_optimizer_parts",
    "torch_state",
]

OPTIMIZER, STEP = "optimizer", "step"
"""Names of the class of an optimizer, and of a model's count of steps."""

Wanted = tuple[Mapping[str, Parts], Callable[[], None]]
"""The result of `Storable._restored_parts`."""


@dataclass(frozen=True, slots=True)
class StateNames:
    """The names that the state of an optimizer has in a flat dict.

    Attributes:
        separator: Stands between the parts of a name.
        head: The beginning of the names of what belongs to a parameter.
        prefix: The beginning of all names of one optimizer, where there are several.
    """

    separator: str
    head: str = ""
    prefix: str = ""

    def of(self, key: str, parameter: str = "") -> str:
        """Return the name of an entry in the state of a parameter, or of the optimizer itself."""
        inner = f"{self.head}{parameter}{self.separator}{key}" if parameter else key
        return self.prefix + inner

    def split(self, name: str) -> tuple[str, str]:
        """Return the parameter that a name is of, empty if of none, and the entry in its state."""
        inner = name.removeprefix(self.prefix)
        parameter, _, key = inner.removeprefix(self.head).rpartition(self.separator)
        return (parameter, key) if parameter and inner.startswith(self.head) else ("", inner)

    def numbered(self, number: int) -> StateNames:
        """Return the names of one of several optimizers."""
        return replace(self, prefix=f"{number}{self.separator}")

    def found_in(self, names: Collection[str]) -> list[StateNames]:
        """Return those of each optimizer whose state has these names."""
        several = map(self.numbered, count_up())
        return [*takewhile(lambda one: one.of(OPTIMIZER) in names, several)] or [self]


STORED = StateNames(".")
"""The names in a checkpoint: ``NAME.mean`` of a parameter, ``lr`` of the optimizer."""


@dataclass(frozen=True, slots=True)
class FlatSpan:
    """The elements that a rank has of an array, or of its block of it: neighbours in memory.

    Attributes:
        shape: The shape of the whole array.
        box: The block in it.
        start: The first element, counted in the block laid out flat.
        stop: The one after the last.
        is_flat: Whether arrays of it are flat; else they have the shape of the block.
    """

    shape: tuple[int, ...]
    box: Box
    start: int
    stop: int
    is_flat: bool = True

    @classmethod
    def block(cls, parameter: Parameter) -> FlatSpan:
        """Return all that this rank's layer has of a parameter."""
        return cls(parameter.global_shape, parameter.box, 0, parameter.size, is_flat=False)

    @property
    def extent(self) -> tuple[int, ...]:
        """The shape of an array of it."""
        return (self.stop - self.start,) if self.is_flat else extent(self.box)

    def parts(self, array: Array) -> Parts:
        """Return the boxes of this span, as views of an array of its elements.

        Shapes:
            array: :attr:`extent`.
        """
        dtype = np.dtype(array.dtype)
        if not self.is_flat:
            return Parts(self.shape, dtype, ((self.box, array),) if array.size else ())
        parts: list[tuple[Box, Array]] = []
        stop = 0
        for box in flat_fragments(extent(self.box), self.start, self.stop):
            start, stop = stop, stop + volume(box)
            part = array[start:stop].reshape(extent(box))
            parts.append((global_box(box, self.box), part))
        return Parts(self.shape, dtype, tuple(parts))


def check_names(
    what: str,
    missing: Iterable[str],
    unknown: Iterable[str],
    *,
    strict: bool,
    buffers: Collection[str] = (),
) -> None:
    """Return if a checkpoint has the names that it should, and no others; or if not `strict`.

    Args:
        what: The state that must have them.
        missing: The names that it lacks.
        unknown: Those that it has beside its own.
        strict: Whether to refuse them.
        buffers: The names of buffers, which older checkpoints lack.

    Raises:
        ModuleError: If it has not.
    """
    if strict:
        refuse_names(
            f"{what} has the names that it has in the whole model, each once",
            [*missing],
            [*unknown],
            buffers,
            ": rename them, or load with strict=False, which leaves as it is what is missing",
        )


# -- layers ---------------------------------------------------------------------------------------


def module_parts(module: Module) -> dict[str, Parts]:
    """Return what this rank has of the parameters and buffers of a layer. Local.

    Raises:
        ModuleStateError: If a parameter has no memory yet.
    """
    parts = {
        name: FlatSpan.block(parameter).parts(parameter.value())
        for name, parameter in module.named_parameters()
    }
    return parts | {name: Parts.all_of(one.value()) for name, one in module.named_buffers()}


def restored_module(module: Module, saved: Mapping[str, Saved | Value], *, strict: bool) -> Wanted:
    """Return where the state of a layer is read to; see `Storable._restored_parts`. Local.

    A model's count of steps is passed over.

    Raises:
        ModuleError: If names are missing or unknown, and `strict`.
        ShapeError: If a shape differs.
        DTypeError: If values are not of floating point.
        ModuleStateError: If a parameter has no memory yet.
    """
    named, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    known = {*named, *buffers}
    check_names(
        "the state of a layer",
        known - saved.keys(),
        saved.keys() - known - {STEP},
        strict=strict,
        buffers=buffers,
    )
    wanted = {
        name: parameter_target(name, parameter, saved[name], parameter.value())
        for name, parameter in named.items()
        if name in saved
    }
    return wanted | buffer_targets(buffers, saved), lambda: None


def buffer_targets(
    buffers: Mapping[str, Buffer], saved: Mapping[str, Saved | Value]
) -> dict[str, Parts]:
    """Return where buffers are read to: their memory. Local.

    Raises:
        MpimeshError: As :func:`parameter_target`.
    """
    wanted: dict[str, Parts] = {}
    for name, buffer in buffers.items():
        if name in saved:
            array, what = buffer.value(), f"buffer {name!r}"
            _checked_array(what, saved[name], array.shape)
            if isinstance(array, np.ndarray) and not array.flags.writeable:
                raise ModuleStateError(f"the memory of {what} is read-only, and is to be read into")
            wanted[name] = Parts.all_of(array)
    return wanted


def parameter_target(
    name: str,
    parameter: Parameter,
    saved: Saved | Value,
    values: Array,
    span: FlatSpan | None = None,
) -> Parts:
    """Return where values of a parameter are read to: what this rank has of it. Local.

    Args:
        name: Its name.
        parameter: The parameter.
        saved: What there is of it.
        values: The memory.
        span: What that is of the parameter; None if it is this rank's block.

    Raises:
        ModuleError: If what is saved is no array.
        ShapeError: If it has another shape.
        DTypeError: If it is not of floating point.
        ModuleStateError: If the memory cannot be written.
    """
    kind = _checked_array(f"parameter {name!r}", saved, parameter.global_shape).dtype
    if kind.kind != "f" and not is_half(kind):
        raise DTypeError(f"parameter {name!r} must be of floating point, and was saved as {kind}")
    if isinstance(values, np.ndarray) and not values.flags.writeable:
        raise ModuleStateError(
            f"the memory of parameter {name!r} is read-only, and is to be read into: give it "
            "other, parameter.data = parameter.data.copy()"
        )
    return (FlatSpan.block(parameter) if span is None else span).parts(values)


def _checked_array(what: str, saved: Saved | Value, shape: tuple[int, ...]) -> Saved:
    if not isinstance(saved, Saved):
        raise ModuleError(f"{what} was saved as {type(saved).__name__}, and is an array")
    if saved.shape != shape:
        raise ShapeError(f"{what} must have its shape {shape}, and was saved with {saved.shape}")
    return saved


# -- optimizers -----------------------------------------------------------------------------------


def optimizer_parts(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Parts | Value]:
    """Return what this rank has of the state of a plain optimizer. Local.

    Args:
        optimizer: The optimizer.
        names: The names of parameters by their ids.

    Raises:
        ModuleError: If a parameter has no name there, or two have one.
        ModuleStateError: If the optimizer is a :class:`~mpimesh.ParallelOptimizer`'s.
    """
    spans = _named_spans(optimizer, names)
    return state_parts(optimizer.live_state(), spans)


def restored_optimizer(
    optimizer: Optimizer,
    names: Mapping[int, str],
    saved: Mapping[str, Saved | Value],
    *,
    strict: bool,
) -> Wanted:
    """Return where the state of a plain optimizer is read to; see `Storable`. Local.

    Of names that it does not know it refuses those of other parameters in `names`: what else is
    there may be of layers that other ranks have.

    Raises:
        MpimeshError: As :func:`optimizer_parts` and :func:`state_target`.
    """
    spans = _named_spans(optimizer, names)
    foreign = {*names.values()} - {name for name, _, _ in spans}
    check_names(
        f"a state of {type(optimizer).__name__}",
        (),
        (key for key in saved if STORED.split(key)[0] in foreign),
        strict=strict,
    )
    state, wanted = state_target(
        optimizer,
        spans,
        saved,
        strict=strict,
        current=optimizer.live_state(),
        xp=namespace(spans[0][1].value()) if spans else np,
    )
    return wanted, partial(optimizer.load_state_dict, state)


def _named_spans(
    optimizer: Optimizer, names: Mapping[int, str]
) -> list[tuple[str, Parameter, FlatSpan]]:
    kind = type(optimizer).__name__
    if optimizer.is_lent:
        raise ModuleStateError(
            f"this {kind} was given to a ParallelOptimizer, which knows what its parameters are: "
            "put that into the tree instead"
        )
    unnamed = [one for one in optimizer.params if id(one) not in names]
    if unnamed:
        raise ModuleError(
            f"the state of {kind} is saved by the names of its parameters, and {unnamed[0]!r} is "
            'of no model in the tree: save both in one tree, {"model": model, "optimizer": '
            "optimizer}"
        )
    spans = [(names[id(one)], one, FlatSpan.block(one)) for one in optimizer.params]
    if len({name for name, _, _ in spans}) < len(spans):
        raise ModuleError(
            f"{kind} has parameters of several models that have the same names; make an optimizer "
            "for each model"
        )
    return spans


def state_parts(
    state: Mapping[str, Any], spans: Sequence[tuple[str, Parameter, FlatSpan]]
) -> dict[str, Parts | Value]:
    """Return a state of an optimizer by name. Local.

    Args:
        state: As :meth:`Optimizer.state_dict` gives it; of a parameter of which this rank has a
            part the arrays are flat.
        spans: For each parameter its name and the part.
    """
    found: dict[str, Parts | Value] = {key: state[key] for key in state if key != "params"}
    for (name, _, span), own in zip(spans, state["params"], strict=True):
        found |= {
            STORED.of(key, name): int(value) if key == "steps" else span.parts(value)
            for key, value in own.items()
        }
    return found


def state_target(
    optimizer: Optimizer,
    spans: Sequence[tuple[str, Parameter, FlatSpan]],
    saved: Mapping[str, Saved | Value],
    *,
    strict: bool,
    current: Mapping[str, Any],
    xp: ModuleType,
) -> tuple[dict[str, Any], dict[str, Parts]]:
    """Return a state whose arrays are new memory, and where they are read to. Local.

    Args:
        optimizer: The optimizer that is to take over the state.
        spans: The name of each of its parameters, and which part of it this rank has.
        saved: What there is, by name.
        strict: Whether names that are missing are refused; else what is missing is as in `current`.
        current: The state that it has now, of the same parts.
        xp: The library that is to have the arrays.

    Raises:
        ModuleError: If it does not fit the optimizer, or lacks something.
        DTypeError: If an array is not of floating point.
        ShapeError: If an array has another shape than its whole parameter.
    """
    kind = type(optimizer).__name__
    numbers = (OPTIMIZER, *optimizer.numbers)
    missing = {*numbers, *(STORED.of("steps", name) for name, _, _ in spans)} - saved.keys()
    if strict and missing:
        raise ModuleError(
            f"the state of {kind} lacks {sorted(missing)}: save and load the same parameters and "
            "kind of optimizer, or load with strict=False"
        )
    by_name: dict[str, dict[str, Any]] = {}
    for key, value in saved.items():
        name, inner = STORED.split(key)
        by_name.setdefault(name, {})[inner] = value
    params: list[dict[str, Any]] = []
    for (name, parameter, _), own in zip(spans, current["params"], strict=True):
        # What master values there are follow the parameter's, unless some were saved.
        entry = {} if strict else {key: own[key] for key in own if key != MASTER}
        who = f"parameter {name!r}"
        for key, value in by_name.get(name, {}).items():
            if key == "steps":
                entry[key] = check_steps(who, {key: value})
            else:
                what = f"{key!r} in the state of {who}"
                entry[key] = _checked_array(what, value, parameter.global_shape)
        params.append(entry)
    state = {key: saved.get(key, current[key]) for key in numbers}
    checked = optimizer.check_state(
        {
            **state,
            "params": [
                {key: _like(value, one.shape) for key, value in entry.items()}
                for (_, one, _), entry in zip(spans, params, strict=True)
            ],
        },
        [parameter for _, parameter, _ in spans],
    )
    wanted: dict[str, Parts] = {}
    names = {*optimizer.state_names(checked), MASTER}
    unknown: list[str] = []
    for (name, parameter, span), entry in zip(spans, params, strict=True):
        dtype = sum_dtype(parameter.value().dtype if parameter.dtype is None else parameter.dtype)
        for key in [key for key, value in entry.items() if isinstance(value, Saved)]:
            if entry["steps"] and key in names and (key != MASTER or dtype != parameter.dtype):
                entry[key] = xp.empty(span.extent, dtype)
                wanted[STORED.of(key, name)] = span.parts(entry[key])
            else:
                del entry[key]
                unknown += [] if key in names else [STORED.of(key, name)]
    check_names(f"a state of {kind}", (), unknown, strict=strict)
    return {**state, "params": params}, wanted


def _like(value: Any, shape: tuple[int, ...]) -> Any:
    """Return what has the dtype of an array and another shape, and takes no memory."""
    dtype = getattr(value, "dtype", None)
    return value if dtype is None else np.broadcast_to(np.zeros((), dtype), shape)


# -- PyTorch --------------------------------------------------------------------------------------


def torch_state(obj: Any) -> Any:
    """Return a tensor of PyTorch as an array, or the state of a module or optimizer as a tree.

    Local. Arrays are the tensors' own memory; but tensors of devices in a state are copied.

    Raises:
        ModuleError: If a tensor is split over ranks by PyTorch, is not dense, or is the thing
            itself and on a device.
        DTypeError: If NumPy and ml_dtypes have no such dtype.
    """
    torch = sys.modules["torch"]
    if not isinstance(obj, torch.Tensor):
        return _as_tree(obj.state_dict(), torch)
    if obj.device.type != "cpu":
        raise ModuleError(
            f"a tensor is saved, and loaded into, where it lies in the host's memory; it is on "
            f"{obj.device}: give tensor.cpu(), or the module that it is in"
        )
    return _as_array(obj, torch)


def _mapped(leaf: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree with `leaf` of what is in its dicts, lists and tuples."""
    if isinstance(tree, Mapping):
        return {key: _mapped(leaf, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_mapped(leaf, value) for value in tree)
    return leaf(tree)


def _as_tree(state: Any, torch: Any) -> Any:
    return _mapped(lambda x: _as_array(x, torch) if isinstance(x, torch.Tensor) else x, state)


def _as_array(tensor: Any, torch: Any) -> HostArray:
    if hasattr(tensor, "device_mesh"):
        raise ModuleError(
            "a DTensor of PyTorch lies on several ranks, as fully_shard of PyTorch leaves "
            "parameters, and is not saved here: give tensor.full_tensor() of each, or train the "
            "module by mpimesh.fully_shard, and save that"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ModuleError(
            f"a tensor that is saved is dense and has memory, got one of layout {tensor.layout} "
            f"and {tensor.dtype} on {tensor.device}"
        )
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    try:
        array: HostArray = plain.numpy()
    except TypeError:
        dtype = narrow_dtype(str(plain.dtype).removeprefix("torch."))
        array = plain.view(torch.uint16 if dtype.itemsize == 2 else torch.uint8).numpy().view(dtype)
    return array


def take_torch_state(obj: Any, tree: Any) -> None:
    """Have a module or an optimizer of PyTorch take over a state, as :func:`torch_state` gave it.

    Local. A module takes all of it or, on an error, nothing.

    Raises:
        ModuleError: If names are missing or unknown, or PyTorch refuses it.
        ShapeError: If a shape differs.
    """
    torch = sys.modules["torch"]
    if not isinstance(tree, Mapping):
        raise ModuleError(f"a state of {type(obj).__name__} is a dict, got {type(tree).__name__}")
    state = OrderedDict(_as_tensors(tree, torch))
    if isinstance(obj, torch.nn.Module):
        expected = obj.state_dict()
        check_names(
            f"a state of {type(obj).__name__}",
            expected.keys() - state.keys(),
            state.keys() - expected.keys(),
            strict=True,
        )
        for name, value in expected.items():
            shape = getattr(state[name], "shape", None)
            if isinstance(value, torch.Tensor) and shape != value.shape:
                raise ShapeError(
                    f"{name!r} must have its shape {tuple(value.shape)}, and was saved with "
                    f"{None if shape is None else tuple(shape)}"
                )
        state._metadata = getattr(expected, "_metadata", {})  # type: ignore[attr-defined]
    elif isinstance(state.get("state"), Mapping):
        state["state"] = {
            int(key) if isinstance(key, str) and key.isdecimal() else key: value
            for key, value in state["state"].items()
        }
    try:
        obj.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError) as error:
        raise ModuleError(f"PyTorch refuses the state of {type(obj).__name__}: {error}") from error


def has_names(optimizer: Any, names: Mapping[int, str]) -> bool:
    """Tell whether an optimizer of PyTorch can be saved by the names of its parameters.

    Else PyTorch's own state, by numbers, is all there is.
    """
    groups = optimizer.param_groups
    return all(id(one) in names for group in groups for one in group["params"])


def torch_optimizer_parts(optimizer: Any, names: Mapping[int, str]) -> dict[str, Parts | Value]:
    """Return what this rank has of the state of an optimizer of PyTorch, by names. Local.

    As that of a plain optimizer: ``NAME.exp_avg`` and the like, and ``param_groups``, which has
    the numbers of each.

    Args:
        optimizer: The optimizer.
        names: By the id of a tensor its name in the whole model.

    """
    torch = sys.modules["torch"]
    groups = optimizer.param_groups
    numbers = [{key: group[key] for key in group if key != "params"} for group in groups]
    parts: dict[str, Parts | Value] = {"param_groups": _mapped(partial(_number, torch), numbers)}
    for group in groups:
        for one in group["params"]:
            for key, value in optimizer.state.get(one, {}).items():
                entry = _as_tree(value, torch)
                is_array = isinstance(entry, np.ndarray)
                name = STORED.of(key, names[id(one)])
                parts[name] = Parts.all_of(entry) if is_array else entry
    return parts


def restored_torch_optimizer(
    optimizer: Any, names: Mapping[int, str], saved: Mapping[str, Saved | Value], *, strict: bool
) -> Wanted:
    """Return where the state of an optimizer of PyTorch is read to, by names. Local.

    See :func:`torch_optimizer_parts`, and `Storable._restored_parts`.

    Raises:
        ModuleError: If it has other groups.
    """
    torch = sys.modules["torch"]
    state = optimizer.state_dict()
    groups: Any = saved.get("param_groups", [] if strict else state["param_groups"])
    if len(groups) != len(state["param_groups"]):
        raise ModuleError(
            f"{type(optimizer).__name__} has {len(state['param_groups'])} param_groups, and was "
            f"saved with {len(groups)}"
        )
    wanted: dict[str, Parts] = {}
    entries: dict[int, dict[str, Any]] = {}
    ordered = [one for group in optimizer.param_groups for one in group["params"]]
    for number, one in enumerate(ordered):
        prefix = f"{names[id(one)]}."
        found = {key[len(prefix) :]: key for key in saved if key.startswith(prefix)}
        for key, full in found.items():
            entry = saved[full]
            if "." in key:
                continue  # of a parameter whose name begins with this one's
            if isinstance(entry, Saved):
                entry = np.empty(entry.shape, entry.dtype)
                wanted[full] = Parts.all_of(entry)
            entries.setdefault(number, {})[key] = entry

    def take() -> None:
        fresh = [
            {**old, **{key: _like_number(value, old.get(key), torch) for key, value in new.items()}}
            for old, new in zip(state["param_groups"], groups, strict=True)
        ]
        fresh = [
            {**new, "params": old["params"]}
            for old, new in zip(state["param_groups"], fresh, strict=True)
        ]
        optimizer.load_state_dict({"state": _as_tensors(entries, torch), "param_groups": fresh})

    return wanted, take


def _number(torch: Any, value: Any) -> Any:
    """Return a tensor among the numbers of a group as a number, or a list of them."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.item() if value.numel() == 1 else value.tolist()


def _like_number(value: Any, old: Any, torch: Any) -> Any:
    """Return a number as a tensor where the one before it is one."""
    return torch.full_like(old, value) if isinstance(old, torch.Tensor) else value


def _as_tensors(state: Any, torch: Any) -> Any:
    return _mapped(partial(_as_tensor, torch), state)


def _as_tensor(torch: Any, value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    array = np.require(value, requirements=["C", "W"])
    try:
        return torch.from_numpy(array)
    except TypeError:
        plain = torch.from_numpy(array.view(f"u{array.itemsize}"))
        return plain.view(getattr(torch, array.dtype.name))

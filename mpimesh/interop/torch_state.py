"""The state of a whole model that is spread over stages, as PyTorch names it."""

from __future__ import annotations

from collections.abc import Mapping

from mpimesh.arrays import to_numpy
from mpimesh.errors import ModuleError, ShapeError
from mpimesh.interop.torch_arrays import as_array, as_tensor
from mpimesh.interop.torch_layer import TorchLayer
from mpimesh.interop.torch_library import torch
from mpimesh.nn import Module
from mpimesh.nn.protocol import SupportsLayer
from mpimesh.parallel.model import ParallelModel

__all__ = ["full_state_dict", "load_full_state_dict"]


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
    given: set[str] = set()
    for number, layer, names in _places(model, root):
        buffers = dict(layer.module.named_buffers(remove_duplicate=False))
        for name, value in layer.module.state_dict().items():
            if given.issuperset(names[name]):  # tied to one before
                continue
            given.update(names[name])
            mine = as_array(value).copy() if number in engine.local else None
            whole = engine.pipe.broadcast(mine, root=None).resolve()
            if name in buffers:  # those of replicas differ
                whole = engine.data.broadcast(whole, root=0).resolve()
            for place in names[name]:
                state[place] = as_tensor(to_numpy(whole)).clone()
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
    for number, layer, names in _places(model, root):
        if number in model._engine.local:
            # Of several names of one tensor the last counts, as where PyTorch loads the root.
            layer.module.load_state_dict({name: state[names[name][-1]] for name in names})


def _places(
    model: ParallelModel, root: torch.nn.Module
) -> list[tuple[int, TorchLayer, dict[str, list[str]]]]:
    """Return each wrapped module with its stage, and all names in `root` of what is in its state.

    A tensor that stands in several modules, or in one that stands in several places, has several.
    """
    prefixes = {id(module): name for name, module in root.named_modules()}
    known: dict[int, list[str]] = {}
    whole = root.state_dict(keep_vars=True)  # kept, so that each id stays that of one tensor
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

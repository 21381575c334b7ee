"""The state of a whole model that is spread over stages, as PyTorch names it."""

from __future__ import annotations

from mpimesh.arrays import to_numpy
from mpimesh.errors import ModuleError
from mpimesh.interop.torch_arrays import as_array, as_tensor
from mpimesh.interop.torch_layer import TorchLayer
from mpimesh.interop.torch_library import torch
from mpimesh.nn import Module
from mpimesh.nn.protocol import SupportsLayer
from mpimesh.parallel.model import ParallelModel

__all__ = ["full_state_dict"]


def full_state_dict(model: ParallelModel, root: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what ``root.state_dict()`` is in one process: all values, and buffers. Collective.

    ``root.load_state_dict`` takes it, on this mesh or without any.

    Args:
        model: A pipeline or replicas of wrapped modules.
        root: The module whose parts were wrapped, the same on every rank; parts that were not are
            taken as they are here.

    Raises:
        ModuleError: If a wrapped module is no part of `root`.

    Cost:
        Two broadcasts for each parameter and buffer, over the stages.
    """
    engine = model._engine
    names = {id(module): name for name, module in root.named_modules()}
    state = {name: value.detach().clone() for name, value in root.state_dict().items()}
    for number, stage in enumerate(engine.stages):
        for layer in _wrapped(stage):
            if id(layer.module) not in names:
                raise ModuleError(f"{layer!r} of stage {number} is no part of the root module")
            prefix = names[id(layer.module)]
            buffers = {name for name, _ in layer.module.named_buffers()}
            for name, value in layer.module.state_dict().items():
                mine = as_array(value).copy() if number in engine.local else None
                whole = engine.pipe.broadcast(mine, root=None).resolve()
                if name in buffers:  # those of replicas differ
                    whole = engine.data.broadcast(whole, root=0).resolve()
                whole = to_numpy(whole)
                state[f"{prefix}.{name}" if prefix else name] = as_tensor(whole).clone()
    return state


def _wrapped(layer: SupportsLayer) -> list[TorchLayer]:
    if isinstance(layer, TorchLayer):
        return [layer]
    if not isinstance(layer, Module):
        return []
    return [one for _, child in layer.named_children() for one in _wrapped(child)]

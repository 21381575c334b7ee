"""Memory and first values for what a module of PyTorch has on the "meta" device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mpimesh.errors import ModuleError
from mpimesh.interop.torch_library import torch
from mpimesh.interop.torch_parameter import TorchParameter
from mpimesh.interop.torch_random import seeded

__all__ = ["give_first_values"]


def give_first_values(
    module: torch.nn.Module, parameters: Iterable[TorchParameter], *, seed: int, index: int
) -> None:
    """Give memory to what `module` lacks, and the values of the modules' ``reset_parameters``.

    Local. They are drawn by `seed` and `index` alone. What has memory keeps its values. A module is
    reset after those in it, as it is made after them.

    Args:
        module: The module.
        parameters: All of its parameters.
        seed: The seed of the model.
        index: The layer's place.

    Raises:
        ModuleError: If a module in it that lacks memory has no ``reset_parameters``, or if that
            leaves a parameter or a buffer without values.
    """
    # A module stands before those in it.
    owners = [*reversed([*module.modules()])]
    lacking = [owner for owner in owners if any(one.is_meta for one in _tensors(owner).values())]
    if not lacking:
        return
    resets = [_reset_of(owner, module) for owner in lacking]
    # Of all modules: one may set what those in it have, too.
    held = {id(one): one for owner in owners for one in _tensors(owner).values()}
    kept = [(one, one.detach().clone()) for one in held.values() if not one.is_meta]
    places = [
        (owner, name)
        for owner in lacking
        for name, one in _tensors(owner).items()
        if one.is_meta and one.numel()
    ]
    for parameter in parameters:
        parameter.give_memory()
    with seeded(seed, index), torch.no_grad():
        for owner in lacking:
            for name, buffer in owner._buffers.items():
                if buffer is not None and buffer.is_meta:
                    owner._buffers[name] = torch.empty_like(buffer, device="cpu")
        blanks = [_Blank.make(owner, name) for owner, name in places]
        for reset in resets:
            reset()
        for tensor, values in kept:
            tensor.copy_(values)
    left = [blank.name for blank in blanks if blank.is_left]
    if left:
        raise ModuleError(
            f"reset_parameters() in {type(module).__name__} gives no values to {left}, which the "
            "module has on the meta device: set all parameters and buffers there, or make the "
            "module with memory"
        )


@dataclass(frozen=True, slots=True)
class _Blank:
    """A tensor that is to get its first values.

    Attributes:
        owner: The module that has it.
        name: Its name there.
        tensor: The tensor. It begins with values that nobody gives: NaN, or an odd number.
        version: How often PyTorch had seen it change.
    """

    owner: torch.nn.Module
    name: str
    tensor: torch.Tensor
    version: int

    @classmethod
    def make(cls, owner: torch.nn.Module, name: str) -> _Blank:
        tensor = _tensors(owner)[name]
        tensor.fill_(_mark(tensor))
        return cls(owner, name, tensor, tensor._version)

    @property
    def is_left(self) -> bool:
        """Whether nobody has written to it. PyTorch does not see what is written by ``.data``."""
        tensor = self.tensor
        found = _tensors(self.owner).get(self.name)
        if found is None or found is not tensor or found._version != self.version:
            return False
        mark = torch.full_like(tensor, _mark(tensor))
        return bool(((tensor == mark) | (tensor != tensor)).all())


def _mark(tensor: torch.Tensor) -> float:
    return float("nan") if tensor.is_floating_point() or tensor.is_complex() else 83


def _reset_of(owner: torch.nn.Module, module: torch.nn.Module) -> Callable[[], object]:
    """Return what gives first values to what `owner` itself has."""
    # PyTorch's own attention has an underscore there.
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(owner, name, None)
        if callable(reset):
            return reset  # type: ignore[no-any-return]
    where = "" if owner is module else f" in {type(module).__name__}"
    raise ModuleError(
        f"{type(owner).__name__}{where} has parameters or buffers on the meta device, and no "
        "reset_parameters() to give them first values: write one, or make the module with memory"
    )


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of `module` itself."""
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}

"""Refusals of objects of PyTorch without their wrapping; PyTorch is not imported."""

from __future__ import annotations

import sys
from types import FunctionType

__all__ = ["layer_advice", "loss_advice", "tensor_advice"]


def layer_advice(one: object) -> str:
    """Return what to do with a module that is no layer; nothing if it is not PyTorch's."""
    return _if_torch(one, "; for a module of PyTorch, use mpimesh.interop.torch.wrap")


def loss_advice(one: object) -> str:
    """Return what to do with a module that is no loss; nothing if it is not PyTorch's."""
    return _if_torch(one, "; for a loss of PyTorch, use mpimesh.interop.torch.wrap_loss") or (
        "; for a function of PyTorch's tensors, use mpimesh.interop.torch.wrap_loss"
        if isinstance(one, FunctionType) and "torch" in sys.modules
        else ""
    )


def tensor_advice(name: str, one: object) -> str:
    """Return what to do with the tensor called `name`; nothing if it is not PyTorch's."""
    return _if_torch(one, f"; for a tensor of PyTorch, use {name}.numpy()")


def _if_torch(one: object, advice: str) -> str:
    # Any class that PyTorch has made, or that derives from one; or a function or a class of its.
    return advice if any(_package(this) == "torch" for this in (one, *type(one).__mro__)) else ""


def _package(one: object) -> str:
    return str(getattr(one, "__module__", "")).partition(".")[0]

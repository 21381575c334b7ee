"""What is said to objects of PyTorch that come without their wrapping; PyTorch is not imported."""

from __future__ import annotations

__all__ = ["layer_advice", "loss_advice", "tensor_advice"]


def layer_advice(one: object) -> str:
    """Return what to do with a module that is no layer; nothing if it is not PyTorch's."""
    return _if_torch(one, "; for a module of PyTorch, use mpimesh.interop.torch.wrap")


def loss_advice(one: object) -> str:
    """Return what to do with a module that is no loss; nothing if it is not PyTorch's."""
    return _if_torch(one, "; for a loss of PyTorch, use mpimesh.interop.torch.wrap_loss")


def tensor_advice(name: str, one: object) -> str:
    """Return what to do with the tensor called `name`; nothing if it is not PyTorch's."""
    return _if_torch(one, f"; for a tensor of PyTorch, use {name}.numpy()")


def _if_torch(one: object, advice: str) -> str:
    # Any class that PyTorch has made, or that derives from one.
    return advice if any(_package(kind) == "torch" for kind in type(one).__mro__) else ""


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]

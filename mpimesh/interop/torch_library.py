"""PyTorch itself, or an error that says how to get it."""

from __future__ import annotations

from mpimesh.errors import MissingPackageError

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingPackageError(
        "mpimesh.interop.torch needs PyTorch, which is not installed: pip install torch ml_dtypes"
    ) from None

__all__ = ["torch"]

"""The same memory as an array of NumPy and as a tensor of PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.errors import DTypeError, ModuleError
from mpimesh.interop.host_memory import host_array, plain_array
from mpimesh.interop.torch_library import torch

__all__ = ["as_array", "as_tensor", "host_leaf"]

_BFLOAT16 = "bfloat16"  # NumPy has it from ml_dtypes, and PyTorch does not know that


def as_tensor(x: Any) -> torch.Tensor:
    """Return an array as a tensor: its own memory, also where NumPy may only read it.

    A tensor becomes another one, which autograd does not know yet.

    Raises:
        ModuleError: If it is memory of a device.
        DTypeError: If PyTorch has no such dtype.
    """
    array = host_leaf(x)
    dtype = array.dtype
    if dtype.name == _BFLOAT16:
        return torch.from_numpy(plain_array(array.view(np.uint16))).view(torch.bfloat16)
    try:
        return torch.from_numpy(plain_array(array))
    except TypeError:
        raise DTypeError(f"PyTorch has no dtype {dtype}") from None


def host_leaf(x: Any) -> HostArray:
    """Return an array, or a tensor, as an array in the host's memory.

    Raises:
        ModuleError: If it is memory of a device.
        DTypeError: If it holds no numbers, or NumPy has no such dtype.
    """
    return as_array(x) if isinstance(x, torch.Tensor) else host_array(x)


def as_array(tensor: torch.Tensor) -> HostArray:
    """Return a tensor as an array: its own memory.

    Raises:
        ModuleError: If it is not dense, or not in the host's memory.
        DTypeError: If NumPy has no such dtype.
    """
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ModuleError(
            "what a module takes and gives must be dense and in the host's memory, got a tensor "
            f"of layout {tensor.layout} on {tensor.device}"
        )
    plain = tensor.detach().resolve_conj().resolve_neg()
    array: HostArray
    if plain.dtype == torch.bfloat16:
        array = plain.view(torch.uint16).numpy().view(_bfloat16())
        return array
    try:
        array = plain.numpy()
    except TypeError:
        raise DTypeError(f"NumPy has no dtype {tensor.dtype}") from None
    return array


def _bfloat16() -> Any:
    try:
        import ml_dtypes
    except ImportError:
        raise DTypeError(
            "NumPy has no bfloat16 of its own: pip install ml_dtypes, or use float32"
        ) from None
    return np.dtype(ml_dtypes.bfloat16)

"""Weights in a safetensors file, of which a rank reads only what it needs."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from mpimesh.arrays import Array, DType
from mpimesh.errors import ModelError
from mpimesh.models.config import INSTALL

__all__ = ["Weights"]


class Weights:
    """An open file of weights, to be used as a context manager. Local.

    Args:
        path: The file.
        dtype: What the values are rounded to.

    Attributes:
        read_bytes: Bytes of the file that were read so far, without its header.

    Raises:
        ModelError: If the library safetensors is missing, or the file cannot be opened.
    """

    def __init__(self, path: Path, dtype: DType) -> None:
        self._path = path
        self._dtype = dtype
        self.read_bytes = 0
        try:
            safetensors = importlib.import_module("safetensors")
        except ImportError as error:
            raise ModelError(f"cannot read weights, {error}: {INSTALL}") from None
        try:
            self._file: Any = safetensors.safe_open(path, framework="np")
            self._file.__enter__()
        except (OSError, safetensors.SafetensorError) as error:
            raise ModelError(f"cannot read {path}: {error}") from None
        self._names = frozenset(self._file.keys())

    def read(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...] = ()) -> Array:
        """Return the tensor `name`, or a part of it.

        Shapes:
            result: that of ``tensor[part]``, C-contiguous.

        Args:
            name: Its name.
            shape: What its whole shape must be.
            part: What to read of it along each axis; nothing is all.

        Raises:
            ModelError: If there is no such tensor, or its shape differs.
        """
        for known in (name, f"bert.{name}"):
            if known in self._names:
                found = self._file.get_slice(known)
                break
        else:
            raise ModelError(f"{self._path} has no tensor {name}")
        if tuple(found.get_shape()) != shape:
            raise ModelError(
                f"{self._path}: tensor {name} must have shape {shape} as its config.json says, "
                f"got {tuple(found.get_shape())}"
            )
        values = found[part or tuple(slice(None) for _ in shape)]
        self.read_bytes += values.nbytes
        return np.ascontiguousarray(values, dtype=self._dtype)

    def __enter__(self) -> Self:
        """Return the open file."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the file."""
        self._file.__exit__(kind, error, traceback)

"""Weights in a safetensors file, of which a rank reads only what it needs."""

from __future__ import annotations

import importlib
import os
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from mpimesh.arrays import Array, DType
from mpimesh.errors import ModelError
from mpimesh.models.config import INSTALL

__all__ = ["Weights", "fingerprint"]

_KINDS = ("F64", "F32", "F16", "BF16")
_SAMPLES = 64
_SAMPLE_BYTES = 4096


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
            raise ModelError(f"cannot read {path}: {error}{_hint(path)}") from None
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
        kind = found.get_dtype()
        if kind not in _KINDS:
            raise ModelError(
                f"{self._path}: tensor {name} holds {kind}, which is not read here: only "
                f"{', '.join(_KINDS)}"
            )
        if tuple(found.get_shape()) != shape:
            raise ModelError(
                f"{self._path}: tensor {name} must have shape {shape} as its config.json says, "
                f"got {tuple(found.get_shape())}"
            )
        if kind == "BF16":
            _learn_bfloat16(self._path)
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


def fingerprint(path: Path) -> str:
    """Return a text by which ranks tell whether they have the same file. Local.

    It is made of the file's size, its first bytes, which are the header or much of it, and samples
    of all the rest: weights that were trained differently differ in all of them.

    Raises:
        ModelError: If the file cannot be read.

    Cost:
        Reads 260 KiB.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest = 0
            for number in range(_SAMPLES + 1):
                file.seek(max(0, size - _SAMPLE_BYTES) * number // _SAMPLES)
                digest = zlib.crc32(file.read(_SAMPLE_BYTES), digest)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    return f"{size} bytes, {digest:08x}"


def _learn_bfloat16(path: Path) -> None:
    """Let NumPy know bfloat16, by which safetensors asks it for these values."""
    try:
        importlib.import_module("ml_dtypes")
    except ImportError as error:
        raise ModelError(f"cannot read bfloat16 from {path}, {error}: {INSTALL}") from None


def _hint(path: Path) -> str:
    """Return what to do where the weights are there, but otherwise."""
    others = ("pytorch_model.bin", "model.safetensors.index.json", "tf_model.h5")
    found = [name for name in others if not path.exists() and (path.parent / name).exists()]
    return f"; there is {found[0]}: save the weights as one safetensors file" if found else ""

"""Weights in a safetensors file, of which a rank reads only what it needs."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from mpimesh.arrays import Array, DType
from mpimesh.errors import DTypeError, ModelError, StoreError
from mpimesh.layout.boxes import extent, volume, whole
from mpimesh.store.format import read_manifest
from mpimesh.store.reading import FileReader

__all__ = ["Weights", "fingerprint"]

_KINDS = ("float64", "float32", "float16", "bfloat16")
_SAMPLES = 64
_SAMPLE_BYTES = 4096


class Weights:
    """An open file of weights, to be used as a context manager. Local.

    Args:
        path: The file.
        dtype: What the values are rounded to.

    Attributes:
        read_bytes: Bytes of weights that were read so far.

    Raises:
        ModelError: If the file cannot be opened, or is damaged.
    """

    def __init__(self, path: Path, dtype: DType) -> None:
        self._path = path
        self._dtype = dtype
        self.read_bytes = 0
        try:
            folder, manifest = read_manifest(path)
        except (StoreError, DTypeError) as error:
            raise ModelError(f"{error}{_hint(path)}") from None
        self._arrays = manifest.arrays
        self._reader = FileReader(folder, manifest)

    def read(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...] = ()) -> Array:
        """Return the tensor `name`, or a part of it.

        Shapes:
            result: that of ``tensor[part]``, C-contiguous.

        Args:
            name: Its name.
            shape: What its whole shape must be.
            part: What to read of it along each axis; nothing is all.

        Raises:
            ModelError: If there is no such tensor, its shape differs, or it cannot be read.
        """
        entry = self._arrays.get(name) or self._arrays.get(f"bert.{name}")
        if entry is None:
            raise ModelError(f"{self._path} has no tensor {name}")
        if entry.dtype.name not in _KINDS:
            raise ModelError(
                f"{self._path}: tensor {name} holds {entry.dtype}, which is not read here: only "
                f"{', '.join(_KINDS)}"
            )
        if entry.shape != shape:
            raise ModelError(
                f"{self._path}: tensor {name} must have shape {shape} as its config.json says, "
                f"got {entry.shape}"
            )
        ranges = [each.indices(size)[:2] for each, size in zip(part, shape, strict=False)]
        box = (*ranges, *whole(shape)[len(ranges) :])
        values = np.empty(extent(box), self._dtype)
        try:
            for piece in entry.pieces:
                self._reader.read(piece, entry, box, values)
        except StoreError as error:
            raise ModelError(str(error)) from None
        self.read_bytes += volume(box) * entry.dtype.itemsize
        return values

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
        self._reader.close()


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


def _hint(path: Path) -> str:
    """Return what to do where the weights are there, but otherwise."""
    others = ("pytorch_model.bin", "model.safetensors.index.json", "tf_model.h5")
    found = [name for name in others if not path.exists() and (path.parent / name).exists()]
    return f"; there is {found[0]}: save the weights as one safetensors file" if found else ""

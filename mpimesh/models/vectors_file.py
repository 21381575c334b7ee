"""Vectors into a .npy file, some rows at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np

from mpimesh.arrays import DType, HostArray
from mpimesh.errors import SentencesError

__all__ = ["VectorsFile"]


class VectorsFile:
    """A .npy file that grows by rows, and gets its name when it is whole. Local.

    It is written beside the place where it belongs, under the name with the process and ``.part``
    added, and :meth:`finish` renames it: who reads the file finds all of it, or the one before. To
    be used as a context manager, which removes what is not finished.

    Args:
        path: The file's name, which ends with .npy. If it is a symbolic link, what it leads to is
            replaced.
        width: The length of a row.
        dtype: Of the values.

    Raises:
        SentencesError: If no such file can be written there; so do all methods.
    """

    def __init__(self, path: Path, width: int, dtype: DType) -> None:
        self._name = path
        self._width, self._dtype = width, np.dtype(dtype)
        self._rows = 0
        self._file: BinaryIO | None = None
        try:
            if path == Path():
                raise SentencesError("cannot write the vectors: give a name that ends with .npy")
            self._path = path.resolve()
            if self._path.is_dir():
                raise SentencesError(f"cannot write {path}: it is a folder")
            if self._path.exists() and not self._path.is_file():
                raise SentencesError(f"cannot write {path}: it is no ordinary file")
            if not self._path.parent.is_dir():
                raise SentencesError(f"cannot write {path}: there is no folder {path.parent}")
            if path.suffix != ".npy":
                raise SentencesError(
                    f"cannot write {path}: vectors are written as .npy, so the name must end so"
                )
            self._part = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
            # A link that somebody put there would lead to a file of another name.
            self._part.unlink(missing_ok=True)
            self._file = self._part.open("xb")
            self._start = self._write_header()
        except (OSError, ValueError, RuntimeError) as error:
            self.close()
            raise self._problem(error) from None

    def append(self, vectors: HostArray) -> None:
        """Write more rows.

        Shapes:
            vectors: (rows, width), of the dtype.
        """
        try:
            self._open.write(np.ascontiguousarray(vectors, self._dtype).data)
        except OSError as error:
            raise self._problem(error) from None
        self._rows += len(vectors)

    def finish(self) -> None:
        """Give the file its name, when all of it is on the disk."""
        file = self._open
        try:
            file.seek(0)
            if self._write_header() != self._start:
                raise SentencesError(f"cannot write {self._name}: too many rows for its header")
            file.flush()
            os.fsync(file.fileno())
            file.close()
            self._part.replace(self._path)
        except OSError as error:
            raise self._problem(error) from None
        self._file = None

    def close(self) -> None:
        """Remove what is not finished."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            file.close()
        except OSError:
            pass  # what could not be written is not wanted any more
        finally:
            self._part.unlink(missing_ok=True)

    def _write_header(self) -> int:
        """Write the header for as many rows as there are, and return its length.

        NumPy leaves room in it, so that it is as long for any number of rows.
        """
        fields = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._rows, self._width),
        }
        np.lib.format.write_array_header_1_0(self._open, fields)
        return self._open.tell()

    @property
    def _open(self) -> BinaryIO:
        if self._file is None:
            raise SentencesError(f"cannot write {self._name}: it is closed")
        return self._file

    def _problem(self, error: Exception) -> SentencesError:
        if isinstance(error, SentencesError):
            return error
        return SentencesError(
            f"cannot write {self._name}: {getattr(error, 'strerror', None) or error}"
        )

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *problem: object) -> None:
        """Remove what is not finished."""
        self.close()

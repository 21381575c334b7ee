"""Sentences in a file, one a line, read a window at a time."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Self

from mpimesh.errors import SentencesError

__all__ = ["STDIN", "Lines"]

STDIN = "-"
_MARK = b"\xef\xbb\xbf"
# Of the byte order: some editors begin files with it.


class Lines:
    """The lines of a file or of standard input, each without its line end. Local.

    A line ends with a line feed, as `wc -l` and editors count; a carriage return before it belongs
    to the end. Nothing else ends one: not a form feed, nor what Unicode calls a line separator.
    The text is UTF-8, with or without a mark of the byte order. To be used as a context manager.

    Args:
        source: The file; "-" for standard input.

    Attributes:
        name: What messages call it.
        total: The number of lines; None where it is not known before the end.

    Raises:
        SentencesError: If it cannot be read. If it is a file on a disk, it is read through once, so
            that what is wrong with any line is told now.
    """

    def __init__(self, source: str | Path) -> None:
        self.path = None if str(source) == STDIN else Path(source)
        self.name = "standard input" if self.path is None else str(source)
        self.total: int | None = None
        self._number = 0
        self._file: BinaryIO
        try:
            if self.path is not None:
                self._file = self.path.open("rb")
            elif sys.stdin is None:
                raise SentencesError("cannot read the sentences: there is no standard input")
            else:
                self._file = sys.stdin.buffer
        except SentencesError:  # which is an OSError, too
            raise
        except (OSError, ValueError) as error:  # a ValueError for a NUL in the name
            raise self._problem(error) from None
        try:
            if self.path is not None and stat.S_ISREG(self.path.stat().st_mode):
                self.total = sum(1 for _ in self._texts())
                self._file.seek(0)
                self._number = 0
        except SentencesError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise self._problem(error) from None

    def window(self, *, most_lines: int, most_bytes: int) -> list[str]:
        """Return the next lines; none at the end.

        Args:
            most_lines: How many at most.
            most_bytes: The line with which they are as many bytes is the last.

        Raises:
            SentencesError: If they cannot be read, or are not UTF-8.
        """
        lines: list[str] = []
        nbytes = 0
        try:
            for text in self._texts():
                lines.append(text)
                nbytes += len(text)
                if len(lines) >= most_lines or nbytes >= most_bytes:
                    break
        except SentencesError:
            raise
        except OSError as error:
            raise self._problem(error) from None
        return lines

    def _texts(self) -> Iterator[str]:
        for raw in self._file:
            if self._number == 0:
                raw = raw.removeprefix(_MARK)
            self._number += 1
            try:
                text = raw.decode()
            except UnicodeDecodeError as error:
                raise SentencesError(
                    f"{self.name}, line {self._number}: not UTF-8, {error.reason}"
                ) from None
            if "\0" in text:
                raise SentencesError(
                    f"{self.name}, line {self._number}: holds a NUL; is this a text in UTF-8?"
                )
            yield text.removesuffix("\n").removesuffix("\r")

    def is_read_from(self, path: Path) -> bool:
        """Tell whether the lines are those of the file `path`, by whatever name. Local.

        Standard input may be a file, too.
        """
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), path.stat())
        except (OSError, ValueError):  # no file there, or lines that come from no file
            return False

    def close(self) -> None:
        """Close the file; standard input stays open."""
        if self.path is not None:
            self._file.close()

    def _problem(self, error: Exception) -> SentencesError:
        return SentencesError(f"cannot read the sentences: {self.name}: {_reason(error)}")

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *problem: object) -> None:
        """Close the file."""
        self.close()


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)

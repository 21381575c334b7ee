"""The lines of a file to vectors in a file, in memory for a few of them at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from mpimesh.arrays import HostArray
from mpimesh.errors import SentencesError, on_all_ranks
from mpimesh.models.lines import Lines
from mpimesh.models.minilm import ROUND_BATCHES, MiniLM
from mpimesh.models.vectors_file import VectorsFile
from mpimesh.runtime import ProcessGroup

__all__ = ["EmbeddedFile", "LineNumbers", "embed_file"]

_MOST_NUMBERS = 1000
_LINES_OF_REPLICA = 4096
_BYTES_OF_TOKEN = 4
# Of English about; a window should be a round of batches for each replica.
_MOST_REPLICAS = 16
# Beyond as many a window is no larger: every rank has it in memory.


@dataclass(frozen=True, slots=True)
class LineNumbers:
    """Some of the lines, counted from 1.

    Attributes:
        count: How many they are.
        first: The first of them, 1000 at most.
    """

    count: int = 0
    first: tuple[int, ...] = ()

    def and_more(self, places: Sequence[int], start: int) -> Self:
        """Return these and the lines at `places` behind the first `start` lines."""
        room = max(0, _MOST_NUMBERS - len(self.first))
        more = tuple(start + place + 1 for place in places[:room])
        return type(self)(self.count + len(places), self.first + more)


@dataclass(frozen=True, slots=True)
class EmbeddedFile:
    """The outcome of embedding the lines of a file.

    Attributes:
        num_lines: How many there were.
        width: The length of the vectors.
        dtype: Of their values.
        num_tokens: Tokens that were read.
        empty: The lines without a word.
        cut: The lines of which only the beginning was read, as much as the model reads.
    """

    num_lines: int
    width: int
    dtype: str
    num_tokens: int
    empty: LineNumbers
    cut: LineNumbers


def embed_file(
    model: MiniLM,
    source: str | Path,
    out: str | Path | None = None,
    *,
    progress: Callable[[int, int | None], None] | None = None,
) -> EmbeddedFile:
    """Turn each line of a file into a vector. Collective over the mesh of `model`.

    The mesh's first rank reads and writes; what the others give for `source` and `out` does not
    matter. Of what is read, and of the vectors, no more is in memory than a window of at most 4096
    lines for each replica, or one line that is longer; `out` grows with it. Row i of it is the
    vector of line i. It gets its name when it is whole; an interrupted job may leave a file
    ``.part`` beside it.

    Args:
        model: The model.
        source: A text in UTF-8, see :class:`~mpimesh.models.lines.Lines`; "-" for standard input.
        out: The .npy that the vectors go to, of a name that ends so; None to forget them.
        progress: On the first rank called with the number of lines that are done, about, and that
            of all, None if it is not known.

    Raises:
        SentencesError: On every rank, if the lines cannot be read or the vectors not be written.
            Whether `out` can be written, and a file on a disk be read, is seen at the beginning.
        StageError: On every rank, if computing fails on any.

    Cost:
        For each window a broadcast of its text, and what :meth:`MiniLM.embed` moves.

    Example:
        >>> with mm.DeviceMesh("dp=-1") as mesh:
        ...     print(embed_file(MiniLM(mesh), "lines.txt", "vectors.npy").num_lines)
    """
    group = model.mesh.group()
    done, tokens = 0, 0
    empty = cut = LineNumbers()
    with _Desk(model, source, out) as desk:
        vectors: HostArray | None = None
        while True:
            lines = _told(group, vectors, desk)
            if not lines:
                break
            found = model.embed(lines, progress=desk.count(progress, done, len(lines)))
            vectors = found.vectors
            empty, cut = empty.and_more(found.empty, done), cut.and_more(found.cut, done)
            done, tokens = done + len(lines), tokens + found.num_tokens
    return EmbeddedFile(done, model.width, str(model.dtype), tokens, empty, cut)


def _told(group: ProcessGroup, vectors: HostArray | None, desk: _Desk) -> list[str]:
    """Return on every rank the next lines; what goes wrong at the desk is raised on all."""
    text = None
    if group.rank == 0:
        fields: dict[str, Any]
        try:
            fields = {"lines": desk.next_window(vectors)}
        except SentencesError as error:
            fields = {"error": str(error)}
        text = np.frombuffer(json.dumps(fields).encode(), np.uint8)
    received = group.broadcast(text, root=None, label="lines").resolve()
    found = json.loads(received.tobytes())
    if "error" in found:
        raise on_all_ranks(SentencesError(found["error"]))
    lines: list[str] = found["lines"]
    return lines


class _Desk:
    """The files on the rank that has them; they are opened with the first window."""

    def __init__(self, model: MiniLM, source: str | Path, out: str | Path | None) -> None:
        self._model = model
        self._source = source
        self._out = None if out is None else Path(out)
        self._open = ExitStack()
        self._lines: Lines | None = None
        self._vectors: VectorsFile | None = None
        replicas = min(model.replicas, _MOST_REPLICAS)
        self._most_lines = _LINES_OF_REPLICA * replicas
        self._most_bytes = model.batch_tokens * ROUND_BATCHES * _BYTES_OF_TOKEN * replicas

    def next_window(self, vectors: HostArray | None) -> list[str]:
        """Write the vectors of the last window, and return the next; none when all is written.

        Raises:
            SentencesError: If something cannot be read or written.
        """
        lines = self._lines
        if lines is None:
            lines = self._lines = self._opened()
        if vectors is not None and self._vectors is not None:
            self._vectors.append(vectors)
        window = lines.window(most_lines=self._most_lines, most_bytes=self._most_bytes)
        if not window and self._vectors is not None:
            self._vectors.finish()
        return window

    def _opened(self) -> Lines:
        # The file that is written first: it costs nothing, while reading through the other may.
        model = self._model
        if self._out is not None:
            made = VectorsFile(self._out, model.width, model.dtype)
            self._vectors = self._open.enter_context(made)
        lines = self._open.enter_context(Lines(self._source))
        if self._out is not None and lines.is_read_from(self._out):
            raise SentencesError(f"cannot write {self._out}: the sentences are in it")
        return lines

    def count(
        self, progress: Callable[[int, int | None], None] | None, done: int, window: int
    ) -> Callable[[int, int], None] | None:
        """Return what counts the lines of a window: the desk's replica stands for all."""
        if progress is None or self._lines is None:
            return None
        total = self._lines.total
        return lambda rows, all_rows: progress(done + rows * window // max(all_rows, 1), total)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self._open.close()

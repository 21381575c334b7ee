"""Text as bytes: a part to train on, a part held out, and the windows that training sees."""

from __future__ import annotations

import os
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common.program import ProgramError, on_all_ranks

import mpimesh as mm

BYTES = 256
"""The vocabulary: a token is a byte, so any file will do."""
HELD_OUT_SHARE = 0.1
PIECE = 1 << 20
"""Bytes of a file that are in memory at once."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text cut in two, of which a rank reads windows where it lies: it may not fit in memory.

    Attributes:
        size: Its bytes. Behind those to train on are those that training never sees.
        read: Returns so many bytes from a place on.
        context: Bytes that the model reads at once.
    """

    size: int
    read: Callable[[int, int], bytes]
    context: int

    @property
    def train_size(self) -> int:
        """Bytes to train on."""
        return self.size - int(HELD_OUT_SHARE * self.size)

    def batches(
        self,
        mesh: mm.DeviceMesh,
        pipe: mm.PipelineParallel,
        steps: int,
        rows: int,
        *,
        parts: int,
        seed: int,
    ) -> mm.data.Batches:
        """Return the windows of all steps, of which each rank reads those it needs. Collective.

        Each step draws its windows anew, and none depends on those before it: so they are no
        epoch of all windows, and come in the order of the steps.

        Args:
            mesh: The ranks.
            pipe: What is trained by them: ranks in the middle of a pipeline need none.
            steps: How many steps.
            rows: Windows of a step.
            parts: In how many parts a step takes them.
            seed: Of what is drawn.
        """

        def read(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            last = self.train_size - self.context
            starts = [
                np.random.default_rng([seed, step + 1]).integers(0, last, rows)[row]
                for step, row in zip(*np.divmod(numbers, rows), strict=True)
            ]
            return self._windows(np.array(starts, np.int64))

        return mm.data.Batches(
            read,
            mesh,
            rows,
            rows=steps * rows,
            shuffle=False,
            parts=parts,
            seed=seed,
            model=pipe,
        )

    def evaluation(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return windows of the part that is held out, evenly spread: always the same ones."""
        last = self.size - self.train_size - self.context - 1
        return self._windows(self.train_size + np.linspace(0, last, rows).astype(np.int64))

    def digest(self) -> str:
        """Return eight digits that tell this text from others. It reads all of it."""
        crc = 0
        for place in range(0, self.size, PIECE):
            crc = zlib.crc32(self.read(place, min(PIECE, self.size - place)), crc)
        return f"{crc:08x}"

    def _windows(self, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what the model reads, and what follows each byte of it: (rows, context)."""
        windows = [self.read(int(start), self.context + 1) for start in starts]
        shape = len(starts), self.context + 1
        both = np.frombuffer(b"".join(windows), np.uint8).reshape(shape).astype(np.int64)
        return both[:, :-1], both[:, 1:]


def load_text(mesh: mm.DeviceMesh, path: Path | None, context: int) -> Text:
    """Collective: each rank opens the text, and reads nothing of it.

    Args:
        mesh: The ranks.
        path: A file that every rank can read; None for the documentation of Python's language that
            comes with Python, which rank 0 gives to all.
        context: Bytes that the model reads at once.

    Raises:
        ProgramError: On every rank, if one cannot read the file, or it is too short.
    """
    if path is None:
        mine = np.frombuffer(documentation(), np.uint8) if mesh.rank == 0 else None
        # root=None: whoever has an array is the root, and the others need not know its shape.
        data = mesh.group().broadcast(mine, root=None).resolve().tobytes()
        text = Text(len(data), lambda start, count: data[start : start + count], context)
    else:
        text = on_all_ranks(mesh, lambda: open_text(path, context), f"read {path}")
    if text.size - text.train_size <= context:
        least = int((context + 1) / HELD_OUT_SHARE) + 1
        raise ProgramError(
            f"a context of {context} bytes needs a text of {least:,} bytes, got {text.size:,}: "
            f"{HELD_OUT_SHARE:.0%} of it is held out for evaluation"
        )
    return text


def open_text(path: Path, context: int) -> Text:
    """Return a file as a text. It is open until nothing refers to the text any more."""
    file = path.open("rb", buffering=0)

    def read(start: int, count: int) -> bytes:
        found = os.pread(file.fileno(), count, start)
        if len(found) < count:
            raise OSError(f"{path} ended at {start + len(found):,} bytes: was it cut meanwhile?")
        return found

    weakref.finalize(read, file.close)
    return Text(os.fstat(file.fileno()).st_size, read, context)


def documentation() -> bytes:
    """Return the help on Python's language: 460 kB, of the same words in every installation."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()

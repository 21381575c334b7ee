"""Text as bytes: a part to train on, a part held out, and the windows that training sees."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common.program import ProgramError, on_all_ranks

import mpimesh as mm

BYTES = 256
"""The vocabulary: a token is a byte, so any file will do."""
HELD_OUT_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Text:
    """A text cut in two.

    Attributes:
        train: Bytes to train on, shape (n,).
        held_out: The bytes behind them, which training never sees.
        context: Bytes that the model reads at once.
    """

    train: np.ndarray
    held_out: np.ndarray
    context: int

    def batch(self, rows: int, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return what the model reads in a step, and what follows each byte of it.

        Every rank draws the same windows, and no step depends on those before it.

        Shapes:
            result: both (rows, context).
        """
        last = len(self.train) - self.context
        return self._windows(
            self.train, np.random.default_rng([seed, step]).integers(0, last, rows)
        )

    def evaluation(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return windows of the part that is held out, evenly spread: always the same ones."""
        last = len(self.held_out) - self.context - 1
        return self._windows(self.held_out, np.linspace(0, last, rows).astype(np.int64))

    def digest(self) -> str:
        """Return eight digits that tell this text from others."""
        return f"{zlib.crc32(self.held_out, zlib.crc32(self.train)):08x}"

    def _windows(self, text: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        both = text[starts[:, None] + np.arange(self.context + 1)].astype(np.int64)
        return both[:, :-1], both[:, 1:]


def load_text(mesh: mm.DeviceMesh, path: Path | None, context: int) -> Text:
    """Collective: rank 0 reads the text, the others get it from it.

    Args:
        mesh: The ranks.
        path: A file; None for the documentation of Python's language that comes with Python.
        context: Bytes that the model reads at once.

    Raises:
        ProgramError: On every rank, if rank 0 cannot read the file, or it is too short.
    """

    def read() -> np.ndarray | None:
        if mesh.rank:
            return None
        return np.frombuffer(documentation() if path is None else path.read_bytes(), np.uint8)

    mine = on_all_ranks(mesh, read, f"read {path}")
    # root=None: whoever has an array is the root, and the others need not know its shape.
    data = mesh.group().broadcast(mine, root=None).resolve()
    train, held_out = np.split(data, [len(data) - int(HELD_OUT_SHARE * len(data))])
    if len(held_out) <= context:
        least = int((context + 1) / HELD_OUT_SHARE) + 1
        raise ProgramError(
            f"a context of {context} bytes needs a text of {least:,} bytes, got {len(data):,}: "
            f"{HELD_OUT_SHARE:.0%} of it is held out for evaluation"
        )
    return Text(train, held_out, context)


def documentation() -> bytes:
    """Return the help on Python's language: 460 kB, of the same words in every installation."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()

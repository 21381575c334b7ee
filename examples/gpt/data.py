"""Text as bytes: a part to train on, a part held out, and the windows that training sees."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

import mpimesh as mm
from mpimesh.errors import MpimeshError

BYTES = 256
"""The vocabulary: a token is a byte, so any file will do."""
HELD_OUT_SHARE = 0.1


class TextError(MpimeshError):
    """There is no text, or too little of it. Raised on every rank."""

    agreed = True


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
        TextError: On every rank, if rank 0 cannot read the file, or it is too short.
    """
    data = problem = None
    if mesh.rank == 0:
        problem, data = np.zeros(0, np.uint8), np.zeros(0, np.uint8)
        try:
            data = np.frombuffer(documentation() if path is None else path.read_bytes(), np.uint8)
        except OSError as error:
            problem = np.frombuffer(f"cannot read {path}: {error.strerror}".encode(), np.uint8)
    # root=None: whoever has an array is the root, and the others need not know its shape.
    told = mesh.group().broadcast(problem, root=None).resolve()
    data = mesh.group().broadcast(data, root=None).resolve()
    if told.size:
        raise TextError(told.tobytes().decode())
    train, held_out = np.split(data, [len(data) - int(HELD_OUT_SHARE * len(data))])
    if len(held_out) <= context:
        least = int((context + 1) / HELD_OUT_SHARE) + 1
        raise TextError(
            f"a context of {context} bytes needs a text of {least:,} bytes, got {len(data):,}: "
            f"{HELD_OUT_SHARE:.0%} of it is held out for evaluation"
        )
    return Text(train, held_out, context)


def documentation() -> bytes:
    """Return the help on Python's language: 460 kB, of the same words in every installation."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()

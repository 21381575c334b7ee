"""Text from a model: one byte after the other, each drawn by what the model expects."""

from __future__ import annotations

import numpy as np

import mpimesh as mm
from gpt.data import BYTES


def sample_text(
    mesh: mm.DeviceMesh,
    pipe: mm.PipelineParallel,
    prompt: str,
    length: int,
    *,
    context: int,
    temperature: float,
    seed: int,
) -> str:
    """Return the prompt and `length` bytes more, on every rank. Collective.

    The model stays where it is, in stages and in parts of layers; what each rank gets to know is
    what is expected of the next byte, 256 numbers, and all of them draw the same.

    For each byte the model reads the last `context` bytes anew: simple, and quick enough for a few
    hundred of them. Who wants thousands keeps the keys and values of the bytes that were read.

    Args:
        mesh: The ranks.
        pipe: The model.
        prompt: What it goes on from; not empty.
        length: Bytes to draw.
        context: Bytes that the model reads at once.
        temperature: Below 1 likely bytes become likelier.
        seed: The same one draws the same text, up to rounding.
    """
    rng = np.random.default_rng(seed)
    text = list(prompt.encode(errors="surrogateescape"))  # any bytes of a command line
    for _ in range(length):
        window = text[-context:]
        # Always so many: no byte depends on those behind it, and ranks that share a sequence know
        # how long it is.
        x = np.zeros((1, context), np.int64)
        x[0, : len(window)] = window
        y = pipe.forward(x, everywhere=True)[0, len(window) - 1]
        y = all_classes(mesh, y).astype(np.float64) / temperature
        edges = np.exp(y - y.max()).cumsum()
        text.append(int(np.searchsorted(edges, rng.random() * edges[-1], side="right")))
    return bytes(text).decode(errors="replace")


def all_classes(mesh: mm.DeviceMesh, y: np.ndarray) -> np.ndarray:
    """Collective: put together what ranks that share the output layer expect."""
    group = mesh.group("tp")
    if group.size == 1:
        return y
    sizes = [len(part) for part in np.array_split(np.arange(BYTES), group.size)]
    return group.all_gather(y, sizes=sizes).resolve()

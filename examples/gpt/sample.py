"""Text from a model: one byte after the other, each drawn by what the model expects."""

from __future__ import annotations

import numpy as np

from mpimesh import nn


def sample_text(
    model: nn.Module,
    prompt: str,
    length: int,
    *,
    context: int,
    temperature: float,
    seed: int,
) -> str:
    """Return the prompt and `length` bytes more. Local.

    The model reads the last `context` bytes anew for each byte: short, and quick enough for a
    few hundred of them.

    Args:
        model: The whole model.
        prompt: What it goes on from; not empty.
        length: Bytes to draw.
        context: Bytes that the model reads at once.
        temperature: Below 1 likely bytes become likelier.
        seed: The same one draws the same text, up to rounding.
    """
    rng = np.random.default_rng(seed)
    text = list(prompt.encode(errors="surrogateescape"))  # any bytes of a command line
    for _ in range(length):
        y = model(np.array([text[-context:]], np.int64))[0, -1].astype(np.float64) / temperature
        edges = np.exp(y - y.max()).cumsum()
        text.append(int(np.searchsorted(edges, rng.random() * edges[-1], side="right")))
    return bytes(text).decode(errors="replace")

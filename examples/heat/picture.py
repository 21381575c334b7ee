"""A PNG of a field, with nothing but the standard library."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np

_COLD, _NONE, _HOT = np.array([(33, 102, 172), (247, 247, 247), (178, 24, 43)], float)
_GAP = 8


def write_png(path: Path, fields: list[np.ndarray], pixels: int = 256) -> None:
    """Write fields side by side: blue below 0, red above, in one scale for all."""
    most = max(float(np.abs(field).max()) for field in fields) or 1.0
    rows = []
    for field in fields:
        times = max(1, pixels // max(field.shape))
        values = np.kron(field / most, np.ones((times, times)))[..., None]
        rows += [_NONE + np.where(values < 0, -values * (_COLD - _NONE), values * (_HOT - _NONE))]
        rows += [np.full((values.shape[0], _GAP, 3), 255.0)]
    image = np.concatenate(rows[:-1], axis=1).round().astype(np.uint8)
    height, width, _ = image.shape
    lines = np.pad(image.reshape(height, -1), [(0, 0), (1, 0)])  # each begins with its filter: none
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines.tobytes())),
        (b"IEND", b""),
    ]
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    ]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))

"""Copies of pieces of arrays, wherever they begin."""

from __future__ import annotations

import numpy as np
import pytest

from mpimesh.comm.regions import copying


@pytest.mark.parametrize("dtype", ["u1", "f4", "f8", "c16", "V5"])
@pytest.mark.parametrize("nbytes", [40, 8000, 80_000])
def test_a_piece_is_copied_to_any_place_of_a_page(dtype, nbytes):
    """Also a few bytes further in a page, where some processors are slow."""
    size = nbytes // np.dtype(dtype).itemsize
    source = np.random.default_rng(0).integers(0, 256, nbytes + 64).astype(np.uint8)
    first = -source.ctypes.data % 64
    piece = source[first : first + size * np.dtype(dtype).itemsize].view(dtype)
    memory = np.empty(nbytes + 3 * 4096, np.uint8)
    for apart in (-1, 0, 1, 8, 15, 16):
        memory[...] = 7
        at = (piece.ctypes.data + apart - memory.ctypes.data) % 4096
        copying(piece, memory[at : at + piece.nbytes].view(dtype))()
        assert memory[at : at + piece.nbytes].tobytes() == piece.tobytes()
        assert (memory[:at] == 7).all()
        assert (memory[at + piece.nbytes :] == 7).all()

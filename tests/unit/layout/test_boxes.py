"""Boxes as values."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from mpimesh.layout.boxes import flat_fragments, global_box, local_box, run_start, tiles, view


@given(st.data(), st.lists(st.integers(1, 5), max_size=4))
def test_fragments_are_the_elements_in_their_order(data, shape):
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, numbers.size)] * 2)))
    parts = flat_fragments(shape, start, stop)
    found = [view(numbers, part).ravel() for part in parts]
    assert np.concatenate([[], *found]).tolist() == list(range(start, stop))
    assert len(parts) <= max(1, 2 * len(shape) - 1)


@given(st.lists(st.integers(0, 6), max_size=4), st.integers(1, 40))
def test_tiles_are_the_elements_in_their_order(shape, most):
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    found = [view(numbers, tile).ravel() for tile in tiles(shape, most)]
    assert np.concatenate([[], *found]).tolist() == list(range(numbers.size))
    assert all(part.size <= most for part in found)


@given(st.data(), st.lists(st.integers(1, 4), max_size=4))
def test_a_run_is_found_if_it_is_one(data, shape):
    box = []
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        box.append((start, data.draw(st.integers(start + 1, size))))
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    inside = view(numbers, tuple(box)).ravel()
    one_run = inside.tolist() == list(range(inside[0], inside[0] + inside.size))
    assert run_start(tuple(box), shape) == (inside[0] if one_run else -1)


@given(st.lists(st.tuples(*[st.integers(-5, 5)] * 3), max_size=4))
def test_boxes_of_the_array_and_of_the_block(axes):
    block = tuple((first, first + 9) for first, _, _ in axes)
    box = tuple((start, start + abs(size)) for _, start, size in axes)
    assert global_box(local_box(box, block), block) == box
    assert local_box(block, block) == tuple((0, 9) for _ in axes)

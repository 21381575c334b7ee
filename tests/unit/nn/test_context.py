from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpimesh import nn
from mpimesh.errors import ModuleError, ModuleStateError
from mpimesh.nn import Context
from tests.helpers.raises import raises


class Layer:
    def __repr__(self):
        return "Layer()"


@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_saved_comes_back_last_first_and_deferred_first_first(counts):
    ctx = Context()
    layers = [Layer() for _ in counts]
    for layer, count in zip(layers, counts, strict=True):
        for i in range(count):
            ctx.save(layer, i)
            ctx.defer(layer, i, "deferred")
    assert not ctx.is_empty
    for layer, count in zip(layers, counts, strict=True):
        assert ctx.peek(layer) == (count - 1,)
        assert [ctx.take(layer) for _ in range(count)] == [(i,) for i in reversed(range(count))]
        assert [ctx.take_deferred(layer)[0] for _ in range(count)] == list(range(count))
    assert ctx.is_empty


def test_each_misuse_has_its_text():
    ctx, layer = Context(step=2, first_row=8), Layer()
    with raises(ModuleStateError, "Layer()", "step=2"):
        ctx.take(layer)
    ctx.save(layer)
    assert ctx.take(layer) == ()
    with raises(ModuleStateError, "Layer"):
        ctx.take(layer)
    with raises(ModuleStateError, "Layer", "backward_weight"):
        ctx.take_deferred(layer)


def test_a_context_keeps_its_layers_apart_by_identity():
    """A layer that is gone must not leave its record to one that got its address."""
    ctx = Context()
    layer = Layer()
    ctx.save(layer, 1)
    reference = weakref.ref(layer)
    del layer
    gc.collect()
    assert reference() is not None
    ctx.clear()
    gc.collect()
    assert reference() is None


def test_drop_and_clear_empty_it():
    ctx, kept, dropped = Context(), Layer(), Layer()
    for layer in (kept, dropped):
        ctx.save(layer, 1)
        ctx.defer(layer, 2)
    ctx.drop(dropped)
    assert ctx.peek(kept) == (1,)
    with pytest.raises(ModuleStateError):
        ctx.peek(dropped)
    ctx.clear()
    assert ctx.is_empty


@pytest.mark.parametrize("numbers", [{"step": -1}, {"first_row": -1}], ids=repr)
def test_negative_numbers_are_refused(numbers):
    with raises(ModuleError, *numbers, *numbers.values()):
        Context(**numbers)


def test_text():
    assert repr(Context()) == "Context(step=0, first_row=0)"
    assert repr(Context(training=False)) == "Context(step=0, first_row=0, training=False)"


def test_once_makes_a_thing_once_for_each_source():
    ctx, made = nn.Context(), list[int]()

    def make():
        made.append(len(made))
        return made[-1]

    first, second = np.zeros(2), np.zeros(2)
    assert [ctx.once(one, make) for one in (first, second, first, second)] == [0, 1, 0, 1]
    # An array that is gone leaves its id to nobody.
    assert [ctx.once(np.zeros(3), make) for _ in range(3)] == [2, 3, 4]
    assert nn.Context().once(first, make) == 5
    ctx.clear()
    assert ctx.once(first, make) == 6
    assert ctx.is_empty

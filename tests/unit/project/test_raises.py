"""Tests of the checks of what a message names."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.raises import names, raises


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "rank 3 failed"),
        (3, "3"),
        (3, "after step 3."),
        (3, "shape (3,)"),
        (3, "ranks 0-3, dp=3"),
        (-3, "axis -3 does not exist"),
        (0.5, "waited 0.5 s"),
        ((3,), "shape (3,) and (4,)"),
        ([], "ranks [] did"),
        (np.dtype("float32"), "dtype float32,"),
        (None, "passed None."),
        ("out", "out has"),
        ("sizes", "handle.sizes(2)"),
        ("group 'world'", "of group 'world'."),
    ],
)
def test_a_value_is_found_as_a_word(value, text):
    names(text, value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "rank 13, 30, 3.5, 0.3, -3, x3, 3x, 3_000"),
        (3, "-3"),
        (0.5, "10.5 or 0.55 or -0.5"),
        (-3, "axis -31"),
        ((3,), "shape (3, 4)"),
        ((3, 4), "shape (2, 3, 4)"),
        ("float64", "float6, float64s, _float64"),
        ("a.b", "axb"),
        ("out", "without, outer, OUT"),
    ],
)
def test_a_part_of_a_word_or_number_is_not(value, text):
    with pytest.raises(pytest.fail.Exception, match="does not name") as caught:
        names(text, "", value)
    assert str(caught.value) == f"This text does not name {str(value)!r}:\n{text}"


def test_raises_checks_the_class_and_every_value():
    with raises(ValueError, "axis", 3) as caught:
        raise UnicodeError("axis 3 does not exist")
    assert type(caught.value) is UnicodeError
    with raises((KeyError, ValueError), "rank 1"):
        error = ValueError("lost")
        error.add_note("on rank 1")
        raise error
    with pytest.raises(pytest.fail.Exception, match="'rank', '4'"), raises(ValueError, "rank", 4):
        raise ValueError("axis 3 does not exist")
    with pytest.raises(KeyError), raises(ValueError):
        raise KeyError("axis")
    with pytest.raises(pytest.fail.Exception, match="ValueError"), raises(ValueError):
        pass

"""Messages that say what they are, and dtypes as text."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpimesh.arrays.dtypes import dtype_from_json, dtype_to_json
from mpimesh.errors import DTypeError
from mpimesh.runtime.messages import ENVELOPE_BYTES, describe, open_envelope, seal
from tests.contract.cases import ALL, values
from tests.helpers.raises import raises


def as_bytes(x):
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_a_dtype_survives_as_text(dtype):
    again = dtype_from_json(json.loads(json.dumps(dtype_to_json(dtype))))
    assert again == dtype
    assert again.itemsize == dtype.itemsize
    assert again.byteorder == dtype.byteorder


@pytest.mark.filterwarnings("error")
def test_metadata_stay_at_home_without_a_warning():
    metre = np.dtype("f4", metadata={"unit": "m"})
    point = np.dtype([("x", metre), ("y", metre, 2), (("title", "z"), "i2")], metadata={"of": "a"})
    for dtype in (metre, point, np.dtype([("from", point, (3,)), ("to", point)], align=True)):
        again = dtype_from_json(json.loads(json.dumps(dtype_to_json(dtype))))
        assert again == dtype
        assert "unit" not in repr(again)


@given(
    dtype=st.sampled_from(ALL),
    shape=st.lists(st.integers(0, 40), max_size=3).map(tuple),
    group=st.text(max_size=20),
)
def test_an_envelope_says_what_is_in_it(dtype, shape, group):
    x = values(0, shape, dtype)
    envelope, inline = seal(describe(shape, dtype, group, False)[0], as_bytes(x))
    assert envelope.nbytes <= ENVELOPE_BYTES
    # The receiver gives the whole room, whatever was in it before.
    room = np.full(ENVELOPE_BYTES, 255, np.uint8)
    room[: envelope.size] = envelope
    opened = open_envelope(room)
    assert (opened.shape, opened.dtype, opened.group) == (shape, dtype, group)
    assert opened.nbytes == x.nbytes
    assert (opened.inline is not None) == inline
    if opened.inline is not None:
        assert opened.inline.tobytes() == as_bytes(x).tobytes()
    else:
        assert envelope.nbytes + x.nbytes > ENVELOPE_BYTES


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_the_largest_that_goes_inside(extra):
    head, _ = seal(describe((9999,), np.dtype("u1"), "g", False)[0])
    size = ENVELOPE_BYTES - head.size + extra
    text, _ = describe((size,), np.dtype("u1"), "g", False)
    envelope, inline = seal(text, np.zeros(size, np.uint8))
    assert inline == (extra <= 0)
    assert (open_envelope(envelope).inline is not None) == inline


def test_a_dtype_that_takes_too_many_words():
    dtype = np.dtype([(f"a rather long field name {k}", "f8") for k in range(200)])
    with raises(DTypeError, 4092, "field names"):
        describe((0,), dtype, "g", False)


def test_texts_that_are_no_dtype():
    for text in ("nonsense", ["x"], {"ml_dtypes": "float1"}, {"other": 1}, [["a"]]):
        with pytest.raises(DTypeError):
            dtype_from_json(text)

"""The number that says which operation a rank is in."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, strategies as st

from mpimesh.comm.signatures import Operation, operation_number, operation_text

REDUCTIONS = (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER)
OPS = ("sum", "prod", "min", "max", "mean")
CODES = "bhilqBHILQ?fdgFDG"

calls = st.one_of(
    st.tuples(
        st.sampled_from(REDUCTIONS),
        st.sampled_from(CODES),
        st.integers(0, 1 << 34),
        st.sampled_from(OPS),
        st.just(0),
    ),
    st.tuples(
        st.just(Operation.BROADCAST),
        st.sampled_from(CODES),
        st.integers(0, 1 << 34),
        st.just(""),
        st.integers(0, 4095),
    ),
    st.tuples(
        st.sampled_from([Operation.ALL_GATHER, Operation.ALL_TO_ALL]),
        st.sampled_from(CODES),
        st.integers(0, 1 << 34),
        st.just(""),
        st.just(0),
    ),
)


def array_of(code, size):
    """An array as large as one likes, of one element of memory."""
    return np.broadcast_to(np.zeros((), code), (size,))


def number_of(call):
    operation, code, size, op, root = call
    return operation_number(operation, array_of(code, size), op, root)


@given(calls, calls)
def test_numbers_are_equal_for_equal_calls_only(one, other):
    first, second = number_of(one), number_of(other)
    assert 0 < first < 1 << 63, "it must fit into a signed number of 64 bits"
    same = (
        one[0] == other[0]
        and np.dtype(one[1]) == np.dtype(other[1])
        and np.dtype(one[1]).itemsize * one[2] == np.dtype(other[1]).itemsize * other[2]
        and one[3:] == other[3:]
    )
    assert (first == second) == same


@given(calls)
@example((Operation.ALL_REDUCE, "G", 1 << 34, "sum", 0))  # 512 GiB: one bit too many before
def test_a_text_says_what_the_number_holds(call):
    operation, code, size, op, root = call
    text = operation_text(number_of(call))
    nbytes = size * np.dtype(code).itemsize
    if operation in REDUCTIONS:
        assert text == f"{operation.name.lower()}({nbytes} bytes, {np.dtype(code)}, {op})"
    elif operation is Operation.BROADCAST:
        assert text == f"broadcast({nbytes} bytes, root {root})"
    elif operation is Operation.ALL_GATHER:
        assert text == f"all_gather({nbytes} bytes)"
    else:
        assert text == "all_to_all()"

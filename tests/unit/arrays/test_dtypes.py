"""Which reductions exist for which dtype, said once more as a table."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpimesh.arrays import ReduceOp, as_reduce_op, refuse_objects, wire_dtype
from mpimesh.errors import DTypeError, LayoutError, ReduceOpError
from mpimesh.layout import Partial
from tests.helpers.raises import raises

ORDERED = ("sum", "prod", "min", "max")
TABLE = [
    ("f4", "f4", (*ORDERED, "mean")),
    (">f8", "f8", (*ORDERED, "mean")),
    ("g", "g", (*ORDERED, "mean")),
    ("f2", "f4", (*ORDERED, "mean")),
    (">f2", "f4", (*ORDERED, "mean")),
    (ml_dtypes.bfloat16, "f4", (*ORDERED, "mean")),
    (ml_dtypes.float8_e5m2, "f4", (*ORDERED, "mean")),
    ("F", "F", ("sum", "prod", "mean")),
    (">c16", "c16", ("sum", "prod", "mean")),
    ("i1", "i1", ORDERED),
    (">u8", "u8", ORDERED),
    ("?", "u1", ("min", "max")),
    ("M8[ns]", None, ()),
    ("m8[s]", None, ()),
    ("S3", None, ()),
    ("U3", None, ()),
    ("V3", None, ()),
    ([("a", "f4")], None, ()),
    (ml_dtypes.int4, None, ()),
]


@pytest.mark.parametrize(("dtype", "wire", "ops"), TABLE, ids=[str(row[0]) for row in TABLE])
def test_table(dtype, wire, ops):
    for op in ReduceOp:
        if op in ops:
            assert wire_dtype(np.dtype(dtype), op) == np.dtype(wire)
            assert wire_dtype(np.dtype(dtype), op).isnative
        else:
            with raises(DTypeError, op, np.dtype(dtype)):
                wire_dtype(np.dtype(dtype), op)


def test_names():
    assert ReduceOp("avg") is ReduceOp("mean")
    assert ReduceOp("product") is ReduceOp.PROD
    with pytest.raises(ValueError, match="'xor' is not a valid"):
        ReduceOp("xor")
    assert as_reduce_op("avg") is as_reduce_op("average") is as_reduce_op("mean") is ReduceOp.MEAN
    assert as_reduce_op("product") is ReduceOp.PROD
    assert as_reduce_op(ReduceOp.MAX) is ReduceOp.MAX
    wrong: Any
    for wrong in ("xor", "", None, 3, ["sum"], {}):
        with raises(ReduceOpError, repr(wrong), *ReduceOp):
            as_reduce_op(wrong)


def test_operations_of_mpi4py():
    mpi = pytest.importorskip("mpi4py.MPI")
    for name in ("SUM", "PROD", "MIN", "MAX"):
        assert as_reduce_op(getattr(mpi, name)) is ReduceOp[name]
        assert Partial(getattr(mpi, name)) == Partial(ReduceOp[name])
    with raises(ReduceOpError, "MPI.SUM", "MPI.MAX"):
        as_reduce_op(mpi.LXOR)
    with raises(ReduceOpError, "MPI.LAND", "MIN", "np.argmax"):
        as_reduce_op(mpi.MAXLOC)
    with raises(LayoutError, "Partial knows sum"):
        Partial(mpi.LXOR)


def test_python_objects_wherever_they_hide():
    for dtype in ("O", [("a", "i4"), ("b", "O")], [("a", [("b", "O", (2,))])]):
        with raises(DTypeError, "Python objects", np.dtype(dtype)):
            refuse_objects(np.dtype(dtype))
    with raises(DTypeError, "Python objects", "StringDType"):
        refuse_objects(np.dtypes.StringDType())
    refuse_objects(np.dtype([("a", "i4")]))

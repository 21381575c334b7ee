"""Arrays of NumPy or CuPy: whose they are, how they are reduced, memory for results."""

from mpimesh.arguments import OpLike, ReduceOp, as_reduce_op
from mpimesh.arrays.dtypes import (
    refuse_masked,
    refuse_objects,
    wire_dtype,
)
from mpimesh.arrays.memory import (
    ArrayPool,
    aligned_bytes,
    aligned_empty,
    array_shape,
)
from mpimesh.arrays.namespace import (
    Array,
    DType,
    DTypeLike,
    HostArray,
    StreamScope,
    check_current,
    device_ready,
    is_cupy,
    moved,
    namespace,
    to_numpy,
)

__all__ = [
    "Array",
    "ArrayPool",
    "DType",
    "DTypeLike",
    "HostArray",
    "OpLike",
    "ReduceOp",
    "StreamScope",
    "aligned_bytes",
    "aligned_empty",
    "array_shape",
    "as_reduce_op",
    "check_current",
    "device_ready",
    "is_cupy",
    "moved",
    "namespace",
    "refuse_masked",
    "refuse_objects",
    "to_numpy",
    "wire_dtype",
]

"""Which gradients share a bucket, as a pure function of their sizes and dtypes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from mpimesh.arguments import as_real
from mpimesh.errors import ModuleError

__all__ = ["plan_buckets"]


def plan_buckets(
    sizes_bytes: Sequence[int], kinds: Sequence[Hashable], bucket_bytes: int
) -> tuple[tuple[int, ...], ...]:
    """Put parameters into buckets in the order in which backward makes their gradients.

    Backward goes through a model from its end, so the last parameter comes first. A bucket
    holds parameters of one kind and at most `bucket_bytes`, except that a larger parameter
    has a bucket of its own; it takes what comes next of its kind as long as that fits.
    Buckets stand in the order in which their last gradients come.

    Args:
        sizes_bytes: Bytes of each parameter's gradient, in the order of the parameters.
        kinds: What only equals may share a bucket, such as dtypes.
        bucket_bytes: Most bytes of a bucket, at least 1.

    Returns:
        For each bucket the numbers of its parameters, falling. Each parameter is in one.

    Raises:
        ModuleError: If `bucket_bytes` is less than 1.
    """
    as_real(bucket_bytes, "bucket_bytes", ModuleError, least=1, finite=False)
    done: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    filled_bytes: dict[Hashable, int] = {}
    for number in reversed(range(len(sizes_bytes))):
        kind, size = kinds[number], sizes_bytes[number]
        if kind not in filling or filled_bytes[kind] + size > bucket_bytes:
            filling[kind] = []
            filled_bytes[kind] = 0
            done.append(filling[kind])
        filling[kind].append(number)
        filled_bytes[kind] += size
    done.sort(key=lambda members: -members[-1])
    return tuple(map(tuple, done))

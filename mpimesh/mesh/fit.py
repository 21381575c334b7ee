"""Does a mesh fit the world, and if not, which meshes near it do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, islice
from math import log, prod

from mpimesh.arguments import as_int
from mpimesh.errors import MeshError, WorldSizeError
from mpimesh.mesh.dims import MAX_RANKS, MeshDimension, dims_text

__all__ = ["fit_dims", "shapes_that_fit", "world_size_error"]

_TRIED = 20_000
"""Most shapes weighed against each other: bounds the time for many dims."""


def fit_dims(
    dims: Sequence[MeshDimension], world_size: int | None, *, ranks_per_node: int | None = None
) -> tuple[MeshDimension, ...]:
    """Fill in the dim of size -1, and check the product where the world is known.

    Args:
        dims: As from :func:`~mpimesh.mesh.dims.parse_dims`.
        world_size: Number of ranks; None if not known.
        ranks_per_node: Only for the error's text; None leaves it out.

    Raises:
        MeshError: If a size is -1 and `world_size` is None.
        WorldSizeError: If no size for the open dim, or not the product, gives `world_size`.
    """
    if world_size is None:
        if any(size == -1 for _, size in dims):
            raise MeshError(
                f"mesh {dims_text(dims)} has a dim of size -1, which needs the number of ranks: "
                f"give world_size="
            )
        return tuple(dims)
    world_size = check_world_size(world_size)
    fixed = prod(size for _, size in dims if size != -1)
    open_size, rest = divmod(world_size, fixed)
    fitted = tuple(MeshDimension(name, open_size if n == -1 else n) for name, n in dims)
    if rest or prod(size for _, size in fitted) != world_size:
        raise world_size_error(dims, world_size, ranks_per_node=ranks_per_node)
    return fitted


def check_world_size(world_size: object) -> int:
    """Return `world_size` as an int if it can be a number of ranks."""
    size = as_int(world_size, "world_size")
    if not 1 <= size <= MAX_RANKS:
        raise MeshError(f"world_size must be in 1..{MAX_RANKS}, got {size}")
    return size


def world_size_error(
    dims: Sequence[MeshDimension], world_size: int, *, ranks_per_node: int | None = None
) -> WorldSizeError:
    """Say in one line why `dims` do not fit `world_size`, and what would.

    A function of its arguments only, so all ranks of a world get the same text.
    """
    sizes = [size for _, size in dims if size != -1]
    product = f"{' x '.join(map(str, sizes))} = {prod(sizes)}" if len(sizes) > 1 else prod(sizes)
    multiple = "a multiple of " if len(sizes) < len(dims) else ""
    nodes = ""
    if ranks_per_node is not None and world_size % ranks_per_node == 0:
        nodes = f" ({world_size // ranks_per_node} nodes x {ranks_per_node} ranks)"
    return WorldSizeError(
        f"mesh {dims_text(dims) or '()'} needs {multiple}{product} ranks, but the world has "
        f"{world_size}{nodes}; {advice(dims, world_size)}"
    )


def advice(dims: Sequence[MeshDimension], world_size: int) -> str:
    """Name the nearest meshes that have `world_size` ranks."""
    near = [dims_text(shape) for shape in shapes_that_fit(dims, world_size)]
    return f"meshes that fit: {' or '.join(near)}" if near else "a mesh without dims has 1 rank"


def shapes_that_fit(
    dims: Sequence[MeshDimension], world_size: int, *, most: int = 3
) -> list[tuple[MeshDimension, ...]]:
    """List meshes of `world_size` ranks that are nearest to `dims`.

    Nearest are those that keep as many of the asked sizes as possible, among
    those the ones whose other sizes change by the smallest factors.
    """
    asked = [size for _, size in dims]
    fixed = [k for k, size in enumerate(asked) if size != -1]
    for changed in range(len(fixed) + 1):
        shapes = {
            shape
            for free in combinations(fixed, changed)
            for shape in _reshaped(asked, free, world_size)
        }
        if shapes:
            best = sorted(shapes, key=lambda shape: (_distance(asked, shape), shape))
            return [
                tuple(MeshDimension(dim.name, n) for dim, n in zip(dims, shape, strict=True))
                for shape in best[:most]
            ]
    return []


def _reshaped(
    asked: Sequence[int], free: Sequence[int], world_size: int
) -> Iterator[tuple[int, ...]]:
    """Yield shapes of `world_size` ranks that differ from `asked` in `free` and in -1 dims."""
    open_dims = [k for k, size in enumerate(asked) if size == -1 or k in free]
    kept = prod(size for k, size in enumerate(asked) if k not in open_dims)
    if world_size % kept:
        return
    targets = [asked[k] for k in open_dims]
    for sizes in islice(_factors(world_size // kept, targets), _TRIED):
        shape = list(asked)
        for k, size in zip(open_dims, sizes, strict=True):
            shape[k] = size
        yield tuple(shape)


def _factors(number: int, targets: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Write `number` as ordered products, the factors nearest to `targets` first."""
    if not targets:
        if number == 1:
            yield ()
        return
    if len(targets) == 1:
        yield (number,)
        return
    for first in sorted(_divisors(number), key=lambda n: abs(log(n / abs(targets[0])))):
        for others in _factors(number // first, targets[1:]):
            yield (first, *others)


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _distance(asked: Sequence[int], shape: Sequence[int]) -> float:
    # Rounded, so that shapes equally far off are ordered by their sizes on every machine.
    factors = (abs(log(n / want)) for want, n in zip(asked, shape, strict=True) if want != -1)
    return round(sum(factors), 9)

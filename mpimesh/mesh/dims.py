"""The dims of a mesh: names, sizes, the text ``dp=2,pp=2``, and the worlds that they fit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, islice
from math import log, prod
from typing import NamedTuple, TypeAlias

from mpimesh.arguments import as_int, as_items, shown
from mpimesh.errors import MeshError, UnknownNameError, WorldSizeError

__all__ = [
    "MAX_RANKS",
    "DimsLike",
    "MeshDimension",
    "NamesLike",
    "fit_dims",
    "shapes_that_fit",
    "world_size_error",
]

MAX_RANKS = 2**31 - 1
"""Most ranks a mesh may have, and the largest rank: in MPI a rank is a C int."""

RESERVED_NAMES = {
    "unsharded": "it says in a layout that an axis is not split",
    "match": "it says in a layout that an axis keeps its split",
    "world": "it names the group of all ranks",
}

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MOST_NAME = 100
"""Most characters of a dim's name: groups along it have names that are made of it."""
_SIZE = re.compile(r"[+-]?[0-9]{1,18}")

_TRIED = 20_000
"""Most shapes weighed against each other: bounds the time for many dims."""


class MeshDimension(NamedTuple):
    """One dim of a mesh."""

    name: str
    size: int

    def __str__(self) -> str:
        return f"{self.name}={self.size}"


DimsLike: TypeAlias = str | Mapping[str, int] | Iterable[tuple[str, int]]
"""Dims as text ``"dp=2,pp=2"``, as a mapping, or as (name, size) pairs, slowest first."""

NamesLike: TypeAlias = str | Sequence[str]
"""Names of dims as text ``"dp"`` or ``"dp,pp"``, or as a sequence of names."""


def check_dim_name(name: object) -> str:
    """Return `name` if a dim may have it.

    Raises:
        MeshError: If it is no text, no identifier, too long, or reserved.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise MeshError(
            f"a mesh dim's name must be letters, digits and '_' and not start with a digit, "
            f"got {shown(name)}"
        )
    if len(name) > _MOST_NAME:
        raise MeshError(
            f"a mesh dim's name must have at most {_MOST_NAME} characters, got {len(name)}: "
            f"{shown(name)}"
        )
    if name in RESERVED_NAMES:
        raise MeshError(f"mesh dim name {name!r} is reserved: {RESERVED_NAMES[name]}")
    return name


def parse_dims(dims: DimsLike) -> tuple[MeshDimension, ...]:
    """Read dims from any form of `DimsLike`; one size may be -1.

    Raises:
        MeshError: If a name or size is malformed, a name is repeated, a size is
            0 or below -1, more than one is -1, or the product is over `MAX_RANKS`.
    """
    found = tuple(
        MeshDimension(check_dim_name(name), _size(name, size)) for name, size in _pairs(dims)
    )
    seen: set[str] = set()
    for name, _ in found:
        if name in seen:
            raise MeshError(f"repeated mesh dimension {name!r} in {dims_text(found)}")
        seen.add(name)
    if sum(size == -1 for _, size in found) > 1:
        raise MeshError(f"only one mesh dim may have the size -1, got {dims_text(found)}")
    if prod(abs(size) for _, size in found) > MAX_RANKS:
        raise MeshError(f"mesh {dims_text(found)} has more than {MAX_RANKS} ranks")
    return found


def dims_text(dims: Iterable[tuple[str, int]]) -> str:
    """Write dims as ``dp=2,pp=2``."""
    return ",".join(f"{name}={size}" for name, size in dims)


def parse_names(names: NamesLike) -> tuple[str, ...]:
    """Split ``"dp,pp"`` into names; a sequence of names is taken as it is."""
    if isinstance(names, str):
        return tuple(name.strip() for name in names.split(","))
    found = as_items(names, "the names of mesh dims")
    for name in found:
        if not isinstance(name, str):
            raise MeshError(f"the name of a mesh dim must be a text, got {shown(name)}")
    return found


def dim_numbers(dims: Sequence[MeshDimension], names: NamesLike) -> tuple[int, ...]:
    """Return the places in `dims` of the dims called `names`, in the order of `names`.

    Raises:
        UnknownNameError: If there is no such dim.
        MeshError: If a name is repeated.
    """
    places = {dim.name: k for k, dim in enumerate(dims)}
    numbers = []
    for name in parse_names(names):
        if name not in places:
            raise UnknownNameError(
                f"Dimension {name} does not exist in mesh. Available dimensions: "
                f"{', '.join(places) or 'none'}"
            )
        if places[name] in numbers:
            raise MeshError(f"mesh dim {name!r} is named twice in {parse_names(names)}")
        numbers.append(places[name])
    return tuple(numbers)


def _pairs(dims: DimsLike) -> list[tuple[object, object]]:
    if isinstance(dims, str):
        return [_pair_of_text(part, dims) for part in dims.split(",")]
    if isinstance(dims, Mapping):
        return list(dims.items())
    try:
        pairs = list(dims)
        if pairs and all(isinstance(pair, str) for pair in pairs):
            sizes = ", ".join(f"({name!r}, ...)" for name in pairs)
            raise MeshError(
                f"mesh dims have a name and a size each, but {shown(pairs)} are texts: write "
                f"'dp=2,pp=2', or pairs as [{sizes}]; one size may be -1"
            )
        return [(name, size) for name, size in pairs]
    except (TypeError, ValueError):
        raise MeshError(
            f"mesh dims must be a text like 'dp=2,pp=2', a mapping or (name, size) pairs, "
            f"got {shown(dims)}"
        ) from None


def _pair_of_text(part: str, whole: str) -> tuple[str, int]:
    name, equals, size = (piece.strip() for piece in part.partition("="))
    if not equals or not _SIZE.fullmatch(size):
        raise MeshError(f"mesh dims are written 'dp=2,pp=2', got {part!r} in {whole!r}")
    return name, int(size)


def _size(name: object, value: object) -> int:
    size = as_int(value, f"the size of mesh dim {name!r}")
    if size < -1 or size == 0:
        raise MeshError(f"mesh dim {name!r} must have a size of at least 1, got {size}")
    return size


def fit_dims(
    dims: Sequence[MeshDimension], world_size: int | None, *, ranks_per_node: int | None = None
) -> tuple[MeshDimension, ...]:
    """Fill in the dim of size -1, and check the product where the world is known.

    Args:
        dims: As from :func:`parse_dims`.
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
    near = [dims_text(shape) for shape in shapes_that_fit(dims, world_size)]
    cure = f"meshes that fit: {' or '.join(near)}" if near else "a mesh without dims has 1 rank"
    return WorldSizeError(
        f"mesh {dims_text(dims) or '()'} needs {multiple}{product} ranks, but the world has "
        f"{world_size}{nodes}; {cure}"
    )


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

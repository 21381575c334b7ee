"""The dims of a mesh: their names, their sizes, and the text ``dp=2,pp=2``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple, TypeAlias

from mpimesh.arguments import as_int, as_items, shown
from mpimesh.errors import MeshError, UnknownNameError

__all__ = ["MAX_RANKS", "DimsLike", "MeshDimension", "NamesLike"]

MAX_RANKS = 2**31 - 1
"""Most ranks a mesh may have, and the largest rank: in MPI a rank is a C int."""

RESERVED_NAMES = {
    "unsharded": "it says in a layout that an axis is not split",
    "match": "it says in a layout that an axis keeps its split",
    "world": "it names the group of all ranks",
}

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SIZE = re.compile(r"[+-]?[0-9]{1,18}")


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
        MeshError: If it is no text, no identifier, or reserved.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise MeshError(
            f"a mesh dim's name must be letters, digits and '_' and not start with a digit, "
            f"got {shown(name)}"
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


def default_names(ndim: int) -> tuple[str, ...]:
    """Name dims that the caller gave no names: ``d0``, ``d1`` and so on."""
    return tuple(f"d{k}" for k in range(ndim))


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

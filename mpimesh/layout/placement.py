"""Placements of an array on the dims of a mesh: `Shard`, `Replicate`, `Partial`, and their text."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol, SupportsIndex, TypeAlias, get_args, overload

from mpimesh.arguments import (
    OpLike,
    OpName,
    ReduceOp,
    as_int,
    as_items,
    as_reduce_op,
    counted,
    shown,
)
from mpimesh.errors import LayoutError, ReduceOpError, UnknownNameError
from mpimesh.layout.boxes import even_sizes

__all__ = [
    "PARTIAL_OPS",
    "Partial",
    "Placed",
    "Placement",
    "PlacementLike",
    "PlacementSpec",
    "Replicate",
    "Shard",
]


PARTIAL_OPS = tuple(op.value for op in ReduceOp)
"""The reductions that a :class:`Partial` may wait for."""


class PlacementSpec(ABC):
    """The treatment of an array along one mesh dim: a `Shard`, a `Replicate`, a `Partial`.

    The text of one (``S[0]``, ``R``, ``P``) is read by :meth:`Placement.from_text`.
    """

    __slots__ = ()

    @abstractmethod
    def __str__(self) -> str: ...

    @property
    @abstractmethod
    def short(self) -> str:
        """The text without brackets, as it stands behind a dim's name: ``S0``, ``R``, ``P``."""


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Shard(PlacementSpec):
    """The ranks along the dim hold blocks of an axis, in the order of their coordinates.

    Without `sizes` the first ``length % n`` of n ranks hold one element more than the others, so
    blocks may be uneven, and empty where there are more ranks than elements.

    Args:
        axis: The array axis that is split, counted from 0.
        sizes: How many elements each rank along the dim holds.

    Raises:
        LayoutError: If `axis` or a size is negative or no whole number, or there are no sizes.

    Example:
        >>> print(Shard(0), Shard(1, sizes=(3, 0, 1)))
        S[0] S[1](3,0,1)
    """

    axis: int
    sizes: tuple[int, ...] | None

    def __init__(
        self, axis: SupportsIndex, *, sizes: Sequence[SupportsIndex] | None = None
    ) -> None:
        object.__setattr__(self, "axis", as_int(axis, "the axis of a Shard", LayoutError, least=0))
        if sizes is not None:
            if not _is_row(sizes):
                raise LayoutError(
                    "sizes of a Shard must be a row of whole numbers, one for each rank in order, "
                    f"got {shown(sizes)}"
                )
            sizes = tuple(as_int(size, "a size of a Shard", LayoutError, least=0) for size in sizes)
        object.__setattr__(self, "sizes", sizes)

    @classmethod
    def of_sizes(cls, axis: int, sizes: Sequence[int]) -> Shard:
        """Return the shard of `axis` in blocks of `sizes`, which it does not name if they are even.

        Raises:
            LayoutError: If `axis` or `sizes` cannot be those of a shard.
        """
        cut = cls(axis, sizes=sizes)
        if cut.sizes is None:
            raise LayoutError("sizes of a Shard are missing: give one for each rank")
        even = list(cut.sizes) == even_sizes(sum(cut.sizes), len(cut.sizes))
        return cls(axis) if even else cut

    @property
    def short(self) -> str:
        """The text without brackets."""
        return f"S{self.axis}{self._sizes_text()}"

    def __str__(self) -> str:
        return f"S[{self.axis}]{self._sizes_text()}"

    def __repr__(self) -> str:
        sizes = "" if self.sizes is None else f", sizes={self.sizes}"
        return f"Shard({self.axis}{sizes})"

    def _sizes_text(self) -> str:
        return "" if self.sizes is None else f"({','.join(map(str, self.sizes))})"


def _is_row(sizes: object) -> bool:
    """Tell whether these are some values in an order; a set and a mapping have none to rely on."""
    if not hasattr(sizes, "__iter__") or not hasattr(sizes, "__len__"):
        return False
    if isinstance(sizes, str | bytes | Set | Mapping) or getattr(sizes, "ndim", 1) != 1:
        return False
    return len(sizes) > 0


@dataclass(frozen=True, slots=True)
class Replicate(PlacementSpec):
    """All ranks along the dim hold the same."""

    @property
    def short(self) -> str:
        """The text, which has no brackets."""
        return "R"

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Partial(PlacementSpec):
    """The ranks along the dim hold operands of a reduction that is still to be computed.

    Args:
        op: ``"sum"``, ``"mean"`` (or ``"avg"``), ``"prod"``, ``"min"`` or ``"max"``, or mpi4py's
            ``MPI.SUM`` and the like.

    Raises:
        LayoutError: If there is no such reduction.
    """

    op: str

    def __init__(self, op: OpLike = "sum") -> None:
        try:
            name = as_reduce_op(op).value
        except ReduceOpError:
            known = ", ".join(PARTIAL_OPS)
            raise LayoutError(f"Partial knows {known}, got {shown(op)}") from None
        object.__setattr__(self, "op", name)

    @property
    def short(self) -> str:
        """The text, which has no brackets."""
        return "P" if self.op == "sum" else f"P({self.op})"

    def __str__(self) -> str:
        return self.short

    def __repr__(self) -> str:
        return "Partial()" if self.op == "sum" else f"Partial({self.op!r})"


_NUMBER = "(?:0|[1-9][0-9]{0,17})"
_SPEC = re.compile(
    rf"(?P<replicate>R)"
    rf"|S(?:\[(?P<bracket>{_NUMBER})\]|(?P<axis>{_NUMBER}))"
    rf"(?:\((?P<sizes>{_NUMBER}(?:,{_NUMBER})*)\))?"
    rf"|(?P<partial>P)(?:\((?P<op>{'|'.join(get_args(OpName))})\))?"
)
_BETWEEN = re.compile(r" *, *| +|")
_NAMED = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*) *= *(?P<spec>.*)")
_BETWEEN_NAMED = re.compile(r",(?![^(]*\))")
_GRAMMAR = "write R, S[axis] or P for each dim, as in 'S[0], R', or names, as in 'dp=S0, tp=R'"


class Placed(Protocol):
    """An object with placements, as a `Layout` has them; those on another mesh are refused."""

    @property
    def placement(self) -> Placement:
        """One spec for each of its dims."""


PlacementLike: TypeAlias = (
    "Placement | Placed | str | Mapping[str, PlacementSpec | str] | Iterable[PlacementSpec | str]"
)
"""Placements as text, by the names of dims, or one for each dim in the order of the mesh; or a
layout on the same mesh."""


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Placement(Sequence[PlacementSpec]):
    """Shard, Replicate or Partial for each mesh dim, in the order of the mesh.

    Args:
        specs: The specs; each may be its text.

    Example:
        >>> print(Placement([Shard(0), Replicate()]))
        S[0], R
        >>> Placement.from_text("S[0], R") == Placement(["S0", "R"])
        True

    Raises:
        LayoutError: If one is no spec.
    """

    specs: tuple[PlacementSpec, ...]

    def __init__(self, specs: Iterable[PlacementSpec | str]) -> None:
        if isinstance(specs, str):
            raise LayoutError(
                f"Placement takes specs; read text with Placement.from_text({specs!r})"
            )
        object.__setattr__(
            self,
            "specs",
            tuple(_as_spec(spec) for spec in as_items(specs, "placements", LayoutError)),
        )

    @classmethod
    def from_text(cls, text: str) -> Placement:
        """Read ``"S[0], R"``: one spec for each dim, commas or spaces in between.

        ``S[0]`` may be written ``S0``; sizes stand in parentheses, ``S[0](3,1)``; ``P`` is
        ``Partial()``, ``P(max)`` another. The empty text is the placement on a mesh without dims.

        Raises:
            LayoutError: If the text is anything else.
        """
        if not isinstance(text, str):
            raise LayoutError(f"a placement's text must be a str, got {shown(text)}; {_GRAMMAR}")
        specs: list[PlacementSpec] = []
        rest = text.strip(" ")
        while rest:
            match = _SPEC.match(rest)
            if match is None:
                raise LayoutError(f"placement {text!r} cannot be read from {rest!r} on; {_GRAMMAR}")
            specs.append(_spec_of(match))
            rest = rest[match.end() :]
            between = _BETWEEN.match(rest)
            if rest and between is not None:
                rest = rest[between.end() :]
                if not rest:
                    raise LayoutError(f"placement {text!r} ends in a comma; {_GRAMMAR}")
        return cls(specs)

    @classmethod
    def of(cls, placements: PlacementLike, dim_names: Sequence[str]) -> Placement:
        """Return `placements` as one spec for each of the dims `dim_names`.

        By names, in a mapping or as ``"dp=S0, tp=R"``, dims may be left out: they replicate.

        Raises:
            LayoutError: If they are not one for each dim, or cannot be read.
            UnknownNameError: If a name is none of the dims.
        """
        dim_names = [str(name) for name in as_items(dim_names, "dim_names", LayoutError)]
        placements = getattr(placements, "placement", placements)
        if isinstance(placements, str) and "=" in placements:
            placements = _named(placements)
        if isinstance(placements, str):
            placement = cls.from_text(placements)
        elif isinstance(placements, Mapping):
            return cls(_in_order(placements, dim_names))
        elif isinstance(placements, Iterable):
            placement = placements if isinstance(placements, Placement) else cls(placements)
        else:
            raise LayoutError(f"placements cannot be {shown(placements)}; {_GRAMMAR}")
        if len(placement) != len(dim_names):
            raise LayoutError(
                f"placement {str(placement)!r} has {counted(len(placement), 'spec')}, but the mesh "
                f"has {counted(len(dim_names), 'dim')} ({', '.join(dim_names)}); {_GRAMMAR}"
            )
        return placement

    def named(self, dim_names: Sequence[str]) -> str:
        """Return the text with the names of the dims: ``dp=S0, tp=R``.

        Raises:
            LayoutError: If `dim_names` is not one for each spec.
        """
        names = as_items(dim_names, "dim_names", LayoutError)
        if len(names) != len(self):
            raise LayoutError(f"dim_names must be one for each of {self}, got {shown(dim_names)}")
        return ", ".join(f"{n}={spec.short}" for n, spec in zip(names, self, strict=True))

    def __len__(self) -> int:
        return len(self.specs)

    def __iter__(self) -> Iterator[PlacementSpec]:
        return iter(self.specs)

    @overload
    def __getitem__(self, place: int) -> PlacementSpec: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[PlacementSpec, ...]: ...
    def __getitem__(self, place: int | slice) -> PlacementSpec | tuple[PlacementSpec, ...]:
        return self.specs[place]

    def __str__(self) -> str:
        return ", ".join(map(str, self.specs))

    def __repr__(self) -> str:
        return f"Placement.from_text({str(self)!r})"


def _as_spec(spec: PlacementSpec | str) -> PlacementSpec:
    if isinstance(spec, PlacementSpec):
        return spec
    if isinstance(spec, str):
        match = _SPEC.fullmatch(spec.strip(" "))
        if match is not None:
            return _spec_of(match)
    raise LayoutError(f"a mesh dim's placement cannot be {shown(spec)}; {_GRAMMAR}")


def _spec_of(match: re.Match[str]) -> PlacementSpec:
    if match["replicate"]:
        return Replicate()
    if match["partial"]:
        return Partial(as_reduce_op(match["op"] or "sum"))
    sizes = None if match["sizes"] is None else [int(size) for size in match["sizes"].split(",")]
    return Shard(int(match["bracket"] or match["axis"]), sizes=sizes)


def _named(text: str) -> dict[str, str]:
    """Read ``"dp=S0, tp=S1(2,3)"``."""
    specs: dict[str, str] = {}
    for part in _BETWEEN_NAMED.split(text):
        match = _NAMED.fullmatch(part.strip(" "))
        if match is None:
            raise LayoutError(f"placement {text!r} cannot be read at {part!r}; {_GRAMMAR}")
        if match["name"] in specs:
            raise LayoutError(f"placement {text!r} names dim {match['name']!r} twice")
        specs[match["name"]] = match["spec"]
    return specs


def _in_order(
    specs: Mapping[str, PlacementSpec | str], dim_names: Sequence[str]
) -> list[PlacementSpec | str]:
    for name in specs:
        if name not in dim_names:
            raise UnknownNameError(
                f"a placement names dim {name!r}, but the mesh has {', '.join(dim_names) or 'none'}"
            )
    return [specs.get(name, Replicate()) for name in dim_names]

"""Named groups of ranks, and four topologies: each gives a `Mesh` and its groups.

| topology | text | mesh | groups, in this order |
|---|---|---|---|
| data parallel | ``data-parallel`` or ``data-parallel:n=4`` | dp | ``dp_0`` |
| tensor parallel | ``tensor-parallel:degree=4`` | dp, tp | ``tp_{i}`` for each dp index, ``dp_{t}`` for each place |
| the same, with a shape | ``tensor-parallel:degree=4,mesh_shape=2x2`` | dp, tp_row, tp_col | as above |
| pipeline parallel | ``pipeline-parallel:stages=4`` | pp | ``pp_stage_{s}`` = rank s, then the chain ``pp_0`` |
| mixed | ``mixed:tp=2,pp=2,dp=2`` | dp, pp, tp | ``tp_dp{d}_pp{p}``, chains ``pp_dp{d}_tp{t}``, replicas ``dp_pp{p}_tp{t}`` |

A group is called after the dim it runs along, and then after its place in the
others. Ranks are row-major: in a mixed topology ``rank = (d * PP + p) * TP + t``.
"""  # noqa: E501

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from mpimesh.arguments import as_flag, as_int, as_items, shown
from mpimesh.errors import GroupError, MeshError, RankError, WorldSizeError
from mpimesh.mesh.dims import check_world_size
from mpimesh.mesh.mesh import Mesh

__all__ = [
    "WORLD",
    "DataParallelTopology",
    "GroupSpec",
    "MeshTopology",
    "MixedTopology",
    "PipelineParallelTopology",
    "TensorParallelTopology",
    "check_group_name",
]

WORLD = "world"
"""Name of the group of all ranks."""

_MOST_NAME = 200
"""Most characters of a group's name: it goes along with each message of the group."""

_TEXT = re.compile(r"(?P<kind>[a-z-]+)(?::(?P<options>.*))?")
_OPTION = re.compile(r"(?P<key>[a-z_]+)=(?P<value>[0-9]{1,9}(?:x[0-9]{1,9})?)")


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A named group of ranks.

    Attributes:
        name: Its name, unique in a world.
        ranks: World ranks in group order: the place of a rank is its rank in the group.

    Raises:
        GroupError: If the name is no text or too long, or ranks are missing, repeated or negative.
    """

    name: str
    ranks: Sequence[int]

    def __post_init__(self) -> None:
        check_group_name(self.name)
        object.__setattr__(self, "ranks", _checked_ranks(self.name, self.ranks))

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    def in_group(self, rank: int) -> bool:
        """Tell whether world rank `rank` is a member."""
        return rank in self.ranks

    def group_rank(self, rank: int) -> int | None:
        """Return the place of world rank `rank` in the group, None if it is no member."""
        return self.ranks.index(rank) if rank in self.ranks else None

    def check_in_world(self, world_size: int) -> None:
        """Check that all ranks exist.

        Raises:
            RankError: Naming the highest rank, if it does not.
        """
        _, highest = _bounds(self.ranks)
        if highest >= world_size:
            raise RankError(
                f"Rank {highest} out of bounds for world size {world_size} in group {self.name!r}"
            )


def check_group_name(name: object) -> None:
    """Raise if no group may be called `name`.

    Raises:
        GroupError: If it is no printable text, or too long.
    """
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise GroupError(f"a group's name must be printable text, got {shown(name)}")
    if len(name) > _MOST_NAME:
        raise GroupError(
            f"a group's name must have at most {_MOST_NAME} characters, got {len(name)}: "
            f"{shown(name)}"
        )


def _checked_ranks(name: str, ranks: Sequence[int]) -> Sequence[int]:
    if not isinstance(ranks, range):
        ranks = tuple(
            as_int(rank, f"a rank of group {name!r}")
            for rank in as_items(ranks, f"ranks of group {name!r}", GroupError)
        )
        if len(set(ranks)) != len(ranks):
            twice = next(rank for k, rank in enumerate(ranks) if rank in ranks[:k])
            raise GroupError(f"group {name!r} has rank {twice} twice: {ranks}")
    if not len(ranks):
        raise GroupError(f"group {name!r} has no ranks; give at least one")
    lowest, _ = _bounds(ranks)
    if lowest < 0:
        raise RankError(f"Rank {lowest} out of bounds in group {name!r}: ranks start at 0")
    return ranks


def _bounds(ranks: Sequence[int]) -> tuple[int, int]:
    """Return the smallest and the largest of `ranks`, of a range without going through it."""
    ends = (ranks[0], ranks[-1]) if isinstance(ranks, range) else ranks
    return min(ends), max(ends)


class MeshTopology(ABC):
    """The arrangement of the ranks of a world. A value; its text form parses back."""

    __slots__ = ()

    # -- the four kinds --------------------------------------------------------

    @staticmethod
    def data_parallel(n: int | None = None) -> DataParallelTopology:
        """Every rank holds the whole model; `n` ranks, or any number if None."""
        return DataParallelTopology(n)

    @staticmethod
    def tensor_parallel(
        degree: int, mesh_shape: tuple[int, int] | None = None
    ) -> TensorParallelTopology:
        """Each layer is split over `degree` ranks, arranged as `mesh_shape` if given."""
        return TensorParallelTopology(degree, mesh_shape)

    @staticmethod
    def pipeline_parallel(stages: int) -> PipelineParallelTopology:
        """The layers are split over `stages` ranks."""
        return PipelineParallelTopology(stages)

    @staticmethod
    def mixed(tp: int, pp: int, dp: int) -> MixedTopology:
        """`dp` replicas of pipelines of `pp` stages, each of which is split over `tp` ranks."""
        return MixedTopology(tp, pp, dp)

    @staticmethod
    def parse(text: str) -> MeshTopology:
        """Read the text form, see the module's table.

        Raises:
            MeshError: If the kind, an option or a value is not as in the table.
        """
        found = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if found is None or found["kind"] not in _KINDS:
            known = ", ".join(_KINDS)
            raise MeshError(
                f"a topology is written like 'mixed:tp=2,pp=2,dp=2', one of {known}; got {text!r}"
            )
        options: dict[str, int | tuple[int, ...]] = {}
        for item in found["options"].split(",") if found["options"] else []:
            option = _OPTION.fullmatch(item)
            if option is None or option["key"] in options:
                raise MeshError(f"{item!r} in topology {text!r} is not a new option key=value")
            numbers = tuple(int(number) for number in option["value"].split("x"))
            options[option["key"]] = numbers if len(numbers) > 1 else numbers[0]
        try:
            return _KINDS[found["kind"]](**options)
        except TypeError:
            raise MeshError(
                f"topology {text!r} has an option that {found['kind']} does not take, or lacks one"
            ) from None

    # -- what each kind says ---------------------------------------------------

    @property
    @abstractmethod
    def expected_world_size(self) -> int:
        """Number of ranks it is made for; 1 where any number will do."""

    @property
    @abstractmethod
    def _need(self) -> str:
        """The rule that fewer ranks than :attr:`expected_world_size` break, for the error."""

    def _used(self, world_size: int) -> int:
        """Return how many of `world_size` ranks it uses."""
        return self.expected_world_size

    @abstractmethod
    def _dims(self, used: int) -> list[tuple[str, int]]:
        """Return the dims of the mesh over `used` ranks."""

    @abstractmethod
    def _groups(self, mesh: Mesh) -> list[tuple[str, Sequence[int]]]:
        """Return names and ranks of the groups in `mesh`."""

    # -- what follows from it --------------------------------------------------

    def validate(self, world_size: int, *, allow_idle: bool = False) -> None:
        """Check that it can run on `world_size` ranks.

        Args:
            world_size: Number of ranks.
            allow_idle: Whether ranks may be left over; they are then the last ones and
                in no group.

        Raises:
            WorldSizeError: If there are too few ranks, or leftover ones without `allow_idle`.
        """
        world_size = check_world_size(world_size)
        if world_size < self.expected_world_size:
            raise WorldSizeError(f"{self._need}, got {world_size} devices")
        used = self._used(world_size)
        if not as_flag(allow_idle, "allow_idle") and used != world_size:
            raise WorldSizeError(
                f"{self} uses {used} of {world_size} ranks and leaves {world_size - used} idle; "
                f"start {used} ranks, or use the mesh that leaves the last ones out, "
                f"topology.to_mesh({world_size}, allow_idle=True)"
            )

    def to_mesh(self, world_size: int, *, allow_idle: bool = False) -> Mesh:
        """Return the mesh over the ranks it uses; see :meth:`validate` for the errors."""
        self.validate(world_size, allow_idle=allow_idle)
        return Mesh(self._dims(self._used(world_size)))

    def group_plan(
        self, world_size: int, *, allow_idle: bool = False
    ) -> tuple[tuple[str, Sequence[int]], ...]:
        """Return (name, ranks) of all its groups, in an order that depends on nothing else.

        See :meth:`validate` for the errors, and the module's table for the names.
        """
        return tuple(self._groups(self.to_mesh(world_size, allow_idle=allow_idle)))


@dataclass(frozen=True, slots=True)
class DataParallelTopology(MeshTopology):
    """Every rank holds the whole model.

    Attributes:
        n: Number of ranks; None takes any.
    """

    n: int | None = None

    def __post_init__(self) -> None:
        if self.n is not None:
            _check_positive(n=self.n)

    @property
    def expected_world_size(self) -> int:
        """`n`, or 1 where any number of ranks will do."""
        return self.n or 1

    @property
    def _need(self) -> str:
        return f"Data parallel requires at least {self.n} devices"

    def _used(self, world_size: int) -> int:
        return self.n or world_size

    def _dims(self, used: int) -> list[tuple[str, int]]:
        return [("dp", used)]

    def _groups(self, mesh: Mesh) -> list[tuple[str, Sequence[int]]]:
        return [("dp_0", mesh.group_ranks(0, "dp"))]

    def __str__(self) -> str:
        return "data-parallel" if self.n is None else f"data-parallel:n={self.n}"


@dataclass(frozen=True, slots=True)
class TensorParallelTopology(MeshTopology):
    """Each layer is split over `degree` ranks; more ranks are replicas of that.

    Attributes:
        degree: Number of ranks a layer is split over.
        mesh_shape: Rows and columns the ranks of a layer are arranged in; their
            product is `degree`. None leaves them in one row.
    """

    degree: int
    mesh_shape: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        _check_positive(degree=self.degree)
        if self.mesh_shape is None:
            return
        shape = self.mesh_shape
        if not isinstance(shape, tuple) or len(shape) != 2:
            raise MeshError(f"mesh_shape must be (rows, columns), got {shape!r}")
        _check_positive(rows=shape[0], columns=shape[1])
        if prod(shape) != self.degree:
            raise MeshError(
                f"mesh_shape {shape[0]} x {shape[1]} = {prod(shape)} must be the tensor parallel "
                f"degree {self.degree}"
            )

    @property
    def expected_world_size(self) -> int:
        """`degree`; any multiple of it makes replicas."""
        return self.degree

    @property
    def _need(self) -> str:
        return f"Tensor parallel degree {self.degree} requires at least {self.degree} devices"

    def _used(self, world_size: int) -> int:
        return world_size - world_size % self.degree

    def _dims(self, used: int) -> list[tuple[str, int]]:
        replicas = ("dp", used // self.degree)
        if self.mesh_shape is None:
            return [replicas, ("tp", self.degree)]
        return [replicas, ("tp_row", self.mesh_shape[0]), ("tp_col", self.mesh_shape[1])]

    def _groups(self, mesh: Mesh) -> list[tuple[str, Sequence[int]]]:
        layers = mesh.groups("tp" if self.mesh_shape is None else "tp_row,tp_col")
        return [
            *((f"tp_{i}", ranks) for i, ranks in enumerate(layers.tolist())),
            *((f"dp_{t}", ranks) for t, ranks in enumerate(mesh.groups("dp").tolist())),
        ]

    def __str__(self) -> str:
        shape = "" if self.mesh_shape is None else ",mesh_shape={}x{}".format(*self.mesh_shape)
        return f"tensor-parallel:degree={self.degree}{shape}"


@dataclass(frozen=True, slots=True)
class PipelineParallelTopology(MeshTopology):
    """The layers are split over `stages` ranks, one rank a stage."""

    stages: int

    def __post_init__(self) -> None:
        _check_positive(stages=self.stages)

    @property
    def expected_world_size(self) -> int:
        """`stages`."""
        return self.stages

    @property
    def _need(self) -> str:
        return f"Pipeline parallel requires {self.stages} stages"

    def _dims(self, used: int) -> list[tuple[str, int]]:
        return [("pp", used)]

    def _groups(self, mesh: Mesh) -> list[tuple[str, Sequence[int]]]:
        return [
            *((f"pp_stage_{s}", range(s, s + 1)) for s in range(self.stages)),
            ("pp_0", mesh.group_ranks(0, "pp")),
        ]

    def __str__(self) -> str:
        return f"pipeline-parallel:stages={self.stages}"


@dataclass(frozen=True, slots=True)
class MixedTopology(MeshTopology):
    """`dp` replicas of pipelines of `pp` stages whose layers are split over `tp` ranks."""

    tp: int
    pp: int
    dp: int

    def __post_init__(self) -> None:
        _check_positive(tp=self.tp, pp=self.pp, dp=self.dp)

    @property
    def expected_world_size(self) -> int:
        """``tp * pp * dp``."""
        return self.tp * self.pp * self.dp

    @property
    def _need(self) -> str:
        return (
            f"Mixed parallelism (TP={self.tp}, PP={self.pp}, DP={self.dp}) requires "
            f"{self.expected_world_size} devices"
        )

    def _dims(self, used: int) -> list[tuple[str, int]]:
        return [("dp", self.dp), ("pp", self.pp), ("tp", self.tp)]

    def _groups(self, mesh: Mesh) -> list[tuple[str, Sequence[int]]]:
        return [
            (f"{dim}_{first}{i}_{second}{j}", mesh.group_ranks(rank, dim))
            for dim, first, second in (("tp", "dp", "pp"), ("pp", "dp", "tp"), ("dp", "pp", "tp"))
            for i in range(mesh.dim_size(first))
            for j in range(mesh.dim_size(second))
            for rank in (mesh.rank_at(**{dim: 0, first: i, second: j}),)
        ]

    def __str__(self) -> str:
        return f"mixed:tp={self.tp},pp={self.pp},dp={self.dp}"


_KINDS: dict[str, Callable[..., MeshTopology]] = {
    "data-parallel": DataParallelTopology,
    "tensor-parallel": TensorParallelTopology,
    "pipeline-parallel": PipelineParallelTopology,
    "mixed": MixedTopology,
}


def _check_positive(**values: object) -> None:
    for name, value in values.items():
        as_int(value, name, least=1)

"""Parameters that stand in stages of several ranks: each rank that holds one has a copy of it.

The copies are kept equal by giving them equal first values and equal gradients. A gradient is
summed over the replicas of *all* stages that the parameter stands in, by one all-reduce, so
that every copy gets the same bits; from there the optimizers of all ranks do the same.

Names are those of one Sequential of all layers, so a parameter is called by its first place. The
first rank of a pipeline that holds it counts it in norms and gives it to states; the others, which
hold copies, do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpimesh.errors import MismatchError, on_all_ranks
from mpimesh.nn import Parameter
from mpimesh.parallel.gradients.replicas import describe, digest
from mpimesh.parallel.groups import groups_of_lines, lines_of_holders
from mpimesh.parallel.stage import PipelineStage
from mpimesh.runtime import DeviceMesh, ProcessGroup
from mpimesh.runtime.agreement import agree
from mpimesh.runtime.call import Call

__all__ = ["Tie", "Ties", "find_ties", "named_places"]


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter of several ranks.

    Attributes:
        name: Its name in the whole model.
        parameter: This rank's copy, which may have no memory here.
        holders: The places in the pipeline that hold it, rising.
    """

    name: str
    parameter: Parameter
    holders: tuple[int, ...]


def named_places(
    stages: Sequence[PipelineStage],
) -> list[tuple[str, Parameter, tuple[int, ...]]]:
    """Return each parameter once, with its name in the whole model and the stages it stands in."""
    names: dict[int, tuple[str, Parameter]] = {}
    places: dict[int, list[int]] = {}
    offset = 0
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            place, _, rest = name.partition(".")
            names.setdefault(id(parameter), (f"{int(place) + offset}.{rest}", parameter))
            places.setdefault(id(parameter), []).append(number)
        offset += len(stage)
    return [(*named, tuple(places[key])) for key, named in names.items()]


def find_ties(stages: Sequence[PipelineStage], placement: Sequence[int]) -> list[Tie]:
    """Return the parameters that several ranks hold, in the order of the model.

    Args:
        stages: All stages.
        placement: The place in the pipeline of each.
    """
    held = [
        Tie(name, parameter, tuple(sorted({placement[number] for number in numbers})))
        for name, parameter, numbers in named_places(stages)
    ]
    return [tie for tie in held if len(tie.holders) > 1]


class Ties:
    """The tied parameters of a model, and the groups of ranks that hold them.

    Making it is collective over `mesh`, and needs no exchange if nothing is tied.

    Args:
        ties: What is tied, alike on all ranks.
        mesh: The mesh. Gets a group for each set of ranks that holds something in common.
        pipe: The ranks of this rank's pipeline.
        data: The replicas of this rank's stages.

    Cost:
        An all-gather of about 20 bytes for each rank. For each set of holders, and each line of
        ranks along the other dims of the mesh, a split of the mesh's communicator, unless
        there is a group of these ranks.
    """

    def __init__(
        self,
        ties: Sequence[Tie],
        *,
        mesh: DeviceMesh,
        pipe: ProcessGroup,
        data: ProcessGroup,
    ) -> None:
        self._ties = tuple(ties)
        self._mesh = mesh
        self._place = pipe.rank or 0
        self._lines: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        if ties:
            sets = [tie.holders for tie in ties]
            self._lines = lines_of_holders(mesh.group(), pipe, data, sets, what="tied parameters")
            self._groups = groups_of_lines(mesh, self._lines, kind="tied")

    @property
    def copies(self) -> list[Parameter]:
        """Those that this rank holds, but not as the first of its pipeline."""
        return [
            tie.parameter
            for tie in self._ties
            if self._place in tie.holders and self._place != tie.holders[0]
        ]

    def group(self, parameter: Parameter) -> ProcessGroup | None:
        """Return all ranks that hold `parameter`, with their replicas; None if it is not tied."""
        for tie in self._ties:
            if tie.parameter is parameter:
                return self._groups[tie.holders]
        return None

    def agree(self, *, values: bool, rule: str = "") -> None:
        """Return if all copies are alike: shape, dtype, frozen or not. Collective over the mesh.

        Args:
            values: Compare the values, too, bit for bit.
            rule: What else must be alike.

        Raises:
            MismatchError: On every rank, naming the first parameter that differs.

        Cost:
            An all-reduce of 40 bytes and an all-gather of small texts, if anything is tied; reading
            it once for its values.
        """
        if not self._ties:
            return
        mine = {
            tie.name: _describe(tie, values) + rule
            for tie in self._ties
            if self._place in tie.holders
        }
        scope = self._mesh.group()
        everyone: list[dict[str, str]] = agree(
            scope._core, Call("tied parameters", scope.name), mine
        )
        told = dict(zip(scope.ranks, everyone, strict=True))
        for tie in self._ties:
            for line in self._lines[tie.holders]:
                texts = {rank: told[rank][tie.name] for rank in line}
                if len(set(texts.values())) > 1:
                    raise on_all_ranks(_difference(tie.name, texts))


def _describe(tie: Tie, values: bool) -> str:
    frozen = "" if tie.parameter.requires_grad else ", frozen"
    seen = f" with values {digest(tie.parameter)}" if values else ""
    return f"{describe(tie.parameter, tie.name)}{frozen}{seen}"


def _difference(name: str, texts: dict[int, str]) -> MismatchError:
    rows = "\n".join(f"  rank {rank}: {text}" for rank, text in texts.items())
    return MismatchError(
        f"tied parameter {name!r} must be the same on all ranks that hold it; give it the same "
        f"values, or no memory, on every rank, and freeze it on all or on none:\n{rows}"
    )

"""Parameters over all stages of a model: their first values, their uses, and who has copies.

A parameter that stands in stages of several ranks is tied: each rank that holds one has a copy.

The copies are kept equal by giving them equal first values and equal gradients. A gradient is
summed over the replicas of *all* stages that the parameter stands in, by one all-reduce, so
that every copy gets the same bits; from there the optimizers of all ranks do the same.

Names are those of one Sequential of all layers, so a parameter is called by its first place. The
first rank of a pipeline that holds it counts it in norms and gives it to states; the others, which
hold copies, do not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import ModuleType
from typing import Any

from mpimesh.errors import MismatchError, on_all_ranks
from mpimesh.nn import Parameter
from mpimesh.nn.module import leaves
from mpimesh.nn.protocol import Settled, materialize, num_layers, set_place
from mpimesh.parallel.gradients.replicas import describe, digest
from mpimesh.parallel.groups import groups_of_lines, lines_of_holders
from mpimesh.parallel.stage import PipelineStage
from mpimesh.runtime import DeviceMesh, ProcessGroup
from mpimesh.runtime.agreement import agree
from mpimesh.runtime.call import Call

__all__ = [
    "Tie",
    "Ties",
    "agree_on_trained",
    "check_alike",
    "find_ties",
    "give_values",
    "is_used_again",
    "named_places",
    "uses_of",
]


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
                check_alike(
                    {rank: told[rank][tie.name] for rank in line},
                    f"tied parameter {tie.name!r} must be the same on all ranks that hold it; give "
                    "it the same values, or no memory, on every rank, and freeze it on all or on "
                    "none",
                )


def _describe(tie: Tie, values: bool) -> str:
    frozen = "" if tie.parameter.requires_grad else ", frozen"
    seen = f" with values {digest(tie.parameter)}" if values else ""
    return f"{describe(tie.parameter, tie.name)}{frozen}{seen}"


def check_alike(texts: Mapping[int, str], rule: str) -> None:
    """Return if ranks say the same of something that they have in common.

    Args:
        texts: What each says, as all of them have heard.
        rule: Begins the error.

    Raises:
        MismatchError: On every rank, with what each says.
    """
    if len(set(texts.values())) > 1:
        rows = "\n".join(f"  rank {rank}: {text}" for rank, text in texts.items())
        raise on_all_ranks(MismatchError(f"{rule}:\n{rows}"))


def agree_on_trained(
    named: Sequence[tuple[str, Parameter, Collection[int]]],
    local: Collection[int],
    scope: ProcessGroup,
) -> None:
    """Return if all ranks that hold a parameter train it, or none does. Collective over `scope`.

    Args:
        named: What :func:`named_places` gives: name, parameter and stages of each.
        local: The stages of this rank.
        scope: The ranks of all stages.

    Raises:
        MismatchError: On every rank, naming what is frozen on some of them.
    """
    mine: list[list[int]] = [[], []]
    for number, (_, parameter, stages) in enumerate(named):
        if any(stage in local for stage in stages):
            mine[parameter.requires_grad].append(number)
    everyone = agree(scope._core, Call("rebuild_buckets", scope.name), mine)
    frozen, trained = (set(chain(*numbers)) for numbers in zip(*everyone, strict=True))
    rows = [
        f"  {named[number][0]}: frozen on ranks "
        f"{[rank for rank, one in zip(scope.ranks, everyone, strict=True) if number in one[0]]}"
        for number in sorted(frozen & trained)
    ]
    if rows:
        raise on_all_ranks(
            MismatchError(
                "a parameter is frozen on all ranks that hold it or on none, but\n"
                + "\n".join(rows)
            )
        )


def give_values(
    stages: Sequence[PipelineStage],
    local: Collection[int],
    *,
    seed: int,
    dtype: Any,
    xp: ModuleType,
) -> None:
    """Materialise the layers of the `local` stages, and no others. Local.

    A layer whose parameters all have memory is left as it is, and so is a parameter
    with memory that stands in several layers. The values of one without are those of its first
    place in the whole model, wherever that lies.

    Args:
        stages: All stages.
        local: The numbers of this rank's.
        seed: The seed of the whole model.
        dtype: Dtype of the parameters.
        xp: `numpy` or `cupy`.

    Cost:
        Where the first place of a local parameter is a layer of another rank's stage, that
        whole layer has memory for a moment.
    """
    layers = [(layer, number in local) for number, stage in enumerate(stages) for layer in stage]
    mine = {id(layer) for layer, is_local in layers if is_local}
    wanted = {id(p) for layer, is_local in layers if is_local for p in layer.parameters()}
    uses: dict[int, int] = {}
    for layer, _ in layers:
        for parameter in layer.parameters():
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    settled = Settled(
        parameter
        for layer, _ in layers
        for parameter in layer.parameters()
        if uses[id(parameter)] > 1 and parameter.data is not None
    )
    index = 0
    for layer, _ in layers:
        parameters = layer.parameters()
        whole = bool(parameters) and all(p.data is not None for p in parameters)
        lends = any(id(p) in wanted and p not in settled for p in parameters)
        if not whole and (id(layer) in mine or lends):
            before = [(p, p.data) for p in parameters if id(p) not in wanted]
            materialize(layer, seed=seed, dtype=dtype, xp=xp, index=index, settled=settled)
            for parameter, data in before:
                parameter.data = data
        elif id(layer) in mine:
            set_place(layer, seed=seed, index=index)
        index += num_layers(layer)


def is_used_again(stages: Sequence[PipelineStage]) -> bool:
    """Tell whether the very first layer, or one in it, stands elsewhere in the model, too.

    There somebody reads the gradient of its input.
    """
    first = [id(leaf) for leaf in leaves(stages[0].first_layer)]
    everywhere = [id(leaf) for stage in stages for leaf in leaves(stage)]
    return any(everywhere.count(one) > 1 for one in first)


def uses_of(stages: Iterable[PipelineStage]) -> dict[int, int]:
    """Return by its id how often a backward adds to the gradient of each parameter.

    Empty where some layer is not of this library: it may use what is within it more than once, or
    not in each step.
    """
    uses: dict[int, int] = {}
    for stage in stages:
        for leaf in leaves(stage):
            if not type(leaf).__module__.startswith(("mpimesh.nn.", "mpimesh.parallel.")):
                return {}
            for parameter in leaf._own_parameters():
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return uses

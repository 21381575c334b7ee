"""Stages of a pipeline, and parameters that stand in several of them.

A parameter that stands in stages of several ranks is tied: each rank that holds one has a copy.

The copies stay equal by equal first values and equal gradients. A gradient is summed over the
replicas of *all* stages that the parameter stands in, by one all-reduce, so that every copy gets
the same bits; from there the optimizers of all ranks do the same.

Names are those of one Sequential of all layers, so a parameter is called by its first place. The
first rank of a pipeline that holds it counts it in norms and writes it to states; the others, which
hold copies, do not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import ModuleType
from typing import Any, Self, TypeVar

from mpimesh.arguments import as_int, as_items
from mpimesh.errors import MismatchError, ScheduleError, on_all_ranks
from mpimesh.nn import Parameter, Sequential, SupportsLayer
from mpimesh.nn.containers import is_plain
from mpimesh.nn.module import leaves
from mpimesh.nn.parameter import Buffer
from mpimesh.nn.protocol import Visited, materialize, num_layers, set_place
from mpimesh.parallel.replicas import describe, digest, groups_of_lines, lines_of_holders
from mpimesh.runtime import DeviceMesh, ProcessGroup
from mpimesh.runtime.agreement import agree
from mpimesh.runtime.call import Call

__all__ = [
    "PipelineStage",
    "Ties",
    "agree_on_trained",
    "check_alike",
    "check_stages",
    "find_ties",
    "give_values",
    "is_used_again",
    "named_buffers",
    "named_places",
    "uses_of",
]


T = TypeVar("T")


class PipelineStage(Sequential):
    """Layers that run on one rank of a pipeline. Without layers it is the identity.

    Every rank makes all stages, which costs nothing: a layer has no memory
    before :class:`~mpimesh.PipelineParallel` materialises the rank's own.

    Anything with ``forward(x, ctx)``, ``backward(dy, ctx)`` and ``parameters()`` is a layer, see
    :mod:`mpimesh.nn.protocol`. A stage must treat rows independently and return as many as it
    got.

    One :class:`~mpimesh.nn.Parameter` may stand in layers of several stages: they are tied, see
    :class:`~mpimesh.PipelineParallel`.

    Args:
        stage_id: Its place in the pipeline, from 0.
        inputs: Names of inputs that enter here, see ``train_step(..., inputs={name: array})``.
            The first layer then gets a tuple: what comes from the stage before, and the named
            inputs in this order. Its backward returns a tuple of gradients, of which only the
            first is used, or that first one only.
        skips: Stages before the last one, whose outputs come here, too. The first layer then gets
            ``(x, their outputs in rising order, named inputs ...)``, and returns the gradients of
            all but the named inputs; what comes back to a stage is added up.

    Raises:
        ScheduleError: If `stage_id` is no whole number of at least 0, `inputs` are no names, or
            `skips` no such stages.

    Example:
        >>> PipelineStage(0).add_layer(nn.Linear(64, 32)).add_layer(nn.ReLU())
        PipelineStage(0, Linear(64, 32), ReLU())
        >>> PipelineStage(1, inputs=("mask",)).add_layer(nn.Concat())
        PipelineStage(1, Concat(axis=-1), inputs=('mask',))
    """

    def __init__(
        self, stage_id: int, *, inputs: Iterable[str] = (), skips: Iterable[int] = ()
    ) -> None:
        super().__init__()
        self._stage_id = stage_id = as_int(stage_id, "stage_id", ScheduleError, least=0)
        self._inputs = _names(inputs)
        self._skips = _sources(stage_id, skips)

    @property
    def stage_id(self) -> int:
        """The stage's place in the pipeline."""
        return self._stage_id

    @property
    def first_layer(self) -> object:
        """The layer that gets the stage's input, and returns its gradient; None without layers."""
        return _layer_at(self, 0)

    @property
    def last_layer(self) -> object:
        """The layer that makes the stage's output; None without layers."""
        return _layer_at(self, -1)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs that enter here."""
        return self._inputs

    @property
    def skips(self) -> tuple[int, ...]:
        """The stages whose outputs come here along skips, in rising order."""
        return self._skips

    def add_layer(self, layer: SupportsLayer) -> Self:
        """Add `layer` at the end and return the stage, so that calls can be chained.

        Raises:
            ModuleError: If `layer` lacks forward, backward or parameters.
        """
        return self.append(layer)

    def __repr__(self) -> str:
        inside = [repr(self._stage_id), *map(repr, self.layers)]
        if self._inputs:
            inside.append(f"inputs={self._inputs!r}")
        if self._skips:
            inside.append(f"skips={self._skips!r}")
        return f"PipelineStage({', '.join(inside)})"


def _names(inputs: Iterable[str]) -> tuple[str, ...]:
    names = as_items(inputs, "inputs", ScheduleError, wanted="names, as in inputs=('mask',)")
    bad = isinstance(inputs, str) or not all(isinstance(name, str) and name for name in names)
    if bad or len(set(names)) < len(names):
        raise ScheduleError(
            f"inputs must be names, each once, as in inputs=('mask',), got {inputs!r}"
        )
    return names


def _sources(stage_id: int, skips: Iterable[int]) -> tuple[int, ...]:
    sources = as_items(skips, "skips", ScheduleError, wanted="numbers of stages")
    if any(type(source) is not int or not 0 <= source < stage_id - 1 for source in sources) or (
        len(set(sources)) < len(sources)
    ):
        rule = (
            f"must be stages before stage {stage_id - 1}, whose output it gets anyway, each once"
            if stage_id > 1
            else "cannot be: no stage is before the one that it gets its input from"
        )
        raise ScheduleError(f"skips of stage_id {stage_id} {rule}; got {sources!r}")
    return tuple(sorted(sources))


def _layer_at(layers: Sequential, place: int) -> object:
    """Return the first or last layer, of the one that stands there if it is made of several."""
    layer: object = layers
    while is_plain(layer):
        if not layer.layers:
            return None
        layer = layer.layers[place]
    return layer


def check_stages(stages: Sequence[PipelineStage]) -> tuple[PipelineStage, ...]:
    """Return stages that are numbered 0, 1, 2, ...; refuse others.

    Raises:
        ScheduleError: If there are none, or the numbers do not fit.
    """
    if not isinstance(stages, Sequence):
        raise ScheduleError(f"a pipeline takes a list of PipelineStage objects, got {stages!r}")
    if not stages:
        raise ScheduleError("a pipeline needs at least one stage, got none")
    for stage in stages:
        if not isinstance(stage, PipelineStage):
            raise ScheduleError(
                f"a pipeline is made of PipelineStage objects, got {type(stage).__name__}; "
                "use PipelineStage(i).add_layer(...)"
            )
    numbers = [stage.stage_id for stage in stages]
    if numbers != list(range(len(stages))):
        raise ScheduleError(
            f"the stages must be numbered 0 to {len(stages) - 1} in order, each once, got {numbers}"
        )
    return tuple(stages)


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
    return _placed(stages, PipelineStage.named_parameters, id)


def named_buffers(
    stages: Sequence[PipelineStage],
) -> list[tuple[str, Buffer, tuple[int, ...]]]:
    """Return each buffer once, as :func:`named_places` does parameters."""
    return _placed(stages, PipelineStage.named_buffers, lambda buffer: buffer.key)


def _placed(
    stages: Sequence[PipelineStage],
    named: Callable[[PipelineStage], list[tuple[str, T]]],
    key: Callable[[T], Hashable],
) -> list[tuple[str, T, tuple[int, ...]]]:
    names: dict[Hashable, tuple[str, T]] = {}
    places: dict[Hashable, list[int]] = {}
    offset = 0
    for number, stage in enumerate(stages):
        for name, one in named(stage):
            place, _, rest = name.partition(".")
            names.setdefault(key(one), (f"{int(place) + offset}.{rest}", one))
            places.setdefault(key(one), []).append(number)
        offset += len(stage)
    return [(*names[one], tuple(numbers)) for one, numbers in places.items()]


def find_ties(stages: Sequence[PipelineStage], placement: Sequence[int]) -> list[Tie]:
    """Return the parameters that several ranks hold, in the order of the model.

    Args:
        stages: All stages.
        placement: The place in the pipeline of each.
    """
    tied = [
        Tie(name, parameter, tuple(sorted({placement[number] for number in numbers})))
        for name, parameter, numbers in named_places(stages)
    ]
    return [tie for tie in tied if len(tie.holders) > 1]


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
        everyone: list[dict[str, str]] = agree(scope, Call("tied parameters", scope.name), mine)
        answers = dict(zip(scope.ranks, everyone, strict=True))
        for tie in self._ties:
            for line in self._lines[tie.holders]:
                check_alike(
                    {rank: answers[rank][tie.name] for rank in line},
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
    everyone = agree(scope, Call("rebuild_buckets", scope.name), mine)
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
    place in the whole model, on any rank.

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
    visited = Visited(
        parameter
        for layer, _ in layers
        for parameter in layer.parameters()
        if uses[id(parameter)] > 1 and parameter.data is not None
    )
    index = 0
    for layer, _ in layers:
        parameters = layer.parameters()
        whole = bool(parameters) and all(p.data is not None for p in parameters)
        lends = any(id(p) in wanted and p not in visited for p in parameters)
        if not whole and (id(layer) in mine or lends):
            before = [(p, p.data) for p in parameters if id(p) not in wanted]
            materialize(layer, seed=seed, dtype=dtype, xp=xp, index=index, visited=visited)
            for parameter, data in before:
                parameter.data = data
        elif id(layer) in mine:
            set_place(layer, seed=seed, index=index)
        index += num_layers(layer)


def is_used_again(stages: Sequence[PipelineStage]) -> bool:
    """Tell whether the very first layer, or one in it, stands elsewhere in the model, too.

    There the gradient of its input is read.
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

"""One stage of a pipeline: layers in order, under a number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

from mpimesh.arguments import as_int, as_items
from mpimesh.errors import ScheduleError
from mpimesh.nn import Sequential, SupportsLayer
from mpimesh.nn.sequential import is_plain

__all__ = ["PipelineStage", "check_stages"]


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

"""What the user gave a rank for a step: looked at, told to the others, cut into microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mpimesh.errors import ModuleError, ShapeError, UnknownNameError
from mpimesh.nn import Loss
from mpimesh.parallel.batch import Value, as_value
from mpimesh.parallel.engine import Engine
from mpimesh.parallel.executor import Task
from mpimesh.parallel.header import Given
from mpimesh.parallel.tree import Tree

__all__ = ["Arguments", "Batch", "input_title"]


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a step.

    Attributes:
        training: Whether it trains, or is forward only.
        x: The global batch; None if this rank does not hold the first stage.
        target: Its targets; None if this rank does not hold the last stage, or in inference.
        inputs: Further inputs by name; those of this rank's stages, at least.
        loss: The loss to train by.
        denominator: What to divide the loss by; what the global batch counts if None.
    """

    training: bool
    x: Tree | None
    target: Tree | None = None
    inputs: Mapping[str, Tree] | None = None
    loss: Loss | None = None
    denominator: float | None = None

    def look(self, engine: Engine, call: str) -> tuple[Batch, Given]:
        """Return the batch, and what the other ranks are told of it.

        Raises:
            MpimeshError: If something is missing on this rank, or does not fit.
        """
        who = f"rank {engine.mesh.rank}"
        values = self._values(engine)
        missing = self._missing(engine, values)
        if missing:
            raise ShapeError(f"{who} holds {missing}, got None")
        if self.training and engine.is_last and self.loss is None:
            raise ModuleError(f"{who} holds the last stage and needs loss=, got None")
        first = next(iter(values.values()), None)
        for value in values.values():
            if first is not None and value.rows != first.rows:
                raise ShapeError(
                    f"{first.name} and {value.name} must have the same rows; on {who} {first.name} "
                    f"has {first.rows} and {value.name} {value.rows}"
                )
        sums = {name: value.checksum() for name, value in values.items()}
        given = Given(
            call,
            None if first is None else first.rows,
            goal=self._goal(engine),
            kinds={name: value.kind() for name, value in values.items() if name != "target"},
            sums={name: text for name, text in sums.items() if text}
            if engine.mesh.settings.checks
            else {},
        )
        return Batch(self, values), given

    def _values(self, engine: Engine) -> dict[str, Value]:
        """Return all that was given here, by title."""
        given: dict[str, Any] = {"x": self.x, "target": self.target}
        inputs = {} if self.inputs is None else self.inputs
        if not isinstance(inputs, Mapping):
            raise ModuleError(f"inputs must be a dict of arrays by name, got {inputs!r}")
        for name, value in inputs.items():
            if name not in engine.input_names:
                raise UnknownNameError(
                    f"no stage takes an input called {name!r}; the stages take "
                    f"{', '.join(map(repr, engine.input_names)) or 'none'}: name it in "
                    f"PipelineStage(i, inputs=({name!r},))"
                )
            given[input_title(name)] = value
        values = {title: as_value(value, title) for title, value in given.items()}
        return {title: value for title, value in values.items() if value is not None}

    def _missing(self, engine: Engine, values: Mapping[str, Value]) -> str:
        """Say which stage lacks what, if any does."""
        if "x" not in values and engine.is_first:
            return "the first stage and needs x"
        if self.training and engine.is_last and "target" not in values:
            return "the last stage and needs target"
        for number, stage in engine.local.items():
            for name in stage.inputs:
                if input_title(name) not in values:
                    return f"stage {number} and needs inputs={{{name!r}: ...}}"
        return ""

    def _goal(self, engine: Engine) -> str | None:
        """Say what this rank trains by; None if it does not hold the last stage."""
        if not self.training or not engine.is_last:
            return None
        count = "what the batch counts"
        if self.denominator is not None:
            try:
                count = str(float(self.denominator))
            except (TypeError, ValueError, OverflowError):
                raise ModuleError(
                    f"denominator must be a number above 0, got {self.denominator!r}"
                ) from None
        return f"{type(self.loss).__name__} divided by {count}"


@dataclass(frozen=True, slots=True)
class Batch:
    """The global batch, as far as this rank was given it.

    Attributes:
        arguments: All that it was given.
        values: The batch: x, the target and further inputs, by title.
    """

    arguments: Arguments
    values: Mapping[str, Value]

    def task(self, engine: Engine, microbatches: Sequence[slice]) -> Task:
        """Return what this rank's stages are to work on.

        Args:
            engine: The model.
            microbatches: The rows of this replica's microbatches.
        """
        values, arguments = self.values, self.arguments
        names = [name for stage in engine.local.values() for name in stage.inputs]
        task = Task(
            len(microbatches),
            values["x"].cut(microbatches) if engine.is_first else None,
            inputs={name: values[input_title(name)].cut(microbatches) for name in names},
            step=engine.step,
        )
        if not arguments.training or not engine.is_last or arguments.loss is None:
            return task
        target, denominator = values["target"], arguments.denominator
        if denominator is None:
            denominator = target.denominator(arguments.loss)
        return replace(
            task, target=target.cut(microbatches), loss=arguments.loss, denominator=denominator
        )


def input_title(name: str) -> str:
    """Return how messages call a named input."""
    return f"inputs[{name!r}]"

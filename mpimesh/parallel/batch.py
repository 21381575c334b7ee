"""A batch and the other arguments of a step on one rank: looked at, told to the others, cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from mpimesh.arguments import shown
from mpimesh.arrays import Array
from mpimesh.dtensor import DTensor, DVariable
from mpimesh.errors import (
    ModuleError,
    ModuleStateError,
    ScheduleError,
    ShapeError,
    UnknownNameError,
)
from mpimesh.nn import Loss
from mpimesh.nn.foreign import loss_advice
from mpimesh.parallel.engine import Engine
from mpimesh.parallel.executor import Task
from mpimesh.parallel.header import BatchSpec, Size, checksum, input_title, sample
from mpimesh.parallel.microbatch import Microbatches, microbatch_rows, num_rows, replica_rows
from mpimesh.parallel.tree import Tree, flatten, tree_map

__all__ = ["Arguments", "SupportsStep", "Value", "as_value", "check_loss"]


@dataclass(frozen=True, slots=True)
class Value:
    """One of the values of a batch.

    Attributes:
        name: Its name in messages.
        parts: The value, or its microbatches; all arrays of one with the same rows.
        sizes: The rows of each.
        is_cut: Whether they are microbatches.
    """

    name: str
    parts: tuple[Tree, ...]
    sizes: tuple[int, ...]
    is_cut: bool

    @property
    def rows(self) -> int:
        """Rows of the whole batch."""
        return sum(self.sizes)

    def spans(self) -> list[slice]:
        """Return the rows of each part, counted in the batch."""
        ends = list(accumulate(self.sizes))
        return [slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]

    def cut(self, parts: Sequence[slice]) -> list[Tree]:
        """Return the rows of each of some parts of a batch that is whole, as views."""
        (whole,) = self.parts
        leaves, structure = flatten(whole)
        return [structure.unflatten([leaf[part] for leaf in leaves]) for part in parts]

    def kind(self) -> str:
        """Return the shapes and dtypes of a row, in words."""
        return "; ".join(map(_kind, self.parts))

    def checksum(self, *, whole: bool) -> str | None:
        """Return what tells its values from others: those on the host without Python objects.

        Args:
            whole: Whether to read all of them, or a sample.
        """
        leaves = [
            leaf
            for part in self.parts
            for leaf in flatten(part)[0]
            if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject
        ]
        if not leaves:
            return None
        return checksum(leaves if whole else map(sample, leaves))

    def denominator(self, loss: Loss) -> float:
        """Return what it counts as a target of `loss`."""
        counted = getattr(loss, "count", None)
        if counted is None:
            return float(self.rows)
        return float(sum(float(counted(part)) for part in self.parts))


def as_value(given: Any, name: str) -> Value | None:
    """Return a value that a user gave; None for None.

    Args:
        given: An array, or anything that ``np.asarray`` takes; or a tuple or a dict of them; or
            microbatches of those.
        name: Its name.

    Raises:
        ModuleError: If it is built otherwise.
        ShapeError: If an array has no rows, or not as many as the others.
    """
    if given is None:
        return None
    is_cut = isinstance(given, Microbatches)
    names = [f"{name}[{place}]" for place in range(len(given))] if is_cut else [name]
    parts = [
        tree_map(_as_array, part, name=title)
        for part, title in zip(given if is_cut else [given], names, strict=True)
    ]
    sizes = tuple(_rows(part, title) for part, title in zip(parts, names, strict=True))
    return Value(name, tuple(parts), sizes, is_cut)


def _rows(tree: Tree, name: str) -> int:
    leaves, structure = flatten(tree, name=name)
    paths = [name + path for path in structure.paths()]
    rows = [num_rows(leaf, name=path) for leaf, path in zip(leaves, paths, strict=True)]
    for other, path in zip(rows, paths, strict=True):
        if other != rows[0]:
            raise ShapeError(
                f"all arrays of {name} must have the same rows; {paths[0]} has {rows[0]} and "
                f"{path} {other}"
            )
    return rows[0]


def _kind(tree: Tree) -> str:
    leaves, structure = flatten(tree)
    return ", ".join(
        f"{path}{' ' if path else ''}{tuple(leaf.shape[1:])} {leaf.dtype}"
        for leaf, path in zip(leaves, structure.paths(), strict=True)
    )


def _as_array(x: Any, path: str) -> Array:
    if x is None:
        raise ShapeError(f"{path} is None, where it must be an array")
    if isinstance(x, Microbatches):
        raise ModuleError(f"{path} is Microbatches: they go around a tuple or dict, not into it")
    if isinstance(x, DTensor | DVariable):
        raise ModuleError(
            f"{path} is a split array, and the ranks are given whole ones, of which each takes its "
            f"rows: give {path.split('[')[0]}.full(), which all ranks call; got {x!r}"
        )
    return x if hasattr(x, "shape") else np.asarray(x)


# -- all arguments of a step -----------------------------------------------------------------------


class SupportsStep(Protocol):
    """A changer of parameters by their gradients, such as an :class:`~mpimesh.optim.Optimizer`."""

    def step(self) -> object:
        """Change the parameters."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a step.

    Attributes:
        training: Whether it trains, or is forward only.
        x: The global batch; None if this rank does not hold the first stage.
        target: Its targets; None if this rank does not hold the last stage, or there is no loss.
        inputs: Further inputs by name; those of this rank's stages, at least.
        loss: The loss to train or to evaluate by.
        denominator: What to divide the loss by; what the global batch counts if None.
        optimizer: Changes the parameters at the end; None leaves that to the caller.
        everywhere: Whether all ranks are to get what a forward gives.
        evaluating: Whether a forward is to give its loss instead of what it makes.
    """

    training: bool
    x: Tree | None
    target: Tree | None = None
    inputs: Mapping[str, Tree] | None = None
    loss: Loss | None = None
    denominator: float | None = None
    optimizer: SupportsStep | None = None
    everywhere: bool = False
    evaluating: bool = False

    @property
    def with_loss(self) -> bool:
        """True if the step computes a loss, so that its last stage needs one, and targets."""
        return self.training or self.evaluating

    def look(self, engine: Engine, call: str) -> tuple[dict[str, Value], BatchSpec]:
        """Return the batch by title, as far as it was given, and what other ranks compare of it.

        Raises:
            MpimeshError: If something is missing on this rank, or does not fit.
        """
        who = f"rank {engine.mesh.rank}"
        self._check_optimizer(engine, who)
        values = self._values(engine)
        missing = self._missing(engine, values)
        if missing:
            raise ShapeError(f"{who} holds {missing}, got None")
        if self.with_loss and engine.is_last and self.loss is None:
            raise ModuleError(
                f"{who} needs loss=, got None: give one, such as loss=nn.cross_entropy, where the "
                "last stage is, or the whole model"
            )
        check_loss(self.loss, who)
        engine.tensor.check_loss(self.loss)
        first = next(iter(values.values()), None)
        for value in values.values():
            if first is not None:
                _check_rows(first, value, who)
        checks = bool(engine.mesh.settings.checks)
        # Without checks nothing is brought from a device for it.
        unseen = self.training and engine.first_values and (checks or engine.xp is np)
        spec = BatchSpec(
            call,
            None if first is None else first.rows,
            None if first is None else len(first.sizes) if first.is_cut else 0,
            sizes=", ".join(map(str, first.sizes)) if first is not None and first.is_cut else None,
            goal=self._goal(engine),
            kinds={name: value.kind() for name, value in values.items() if name != "target"},
            sums=_checksums(values, whole=checks) if checks or unseen else {},
            place=engine.place,
            optimizer=None if self.optimizer is None else numbers_of(self.optimizer),
            parameters=engine.digests() if unseen or (checks and self.training) else {},
        )
        return values, spec

    def task(self, engine: Engine, values: Mapping[str, Value], size: Size) -> Task:
        """Return what this rank's stages are to work on, of this replica's share of the batch.

        Raises:
            ScheduleError: If it is given as more microbatches than the replicas may have.
        """
        spans, part = _share(engine, values, size)

        def cut(title: str) -> list[Tree]:
            if part is not None:
                return list(values[title].parts[part])
            return values[title].cut([span for span in spans if span is not None])

        names = [name for stage in engine.local.values() for name in stage.inputs]
        task = Task(
            spans,
            is_cut=part is not None,
            x=cut("x") if engine.is_first else None,
            inputs={name: cut(input_title(name)) for name in names},
            step=engine.step,
        )
        if not self.with_loss or not engine.is_last or self.loss is None:
            return task
        denominator = self.denominator
        if denominator is None:
            denominator = values["target"].denominator(self.loss)
        return replace(
            task,
            target=cut("target"),
            loss=self.loss,
            # So the loss is scaled before anything is rounded to the model's dtype.
            denominator=denominator / engine.loss_scale,
        )

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
        if self.with_loss and engine.is_last and "target" not in values:
            return "the last stage and needs target"
        for number, stage in engine.local.items():
            for name in stage.inputs:
                if input_title(name) not in values:
                    return f"stage {number} and needs inputs={{{name!r}: ...}}"
        return ""

    def _check_optimizer(self, engine: Engine, who: str) -> None:
        if self.optimizer is None:
            return
        if isinstance(self.optimizer, type) or not callable(getattr(self.optimizer, "step", None)):
            raise ModuleError(
                f"{who}: optimizer= needs an object with a method step(), got {self.optimizer!r}"
            )
        if engine.optimizer is not None and self.optimizer is not engine.optimizer:
            raise ModuleError(
                f"{who}: the model has a ParallelOptimizer, which alone knows what its gradients "
                f"are; give that as optimizer=, got {self.optimizer!r}"
            )
        if engine.optimizer is None and engine.stage and engine.data.size > 1:
            raise ModuleError(
                f"{who}: the replicas divide gradients and parameters, which only a "
                f"ParallelOptimizer steps: mm.ParallelOptimizer({type(self.optimizer).__name__}"
                "(model.parameters()), model)"
            )
        done = getattr(self.optimizer, "steps", 0)
        if not engine.step and not engine.is_step_known and isinstance(done, int) and done:
            raise ModuleStateError(
                f"{who}: the optimizer has done {done} steps, and the model does not know of any: "
                f"set model.step = {done} to go on with that training, as what dropout draws goes "
                "by it, or model.step = 0 to begin another"
            )
        if engine.accumulating:
            raise ModuleError(
                f"{who}: a step under no_sync leaves gradients that are not summed over the "
                "replicas; give optimizer= to the last of the steps only"
            )

    def _goal(self, engine: Engine) -> str | None:
        """Say what loss this rank computes; None if it does not hold the last stage."""
        if not self.with_loss or not engine.is_last:
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


def _share(
    engine: Engine, values: Mapping[str, Value], size: Size
) -> tuple[Sequence[slice | None], slice | None]:
    """Return this replica's share of a batch.

    Returns:
        The rows of each of its microbatches, counted in the global batch, or None where this rank
        does not know them; and which microbatches of a batch that is given cut, None if it is
        given whole.
    """
    replicas, mine = engine.data.size, engine.data.rank or 0
    if not size.count:
        return _row_spans(size.rows, replicas, mine, engine.num_microbatches), None
    most = replicas * engine.num_microbatches
    if size.count > most:
        raise ScheduleError(
            f"a batch of {size.count} microbatches was given to {replicas} replicas of at most "
            f"{engine.num_microbatches} each: give at most {most}, or make the pipeline with "
            f"num_microbatches={-(-size.count // replicas)}"
        )
    part = replica_rows(size.count, replicas, mine)
    first = next(iter(values.values()), None)
    if first is None:
        return [None] * (part.stop - part.start), part
    return first.spans()[part], part


def _row_spans(rows: int, replicas: int, mine: int, most: int) -> list[slice | None]:
    """Return the rows of a replica's microbatches, counted in the global batch."""
    part = replica_rows(rows, replicas, mine)
    count = part.stop - part.start
    # A replica that gets none of some rows has nothing to do. Without any rows at all, all
    # replicas send a microbatch of none through the stages, to learn the output's shape.
    spans = microbatch_rows(count, most) if count or not rows else ()
    return [slice(part.start + span.start, part.start + span.stop) for span in spans]


def check_loss(loss: object, who: str = "") -> None:
    """Refuse what is neither a loss nor None.

    Raises:
        ModuleError: If it is refused.
    """
    is_loss = callable(getattr(loss, "value_and_grad", None)) and not isinstance(loss, type)
    if loss is None or is_loss:
        return
    raise ModuleError(
        f"{who and who + ': '}loss= needs a method value_and_grad(y, target, denominator=), as "
        f"mm.nn.cross_entropy has and help(mm.nn.Loss) tells, got {shown(loss)}{loss_advice(loss)}"
    )


def _check_rows(first: Value, value: Value, who: str) -> None:
    """Refuse two values of a batch whose rows do not belong together."""
    if first.is_cut != value.is_cut:
        cut, whole = (first, value) if first.is_cut else (value, first)
        raise ShapeError(
            f"on {who} {cut.name} is given as Microbatches and {whole.name} is not: give all so, "
            "or none"
        )
    if len(first.sizes) != len(value.sizes):
        raise ShapeError(
            f"{first.name} and {value.name} must have the same number of microbatches; on {who} "
            f"{first.name} has {len(first.sizes)} and {value.name} {len(value.sizes)}"
        )
    for place, (one, other) in enumerate(zip(first.sizes, value.sizes, strict=True)):
        if one != other:
            where = f" in microbatch {place}" if value.is_cut else ""
            raise ShapeError(
                f"{first.name} and {value.name} must have the same rows; on {who} {first.name} "
                f"has {one} and {value.name} {other}{where}"
            )


def numbers_of(optimizer: SupportsStep) -> str:
    """Return an optimizer's class, and those of its numbers that replicas must have alike."""
    parts = getattr(optimizer, "optimizers", (optimizer,))
    return "; ".join(
        f"{type(one).__name__} "
        + ", ".join(f"{name}={getattr(one, name)!r}" for name in getattr(one, "numbers", ()))
        for one in parts
    )


def _checksums(values: Mapping[str, Value], *, whole: bool) -> dict[str, str]:
    """Return the checksums of the values that have one; reads their memory, or a sample of it."""
    sums = {name: value.checksum(whole=whole) for name, value in values.items()}
    return {name: text for name, text in sums.items() if text}

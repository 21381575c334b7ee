"""A batch and the other arguments of a step on one rank: looked at, told to the others, cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, Protocol

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
from mpimesh.layout import Layout, Replicate, Shard
from mpimesh.nn import Loss
from mpimesh.nn.checks import loss_advice
from mpimesh.parallel.engine import Engine
from mpimesh.parallel.executor import Task
from mpimesh.parallel.header import OWN_ROWS, BatchSpec, Size, checksum, input_title, sample
from mpimesh.parallel.microbatch import Microbatches, microbatch_rows, num_rows, replica_rows
from mpimesh.parallel.tree import Tree, flatten, tree_map

__all__ = [
    "Arguments",
    "Rows",
    "SupportsStep",
    "Value",
    "as_value",
    "check_loss",
    "split_layout",
]

Rows = Literal["whole", "local"]
"""The rows of plain arrays: those of the global batch, or those of this rank's replica."""


@dataclass(frozen=True, slots=True)
class Value:
    """One of the values of a batch.

    Attributes:
        name: Its name in messages.
        parts: The value, or its microbatches; all arrays of one with the same rows.
        sizes: The rows of each.
        is_cut: Whether they are microbatches.
        is_split: Whether they are this rank's blocks of split arrays.
    """

    name: str
    parts: tuple[Tree, ...]
    sizes: tuple[int, ...]
    is_cut: bool
    is_split: bool = False

    @property
    def rows(self) -> int:
        """Rows of all parts."""
        return sum(self.sizes)

    def spans(self) -> list[slice]:
        """Return the rows of each part, counted in the batch."""
        ends = list(accumulate(self.sizes))
        return [slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]

    def cut(self, parts: Sequence[slice], start: int = 0) -> list[Tree]:
        """Return the rows of each of some parts of a batch, as views.

        Args:
            parts: Rows, counted in the global batch.
            start: The first of them that is here.
        """
        (rows,) = self.parts
        leaves, structure = flatten(rows)
        return [
            structure.unflatten([leaf[part.start - start : part.stop - start] for leaf in leaves])
            for part in parts
        ]

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


def as_value(
    given: Any, name: str, *, block: Callable[[DTensor, str], Array] | None = None
) -> Value | None:
    """Return a value that a user gave; None for None.

    Args:
        given: An array, or anything that ``np.asarray`` takes; or a tuple or a dict of them; or
            microbatches of those.
        name: Its name.
        block: What gives this rank's block of a split array; None refuses these.

    Raises:
        ModuleError: If it is built otherwise.
        ShapeError: If an array has no rows, or not as many as the others.
    """
    if given is None:
        return None
    is_cut = isinstance(given, Microbatches)
    names = [f"{name}[{place}]" for place in range(len(given))] if is_cut else [name]
    kinds: set[bool] = set()

    def taken(x: Any, path: str) -> Array:
        is_split = isinstance(x, DTensor | DVariable)
        kinds.add(is_split)
        if not is_split or block is None or is_cut:
            return _as_array(x, path)
        return block(x.value() if isinstance(x, DVariable) else x, path)

    parts = [
        tree_map(taken, part, name=title)
        for part, title in zip(given if is_cut else [given], names, strict=True)
    ]
    sizes = tuple(_rows(part, title) for part, title in zip(parts, names, strict=True))
    if len(kinds) > 1:
        raise ModuleError(
            f"{name} holds split arrays and others: give each as a DTensor that is split by rows, "
            "or none"
        )
    return Value(name, tuple(parts), sizes, is_cut, is_split=True in kinds)


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
            f"{path} is a split array, where whole ones are needed: give "
            f"{path.split('[')[0]}.full(), which all ranks call; got {x!r}"
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
        rows: Which rows plain arrays hold. Those of DTensors are split in any case.
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
    rows: Rows = "whole"

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
        is_local = self._are_local(values, who)
        for value in values.values():
            if first is not None:
                _check_rows(first, value, who)
        # The rows of the only replica are the whole batch.
        replica = engine.data.rank if is_local and engine.data.size > 1 else None
        checks = bool(engine.mesh.settings.checks)
        # Without checks nothing is brought from a device for it.
        is_first = engine.first_values if self.training else engine.first_forward
        unseen = is_first and (checks or engine.xp is np)
        parameters = (self.training and unseen) or (checks and self.training)
        spec = BatchSpec(
            call,
            None if first is None else first.rows,
            None if first is None else _count(first, is_local=replica is not None),
            sizes=", ".join(map(str, first.sizes)) if first is not None and first.is_cut else None,
            goal=self._goal(engine),
            kinds={name: value.kind() for name, value in values.items() if name != "target"},
            sums=_checksums(values, whole=checks) if checks or unseen else {},
            place=engine.place,
            optimizer=None if self.optimizer is None else numbers_of(self.optimizer),
            parameters=engine.digests() if parameters else {},
            replica=replica,
            counted=None if replica is None else self._counted(engine, values),
        )
        return values, spec

    def task(self, engine: Engine, values: Mapping[str, Value], size: Size) -> Task:
        """Return what this rank's stages are to work on, of this replica's share of the batch.

        Raises:
            ScheduleError: If it is given as more microbatches than the replicas may have.
        """
        spans, part = _share(engine, values, size)
        start = _first_row(engine, size) if size.own else 0

        def cut(title: str) -> list[Tree]:
            if part is not None:
                return list(values[title].parts[part])
            return values[title].cut([span for span in spans if span is not None], start)

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
        if denominator is None and size.own:
            denominator = float(size.rows) if size.counted is None else size.counted
        elif denominator is None:
            denominator = values["target"].denominator(self.loss)
        return replace(
            task,
            target=cut("target"),
            loss=self.loss,
            # So the loss is scaled before anything is rounded to the model's dtype.
            denominator=denominator / (engine.loss_scale * engine.loss_share),
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

        def block(x: DTensor, path: str) -> Array:
            return _block(engine, x, path)

        values = {title: as_value(value, title, block=block) for title, value in given.items()}
        return {title: value for title, value in values.items() if value is not None}

    def _are_local(self, values: Mapping[str, Value], who: str) -> bool:
        """Tell whether the values hold the rows of this rank's replica only.

        Raises:
            ModuleError: If some do and others do not, or `rows` is neither.
        """
        if self.rows not in ("whole", "local"):
            raise ModuleError(
                f'{who}: rows= is "whole" where every rank gives the global batch, or "local" '
                f"where each gives the rows of its own replica, got {shown(self.rows)}"
            )
        if self.rows == "local":
            cut = next((value.name for value in values.values() if value.is_cut), None)
            if cut is not None:
                raise ModuleError(
                    f'{who}: {cut} is Microbatches, which with rows="local" are not dealt to the '
                    "replicas: give the Microbatches of all replicas on every rank, or arrays"
                )
            return True
        split = [value.name for value in values.values() if value.is_split]
        plain = [value.name for value in values.values() if not value.is_split]
        if split and plain:
            raise ModuleError(
                f"on {who} {split[0]} is split by rows and {plain[0]} is not: give both as "
                f'DTensors; or both as plain arrays of this rank\'s rows with rows="local"; or '
                f"{split[0]}.full(), which all ranks call, beside the whole {plain[0]}"
            )
        return bool(split)

    def _counted(self, engine: Engine, values: Mapping[str, Value]) -> float | None:
        """Return what the replica's own targets count, None if that is their rows."""
        if not self.with_loss or not engine.is_last or self.denominator is not None:
            return None
        if getattr(self.loss, "count", None) is None or self.loss is None:
            return None
        counted = values["target"].denominator(self.loss)
        if not counted >= 0:
            raise ModuleError(
                f"{type(self.loss).__name__}.count must give a number of at least 0, got {counted}"
            )
        return counted

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
        if self.training and engine.why_no_optimizer:
            raise ModuleError(f"{who}: {engine.why_no_optimizer}")
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
        part = replica_rows(size.rows, replicas, mine)
        if size.own:
            start = _first_row(engine, size)
            part = slice(start, start + (size.own[mine] or 0))
        return _row_spans(part, size.rows, engine.num_microbatches), None
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


def _first_row(engine: Engine, size: Size) -> int:
    """Return where the rows begin that this replica was given, counted in the global batch."""
    return sum(rows or 0 for rows in size.own[: engine.data.rank or 0])


def _row_spans(part: slice, rows: int, most: int) -> list[slice | None]:
    """Return the rows of the microbatches of a replica that has the rows `part` of all."""
    count = part.stop - part.start
    # A replica that gets none of some rows has nothing to do. Without any rows at all, all
    # replicas send a microbatch of none through the stages, to learn the output's shape.
    spans = microbatch_rows(count, most) if count or not rows else ()
    return [slice(part.start + span.start, part.start + span.stop) for span in spans]


def split_layout(engine: Engine) -> Layout:
    """Return the layout of a batch of which each replica has its rows."""
    mesh, data = engine.mesh, engine.data
    split = data.name if data.size > 1 else None
    return Layout(mesh, [Shard(0) if dim == split else Replicate() for dim in mesh.dim_names])


def _block(engine: Engine, x: DTensor, path: str) -> Array:
    """Return this rank's block of a batch that is split by rows over the replicas.

    Raises:
        ModuleError: If it is split otherwise.
    """
    mesh, wanted = x.layout.mesh, split_layout(engine)
    if mesh != wanted.mesh:
        raise ModuleError(
            f"{path} lies on {mesh}, and the model on {wanted.mesh}: "
            f"{path}.redistribute({wanted.text!r}, mesh=...) moves it there; got {x!r}"
        )
    for dim, spec, right in zip(mesh.dim_names, x.placement, wanted.placement, strict=True):
        is_right = type(spec) is type(right) and getattr(spec, "axis", 0) == 0
        by_rows = isinstance(spec, Shard) and spec.axis == 0
        if not (is_right or (by_rows and mesh.dim_size(dim) == 1)):
            raise ModuleError(
                f"{path} must be split by rows over the replicas and lie whole along other dims: "
                f"{path}.redistribute({wanted.text!r}), which all ranks call; got {x!r}"
            )
    return x.local


def _count(value: Value, *, is_local: bool) -> int:
    if is_local:
        return OWN_ROWS
    return len(value.sizes) if value.is_cut else 0


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

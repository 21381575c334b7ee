"""The interfaces of stages, and the work of one rank's stages in a step.

A task is planned for all batches of one signature (:meth:`mpimesh.parallel.batch.Batch.signature`):
what the ranks compare of them, the rows of each microbatch, the actions, and the interfaces of
stages. A step with such a batch binds it to its arrays, and lets go of them at its end.

How large a message is both ends must know before it moves. A stage's *interface* is the structure
of its output, and for each of its arrays the shape of a row, and the dtype; the gradient that comes
back has the same, but an array whose dtype is not floating has none. There are two modes. Where a
batch is given whole, a stage has one interface for all microbatches: its sender announces it before
the first activation, both ends know it in the next steps, and an output that does not keep to it is
refused where it was made. Where a batch is given as microbatches, their shapes are *free*: each has
interfaces of its own, every activation is announced, and the announcement also tells which rows of
the batch come, as ranks in the middle of the pipeline were not given any.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Self, TypeAlias

import numpy as np

from mpimesh.arrays import Array, DType, HostArray
from mpimesh.arrays.dtypes import dtype_from_json, dtype_to_json
from mpimesh.errors import ModuleStateError, ScheduleError, ShapeError, TransportError
from mpimesh.nn import Loss
from mpimesh.nn.protocol import has_gradient
from mpimesh.parallel.header import Facts, Size
from mpimesh.parallel.microbatch import (
    Structure,
    Tree,
    flatten,
    microbatch_rows,
    replica_rows,
    tree_map,
)
from mpimesh.parallel.plans import StepPlan
from mpimesh.parallel.stage import PipelineStage

__all__ = [
    "FIRST_PIECE_BYTES",
    "NO_TASK",
    "Interface",
    "Kind",
    "Leaf",
    "Task",
    "check_gradient",
    "check_output",
    "first_gradient",
    "input_title",
    "length_of",
    "pieces",
]

FIRST_PIECE_BYTES = 2048
"""Room for the first piece of an announcement, nearly always all of it."""

_MARK = b"mpimesh\0"
_LENGTH = np.dtype("<u8")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a stage's output.

    Attributes:
        row_shape: The shape of a row.
        dtype: The dtype.
    """

    row_shape: tuple[int, ...]
    dtype: DType

    @property
    def has_gradient(self) -> bool:
        """True if a gradient comes back for it: its dtype is floating."""
        return has_gradient(self.dtype)

    def shape(self, rows: int) -> tuple[int, ...]:
        """Return the shape of so many rows."""
        return (rows, *self.row_shape)

    def fits(self, x: Any, rows: int) -> bool:
        """Tell whether `x` is an array of so many of these rows."""
        shape: object = getattr(x, "shape", None)
        return shape == (rows, *self.row_shape) and bool(x.dtype == self.dtype)

    def __str__(self) -> str:
        return f"rows of shape {self.row_shape} and dtype {self.dtype}"


@dataclass(frozen=True, slots=True)
class Interface:
    """The outputs of a stage.

    Attributes:
        structure: How their arrays are put together.
        leaves: The arrays.
        gradients: Those that have a gradient.
        sole: The array where an output is just that, as it mostly is; else None.
    """

    structure: Structure
    leaves: tuple[Leaf, ...]
    gradients: tuple[Leaf, ...] = field(init=False, repr=False, compare=False)
    sole: Leaf | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        gradients = tuple(leaf for leaf in self.leaves if leaf.has_gradient)
        object.__setattr__(self, "gradients", gradients)
        sole = self.leaves[0] if self.structure.parts is None else None
        object.__setattr__(self, "sole", sole)

    def gradient_tree(self, gradients: list[Array]) -> Tree:
        """Return the gradients of :attr:`gradients` in the places of the arrays, None in others."""
        if self.sole is not None:
            return gradients[0]
        rest = iter(gradients)
        return self.structure.unflatten(
            [next(rest) if leaf.has_gradient else None for leaf in self.leaves]
        )

    def to_json(self) -> Any:
        """Return a JSON value that :meth:`from_json` reads."""
        leaves = [[leaf.row_shape, dtype_to_json(leaf.dtype)] for leaf in self.leaves]
        return [self.structure.to_json(), leaves]

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read what :meth:`to_json` gave."""
        structure, leaves = value
        return cls(
            Structure.from_json(structure),
            tuple(Leaf(tuple(shape), dtype_from_json(dtype)) for shape, dtype in leaves),
        )

    def __str__(self) -> str:
        pairs = zip(self.leaves, self.structure.paths(), strict=True)
        return ", ".join(f"{leaf}{_at(path)}" for leaf, path in pairs)


def check_output(
    y: Tree, *, stage: int, rows: int, interface: Interface | None
) -> tuple[list[Array], Interface]:
    """Hold the output of a stage to its interface; return its arrays and the interface.

    Args:
        y: The output.
        stage: The stage that made it.
        rows: Rows of the microbatch that it is of.
        interface: What the next stage expects; None if it does not know yet.

    Raises:
        ModuleError: If `y` is no tree of arrays.
        ShapeError: If an array has other rows, or another shape or dtype than expected.
    """
    if interface is not None and interface.sole is not None and interface.sole.fits(y, rows):
        return [y], interface
    leaves, structure = flatten(y, name=f"the output of stage {stage}")
    for leaf, path in zip(leaves, structure.paths(), strict=True):
        shape = tuple(leaf.shape)
        if not shape or shape[0] != rows:
            raise ShapeError(
                f"stage {stage} made an output of shape {shape}{_at(path)} from an input of {rows} "
                "rows: a stage gives one row for each that it gets"
            )
    got = Interface(
        structure, tuple(Leaf(tuple(leaf.shape[1:]), np.dtype(leaf.dtype)) for leaf in leaves)
    )
    if interface is not None and interface != got:
        made, expected = _difference(got, interface)
        raise ShapeError(
            f"stage {stage} made {made} for stage {stage + 1}, which expects {expected} as before"
        )
    return leaves, got


def _difference(got: Interface, expected: Interface) -> tuple[str, str]:
    """Return the texts of both; of the first leaf that differs, if they are built alike."""
    if got.structure != expected.structure:
        return f"{got.structure}, {got}", f"{expected.structure}, {expected}"
    pairs = zip(got.leaves, expected.leaves, got.structure.paths(), strict=True)
    return next((f"{a}{_at(path)}", f"{b}{_at(path)}") for a, b, path in pairs if a != b)


def check_gradient(
    dx: Tree | None, *, stage: int, source: int, rows: int, interface: Interface
) -> list[Array]:
    """Hold the gradient that a stage gives back to the interface of a stage before it.

    Args:
        dx: The gradient.
        stage: The stage that made it.
        source: The stage whose output it is the gradient of.
        rows: Rows of that output.
        interface: That of `source`.

    Returns:
        The gradients of the arrays that have one.

    Raises:
        ModuleStateError: If one is missing.
        ShapeError: If it is built otherwise, or one has another shape or dtype than the output.
    """
    if interface.sole is not None and interface.gradients and interface.sole.fits(dx, rows):
        return [dx]
    if dx is None or not interface.gradients:
        raise ModuleStateError(
            f"stage {stage} gives no gradient for what it gets from stage {source}, which is to be "
            "trained: return zeros where the gradient is 0, or put a layer that can give none into "
            "the first stage"
        )
    gradients = interface.structure.leaves_of(dx)
    if gradients is None:
        raise ShapeError(
            f"stage {stage} made a gradient that is {_kind(dx)} for stage {source}, whose output "
            f"was {interface.structure}: a gradient is built like what it is of"
        )
    checked: list[Array] = []
    for gradient, leaf, path in zip(
        gradients, interface.leaves, interface.structure.paths(), strict=True
    ):
        if not leaf.has_gradient:
            continue
        if gradient is None:
            raise ModuleStateError(
                f"stage {stage} gives no gradient{_at(path)} of its input, {leaf}, so stage "
                f"{source} could not be trained by it: give zeros where it does not matter"
            )
        expected = leaf.shape(rows)
        if tuple(gradient.shape) != expected or gradient.dtype != leaf.dtype:
            raise ShapeError(
                f"stage {stage} made a gradient of shape {tuple(gradient.shape)} and dtype "
                f"{gradient.dtype}{_at(path)} for stage {source}, whose output had shape "
                f"{expected} and dtype {leaf.dtype}{_at(path)}"
            )
        checked.append(gradient)
    return checked


def first_gradient(dx: Tree | None, structure: Structure, entries: int) -> Tree | None:
    """Return the gradient of the first of several things that a stage was given.

    Args:
        dx: What its backward returned: a tuple of gradients, or the first one only. If `dx` as a
            whole is built like the first one, it is that.
        structure: How the first one is built.
        entries: How many things the stage was given.
    """
    if entries == 1 or not isinstance(dx, tuple) or len(dx) != entries:
        return dx
    if structure.leaves_of(dx) is None:
        return dx[0]
    return dx


def _at(path: str) -> str:
    return path and f" in {path}"


def _kind(tree: Tree) -> str:
    """Return how a gradient is built, whatever stands in it."""
    if isinstance(tree, tuple):
        return f"({', '.join(map(_kind, tree))})"
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key!r}: {_kind(tree[key])}" for key in tree) + "}"
    return "array" if hasattr(tree, "shape") else type(tree).__name__


# -- announcements ---------------------------------------------------------------------------------


def pieces(text: bytes) -> list[HostArray]:
    """Return a text of any length as messages: its length and beginning, then what is left."""
    data = _MARK + np.array(len(text), _LENGTH).tobytes() + text
    cut = np.split(np.frombuffer(data, np.uint8).copy(), [FIRST_PIECE_BYTES])
    return [piece for piece in cut if piece.size]


def length_of(first: HostArray) -> tuple[int, HostArray]:
    """Return the bytes of a text that are still to come after its first piece, and that part.

    Raises:
        TransportError: If this is no first piece, but data of ranks that were given another kind of
            batch.
    """
    start = len(_MARK) + _LENGTH.itemsize
    if bytes(first[: len(_MARK)]) != _MARK or first.size < start:
        raise TransportError("data came where an announcement of its shape was expected")
    total = int(first[len(_MARK) : start].view(_LENGTH)[0])
    return total - (first.size - start), first[start:]


# -- the work of a step ----------------------------------------------------------------------------


Kind: TypeAlias = tuple[tuple[int, ...], DType, int]
"""The shape, the dtype and the bytes of an array of a microbatch."""

_NOTHING = StepPlan((), 0)


def input_title(name: str) -> str:
    """Return how messages call a named input."""
    return f"inputs[{name!r}]"


class Task:
    """The work of one rank's stages in a step.

    Args:
        facts: What the ranks compare of such a batch.
        numbers: The same as numbers, see :meth:`StepExchanges.begin`.
        code: Of these in one, but for the step's number and the optimizer's numbers.
        size: The size of such a batch, where this rank can tell; None where it learns it from the
            header.
        training: With backward, or forward only.
        first_trained: The first stage with anything to train; none before has a backward.

    Attributes:
        expected: The size that was given.
        size: What the microbatches were worked out for; None before.
        rows: Rows of the global batch.
        count: In how many microbatches it was given; 0 if it was given whole.
        own: Where each replica has its own rows, how many; else empty.
        spans: The rows of each microbatch, counted in the global batch; None where this rank does
            not know them.
        num_given: How many microbatches this replica was given; others have no rows.
        free: Whether each microbatch has shapes of its own.
        plan: What this rank does.
        actions: The same, bound to functions by the executor.
        step: Number of the training step.
        x: Each microbatch's input; None on ranks without the first stage.
        inputs: Each microbatch's further inputs, by name, where a stage here takes them.
        target: Their targets; None on ranks without the last stage, and where there is no loss.
        loss: The loss; None where the outputs are wanted instead.
        denominator: What the loss is divided by.
    """

    def __init__(
        self,
        facts: Facts | None = None,
        numbers: Sequence[int] = (),
        code: int = 0,
        size: Size | None = None,
        *,
        training: bool = False,
        first_trained: int = 0,
    ) -> None:
        self.facts: Facts = {} if facts is None else facts
        self.numbers = numbers
        self.code = code
        self.expected = size
        self.training = training
        self.first_trained = first_trained
        self.size: Size | None = None
        self.rows = self.count = 0
        self.own: tuple[int | None, ...] = ()
        self.spans: list[slice | None] = []
        self.num_given = 0
        self.free = False
        self.plan = _NOTHING
        self.actions: Sequence[Any] = ()
        self._planned_spans: tuple[slice | None, ...] = ()
        self._takes_x = False
        self._names: list[str] = []
        self._part = slice(0, 0)  # of the microbatches that are given
        self._cuts: list[slice] = []  # of the rows that are given
        self._interfaces: dict[int, Interface] = {}
        self._of_microbatches: dict[tuple[int, int], Interface] = {}
        self._kinds: dict[tuple[int, int, bool], tuple[Kind, ...]] = {}
        self.step = 0
        self.x: Sequence[Tree] | None = None
        self.inputs: dict[str, Sequence[Tree]] = {}
        self.target: Sequence[Tree] | None = None
        self.loss: Loss | None = None
        self.denominator = 1.0

    def lay_out(
        self,
        size: Size,
        interfaces: dict[int, Interface],
        *,
        stages: Mapping[int, PipelineStage],
        replicas: int,
        replica: int,
        most: int,
        alike: bool,
        sizes: Sequence[int] = (),
    ) -> None:
        """Work out the microbatches of a batch. Local.

        Args:
            size: The size of the batch.
            interfaces: Those that are known of such inputs, by stage; completed here, but not where
                shapes are free.
            stages: The stages of this rank, by number.
            replicas: How many share the batch.
            replica: Which of them this rank is of.
            most: Most microbatches of each.
            alike: Whether replicas meet in layers, so that each runs as many microbatches as any
                other: at its end some of no rows.
            sizes: The rows of the microbatches that this rank was given, if it was given such.

        Raises:
            ScheduleError: If it is given as more microbatches than the replicas may have.
        """
        rows, count, _, own, _ = size
        spans: list[slice | None]
        if count > replicas * most:
            raise ScheduleError(
                f"a batch of {count} microbatches was given to {replicas} replicas of at most "
                f"{most} each: give at most {replicas * most}, or make the pipeline with "
                f"num_microbatches={-(-count // replicas)}"
            )
        if count:
            part = self._part = replica_rows(count, replicas, replica)
            ends = list(accumulate(sizes))
            known = [slice(end - rows, end) for end, rows in zip(ends, sizes, strict=True)]
            spans = [*known[part]] if sizes else [None] * (part.stop - part.start)
            start, wanted = 0, -(-count // replicas)
        else:
            start = sum(count or 0 for count in own[:replica])
            parts = [slice(0, count or 0) for count in own] or [
                replica_rows(rows, replicas, one) for one in range(replicas)
            ]
            part = slice(start, start + parts[replica].stop) if own else parts[replica]
            spans = [*_row_spans(part, rows, most)]
            wanted = max(len(_row_spans(one, rows, most)) for one in parts)
        self.num_given = len(spans)
        if alike:
            last = spans[-1] if spans else slice(start, start)
            empty = None if last is None else slice(last.stop, last.stop)
            spans += [empty] * (wanted - len(spans))
        self._cuts = [slice(span.start - start, span.stop - start) for span in spans if span]
        self.size, self.rows, self.count, self.own = size, rows, count, own
        self.free = bool(count)
        self._takes_x = 0 in stages
        self._names = [name for stage in stages.values() for name in stage.inputs]
        self.spans, self._planned_spans = spans, (*spans,)
        self._interfaces = interfaces
        self._kinds.clear()

    def is_filler(self, microbatch: int) -> bool:
        """Tell whether a microbatch has no rows, and runs only because other replicas run more."""
        return microbatch >= self.num_given

    def bind(
        self,
        values: Mapping[str, Sequence[Tree]],
        *,
        step: int,
        loss: Loss | None,
        denominator: float,
    ) -> None:
        """Take the arrays of a step. Local.

        Args:
            values: What this rank was given, by title: the value, or its microbatches.
            step: Number of the training step.
            loss: The loss, where the last stage is here and one is wanted; None elsewhere.
            denominator: What it is divided by.
        """
        self.step = step
        self.x = self._cut(values["x"]) if self._takes_x else None
        self.inputs = {name: self._cut(values[input_title(name)]) for name in self._names}
        self.loss, self.denominator = loss, denominator
        self.target = None if loss is None else self._cut(values["target"])

    def end(self) -> None:
        """Let go of the arrays of a step. Local."""
        self.x = self.target = self.loss = None
        self.inputs = {}
        if self.free:
            self.spans = [*self._planned_spans]
            self._of_microbatches.clear()
            self._kinds.clear()

    def _cut(self, parts: Sequence[Tree]) -> Sequence[Tree]:
        """Return this replica's microbatches of a value, as views."""
        if self.free:
            none = [tree_map(lambda leaf, _: leaf[:0], parts[0])]
            return [*parts[self._part], *none * (len(self.spans) - self.num_given)]
        (whole,) = parts
        if not isinstance(whole, tuple | dict):
            return [whole[cut] for cut in self._cuts]
        leaves, structure = flatten(whole)
        return [structure.unflatten([leaf[cut] for leaf in leaves]) for cut in self._cuts]

    # -- rows and interfaces of microbatches ---------------------------------------------------

    @property
    def announced(self) -> frozenset[int]:
        """The stages whose interface is known for all microbatches."""
        return frozenset() if self.free else frozenset(self._interfaces)

    def span(self, microbatch: int) -> slice:
        """Return the rows of a microbatch, counted in the global batch.

        Raises:
            ModuleStateError: If it has not been announced.
        """
        span = self.spans[microbatch]
        if span is None:
            raise ModuleStateError(f"nothing is known of the rows of microbatch {microbatch}")
        return span

    def num_rows(self, microbatch: int) -> int:
        """Return the number of rows of a microbatch."""
        span = self.span(microbatch)
        return int(span.stop - span.start)

    def interface(self, stage: int, microbatch: int) -> Interface | None:
        """Return the interface of a stage for a microbatch, None if it is not known yet."""
        if self.free:
            return self._of_microbatches.get((stage, microbatch))
        return self._interfaces.get(stage)

    def known(self, stage: int, microbatch: int) -> Interface:
        """Return the interface of a stage for a microbatch that has passed it.

        Raises:
            ModuleStateError: If it is not known.
        """
        interface = self.interface(stage, microbatch)
        if interface is None:
            raise ModuleStateError(f"nothing is known of the output of stage {stage}")
        return interface

    def arrays(self, stage: int, microbatch: int, *, forward: bool) -> tuple[Kind, ...]:
        """Return the arrays of a stage's output for a microbatch, or those of its gradient.

        Raises:
            ModuleStateError: If they are not known.
        """
        key = stage, microbatch, forward
        kinds = self._kinds.get(key)
        if kinds is None:
            rows, interface = self.num_rows(microbatch), self.known(stage, microbatch)
            kinds = self._kinds[key] = tuple(
                (leaf.shape(rows), leaf.dtype, math.prod(leaf.shape(rows)) * leaf.dtype.itemsize)
                for leaf in (interface.leaves if forward else interface.gradients)
            )
        return kinds

    def learn(self, stage: int, microbatch: int, interface: Interface) -> None:
        """Note the interface of a stage, of all microbatches or of one."""
        if self.free:
            self._of_microbatches[stage, microbatch] = interface
        else:
            self._interfaces[stage] = interface

    def announcement(self, stage: int, microbatch: int) -> list[HostArray]:
        """Return the messages by which another rank learns an interface."""
        return pieces(bytes(self.text(stage, microbatch)))

    def text(self, stage: int, microbatch: int) -> HostArray:
        """Return the message that describes an interface, as bytes."""
        interface = self.known(stage, microbatch)
        span = self.span(microbatch)
        rows = [span.start, span.stop] if self.free else None
        text = json.dumps([interface.to_json(), rows]).encode()
        return np.frombuffer(text, np.uint8).copy()

    def hear(self, stage: int, microbatch: int, text: HostArray) -> None:
        """Take in what :meth:`text` said."""
        interface, rows = json.loads(bytes(text))
        self.learn(stage, microbatch, Interface.from_json(interface))
        if rows is not None and self.spans[microbatch] is None:
            self.spans[microbatch] = slice(*rows)


def _row_spans(part: slice, rows: int, most: int) -> list[slice]:
    """Return the rows of the microbatches of a replica that has the rows `part` of all."""
    count = part.stop - part.start
    # A replica that gets none of some rows has nothing to do. Without any rows at all, all
    # replicas send a microbatch of none through the stages, to learn the output's shape.
    spans = microbatch_rows(count, most) if count or not rows else ()
    return [slice(part.start + span.start, part.start + span.stop) for span in spans]


NO_TASK = Task()
"""The work of no step."""

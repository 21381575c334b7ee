"""The work of one rank's stages in a step: planned once, bound to the arrays of many steps.

A task is planned for all batches of one signature (:meth:`mpimesh.parallel.batch.Batch.signature`):
what the ranks compare of them, the rows of each microbatch, the actions, and the interfaces of
stages. A step with such a batch binds it to its arrays, and lets go of them at its end.

Interfaces have two modes. Where a batch is given whole, a stage has one interface for all
microbatches: it is announced once, known in the next steps, and what drifts from it is refused.
Where a batch is given as microbatches, their shapes are *free*: each has interfaces of its own,
every activation is announced, and the announcement also tells which rows of the batch come, as
ranks in the middle of the pipeline were not given any.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from mpimesh.arrays import DType, HostArray
from mpimesh.errors import ModuleStateError, ScheduleError
from mpimesh.nn import Loss
from mpimesh.parallel.header import Facts, Size
from mpimesh.parallel.interface import Interface, pieces
from mpimesh.parallel.microbatch import Tree, flatten, microbatch_rows, replica_rows, tree_map
from mpimesh.parallel.plans import StepPlan
from mpimesh.parallel.stage import PipelineStage

__all__ = ["NO_TASK", "Kind", "Task", "input_title"]

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
        size: Size | None = None,
        *,
        training: bool = False,
        first_trained: int = 0,
    ) -> None:
        self.facts: Facts = {} if facts is None else facts
        self.numbers = numbers
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
        self.actions: Sequence[tuple[Any, ...]] = ()
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

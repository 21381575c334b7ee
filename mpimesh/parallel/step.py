"""One step over all ranks, which all of them end together and in the same way.

The protocol. Every rank starts the header; works through its actions, among which is for each
stage the place where the sums of its gradients start; starts what buckets are left, such as those
of a replica without rows; and then meets all others in one small all-reduce of status and loss. A
rank that fails sounds the alarm first, which ends the waits of the others, so that every rank
comes to the status, whatever happened and wherever it stood. If all is well they finish
their sends and buckets, and only then an optimizer changes parameters. If not, they exchange what
failed and what was sent, take in every message that is on its way and take back every receive that
has none, complete the reductions that any of them had started, meet once more, and raise the same
error. Nothing is left behind, and the next step works.

Why nobody waits for ever. Before the status a rank waits in three places: for a
message, for room to send, and for the header if it was given no batch. The first two
look for the alarm, and end without it only if the other end does its part. The header
is started by every rank before anything can fail. After the status, waits are for what
every rank is then known to have started.
"""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

import numpy as np

from mpimesh.arrays import Array
from mpimesh.errors import ModuleError, MpimeshError, ShapeError, StageError
from mpimesh.nn import Loss
from mpimesh.parallel.alarm import Alarm, AlarmedError
from mpimesh.parallel.engine import Engine
from mpimesh.parallel.executor import Executor, Task
from mpimesh.parallel.failure import Failure
from mpimesh.parallel.header import Given, StepHeader, checksum, fingerprint
from mpimesh.parallel.inbox import Inbox
from mpimesh.parallel.interface import Interface
from mpimesh.parallel.microbatch import microbatch_rows, num_rows, replica_rows
from mpimesh.parallel.outbox import Outbox
from mpimesh.parallel.unwind import Note, unwind
from mpimesh.parallel.wire import Guarded, Wire

__all__ = ["END_OF_STEP", "GRADIENTS", "Step", "SupportsStep"]

# How traces call the waits in which all ranks meet: after every step, and after one of training.
END_OF_STEP = "end of step"
GRADIENTS = "gradients"


class SupportsStep(Protocol):
    """What changes parameters by their gradients, such as an :class:`~mpimesh.optim.Optimizer`."""

    def step(self) -> object:
        """Change the parameters."""


class Step:
    """One step: of training if there is a loss, else forward only.

    Args:
        engine: The model.
        x: The global batch; None if this rank does not hold the first stage.
        target: Its targets; None if this rank does not hold the last stage, or in inference.
        loss: The loss to train by.
        training: Which of both it is.
        denominator: What to divide the loss by; what the global batch counts if None.
        optimizer: Changes the parameters at the end; None leaves that to the caller.

    Attributes:
        rows: Rows of the global batch, once `run` has found them out.
        output: In inference, on ranks of the last stage: the replica's rows; None if it has none.
    """

    def __init__(
        self,
        engine: Engine,
        x: Array | None,
        target: Array | None = None,
        loss: Loss | None = None,
        *,
        training: bool,
        denominator: float | None = None,
        optimizer: SupportsStep | None = None,
    ) -> None:
        self._engine = engine
        self._x = x
        self._target = target
        self._loss = loss
        self._training = training
        self._denominator = denominator
        self._optimizer = optimizer
        self._first_trained = engine.first_trained
        self._alarm = Alarm(engine.scope)
        self._header_read = False
        self._outside = True
        self._executor: Executor | None = None
        self._inbox: Inbox | None = None
        self._outbox: Outbox | None = None
        self.rows = 0
        self.output: Array | None = None

    def run(self) -> float:
        """Do the step and return its loss, 0 in inference. Collective over the engine's scope.

        Raises:
            StageError: On every rank, if a stage, the loss or a message failed on any.
            MpimeshError: On every rank, if the arguments do not fit.
        """
        self._given, problem = self._look_at_arguments()
        self._header = StepHeader(self._engine.scope, self._given)
        try:
            loss = self._end(self._try(problem))
        except BaseException as error:
            # Without an agreement with the other ranks, such as after Ctrl-C.
            if self._inbox is not None and not getattr(error, "agreed", False):
                self._inbox.abandon()
            raise
        if self._optimizer is not None:
            with self._engine.tracer.span("optimizer step", "optimizer"):
                self._optimizer.step()
        return loss

    def _try(self, problem: Exception | None) -> Exception | None:
        """Do this rank's work; return what went wrong here."""
        try:
            if problem is not None:
                raise problem
            self._work()
        except AlarmedError:
            return None
        except Exception as error:
            self._alarm.sound()
            return error
        return None

    # -- the work of this rank ----------------------------------------------------------------

    def _call(self) -> str:
        engine = self._engine
        if not self._training:
            return f"forward of {engine.num_microbatches} microbatches"
        kept = " without reducing gradients" if engine.accumulating else ""
        return (
            f"train_step {engine.step} of {engine.num_microbatches} microbatches by "
            f"{engine.plans.name}, stages from {self._first_trained} on trained{kept}"
            f"{'' if self._optimizer is None else f', then {type(self._optimizer).__name__}.step'}"
        )

    def _look_at_arguments(self) -> tuple[Given, Exception | None]:
        """Return what this rank was given, and what is wrong with it. Never raises."""
        engine = self._engine
        who, call = f"rank {engine.mesh.rank}", self._call()
        try:
            self._check_optimizer(who)
            self._x = x = _as_array(self._x)
            self._target = target = _as_array(self._target)
            if x is None and engine.is_first:
                raise ShapeError(f"{who} holds the first stage and needs x, got None")
            if self._training and engine.is_last:
                if target is None:
                    raise ShapeError(f"{who} holds the last stage and needs target, got None")
                if self._loss is None:
                    raise ModuleError(f"{who} holds the last stage and needs loss=, got None")
            given = {
                name: num_rows(array, name=name)
                for name, array in (("x", x), ("target", target))
                if array is not None
            }
            if len(set(given.values())) > 1:
                raise ShapeError(
                    f"x and target must have the same rows; on {who} x has {given['x']} and target "
                    f"{given['target']}"
                )
            goal = self._goal()
            sums = {} if not engine.mesh.settings.checks else _checksums(x=x, target=target)
        except Exception as error:
            return Given(call), error
        kind = None if x is None else f"{tuple(x.shape[1:])} {x.dtype}"
        return Given(call, next(iter(given.values()), None), kind, goal, **sums), None

    def _check_optimizer(self, who: str) -> None:
        if self._optimizer is None:
            return
        if not callable(getattr(self._optimizer, "step", None)):
            raise ModuleError(
                f"{who}: optimizer= needs a method step(), got {type(self._optimizer).__name__}"
            )
        if self._engine.accumulating:
            raise ModuleError(
                f"{who}: a step under no_sync leaves gradients that are not summed over the "
                "replicas; give optimizer= to the last of the steps only"
            )

    def _goal(self) -> str | None:
        """Say what this rank trains by; None if it does not hold the last stage."""
        if not self._training or not self._engine.is_last:
            return None
        count = "what the batch counts"
        if self._denominator is not None:
            try:
                count = str(float(self._denominator))
            except (TypeError, ValueError, OverflowError):
                raise ModuleError(
                    f"denominator must be a number above 0, got {self._denominator!r}"
                ) from None
        return f"{type(self._loss).__name__} divided by {count}"

    def _work(self) -> None:
        engine = self._engine
        rows, kind = self._given.rows, self._given.kind
        if rows is None or kind is None:
            waited = Guarded(self._header, self._alarm.look)
            engine.scope.wait_for(waited, what="the size of the batch")
            rows, kind_number = self._header.read()
            self._header_read = True
        else:
            kind_number = fingerprint(kind)
        self.rows = rows
        if self._training and not rows:
            raise ShapeError("the mean loss over a batch of no rows does not exist")
        task = self._task(rows)
        plan = engine.plans.plan(
            len(task.microbatches),
            training=self._training,
            first_trained=self._first_trained if self._training else 0,
        )
        if self._training:
            engine.begin_gradients(len(task.microbatches))
        interfaces = engine.interfaces.setdefault((self._training, kind_number), {})
        wire = Wire(
            engine.pipe,
            engine.library,
            engine.plans.placement,
            self._look,
            engine.mesh.traffic(),
            engine.tracer,
            engine.pipe.communicator.lending if engine.library is np else None,
        )
        self._outbox = Outbox(wire, interfaces, engine.pool, plan.send_window)
        self._inbox = Inbox(wire, interfaces, engine.pool)
        self._inbox.open(plan.actions, task.microbatches)
        self._executor = self._new_executor(task, interfaces, self._inbox, self._outbox)
        self._outside = False
        self._executor.run(plan.actions)
        if self._executor.outputs:
            outputs = [self._executor.outputs[i] for i in range(len(task.microbatches))]
            self.output = outputs[0] if len(outputs) == 1 else engine.xp.concatenate(outputs)

    def _task(self, rows: int) -> Task:
        """Cut this replica's rows out of the batch, and them into microbatches."""
        engine = self._engine
        mine = replica_rows(rows, engine.data.size, engine.data.rank or 0)
        count = mine.stop - mine.start
        # A replica that gets none of some rows has nothing to do. Without any rows at all, all
        # replicas send a microbatch of none through the stages, to learn the output's shape.
        microbatches = microbatch_rows(count, engine.num_microbatches) if count or not rows else ()
        task = Task(
            microbatches,
            mine.start,
            self._x[mine] if self._x is not None and engine.is_first else None,
            step=engine.step,
        )
        if not self._training or self._loss is None or self._target is None or not engine.is_last:
            return task
        denominator = self._denominator
        if denominator is None:
            counted = getattr(self._loss, "count", None)
            denominator = float(rows) if counted is None else counted(self._target)
        return Task(
            microbatches,
            mine.start,
            task.x,
            target=self._target[mine],
            loss=self._loss,
            denominator=denominator,
            step=engine.step,
        )

    def _new_executor(
        self, task: Task, interfaces: dict[int, Interface], inbox: Inbox, outbox: Outbox
    ) -> Executor:
        engine = self._engine
        return Executor(
            engine.local,
            len(engine.stages),
            self._first_trained,
            task,
            training=self._training,
            inbox=inbox,
            outbox=outbox,
            interfaces=interfaces,
            reduce_grad=engine.reduce_gradients,
            look=self._look,
            tracer=engine.tracer,
            xp=engine.xp,
        )

    def _look(self) -> None:
        """End this rank's work if another has failed, or the header tells of a disagreement."""
        self._alarm.look()
        if not self._header_read and self._header.test():
            self._header_read = True
            self._outside = True
            self._header.read()
            self._outside = False

    # -- the end, with all ranks ------------------------------------------------------------

    def _end(self, error: Exception | None) -> float:
        engine = self._engine
        if self._training:
            engine.buckets.start()
        loss = 0.0 if self._executor is None or not engine.counts_loss else self._executor.loss
        status = np.array([float(error is not None), loss])
        with engine.tracer.span(END_OF_STEP, "wait"):
            status = engine.scope.all_reduce(status, label="step status").resolve()
        at_odds = False
        try:
            self._header.read()
        except MpimeshError:  # on all ranks alike
            at_odds = True
        if status[0] or at_odds:
            self._fail(error)
        if self._outbox is not None:
            self._outbox.finish()
        if self._training:
            with engine.tracer.span(GRADIENTS, "wait"):
                engine.buckets.synchronize()
            engine.step += 1
        return float(status[1])

    def _fail(self, error: Exception | None) -> NoReturn:
        """Clear up with all other ranks, and raise what they all raise."""
        running = None if self._outside or self._executor is None else self._executor.current
        rank = self._engine.mesh.rank
        failure = None if error is None else Failure.of(error, rank, running)
        note = Note(self._given, self._training, failure)
        agreed = unwind(self._engine, note, self._alarm, self._inbox, self._outbox)
        if error is None or not isinstance(agreed, StageError):
            raise agreed from error
        try:
            raise error
        except Exception:
            # Only its context: a cause is shown, and its traceback stands in the text already.
            raise agreed from None


def _as_array(x: Any) -> Array | None:
    return x if x is None or hasattr(x, "shape") else np.asarray(x)


def _checksums(**arrays: Array | None) -> dict[str, str]:
    """Return the checksums of those on the host that hold no Python objects."""
    return {
        name: checksum(array)
        for name, array in arrays.items()
        if isinstance(array, np.ndarray) and not array.dtype.hasobject
    }

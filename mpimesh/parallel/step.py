"""One step over all ranks, which all of them end together and in the same way.

The protocol. Every rank starts the header; works through its actions, among which is for each
stage the place where the sums of its gradients start; starts what buckets are left, such as those
of a replica without rows; and then meets all others in one small all-reduce of status and loss. A
rank that fails sounds the alarm first, which ends the waits of the others, so that every rank
comes to the status, whatever happened and wherever it stood. No sum of gradients starts before
the header has told that all ranks take the same step: another rank may be in another, and where
the replicas are all ranks, the sum would meet its status. If all is well they finish
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

from contextlib import nullcontext
from typing import NoReturn

import numpy as np

from mpimesh.arrays import Array
from mpimesh.errors import MpimeshError, ShapeError, StageError
from mpimesh.parallel.alarm import Alarm, AlarmedError
from mpimesh.parallel.arguments import Arguments, input_title
from mpimesh.parallel.engine import Engine
from mpimesh.parallel.executor import Executor, Task
from mpimesh.parallel.failure import Failure
from mpimesh.parallel.header import Given, Size, StepHeader
from mpimesh.parallel.inbox import Inbox
from mpimesh.parallel.known import Known
from mpimesh.parallel.outbox import Outbox
from mpimesh.parallel.tree import Tree, flatten, tree_map
from mpimesh.parallel.unwind import Note, unwind
from mpimesh.parallel.wire import Guarded, Wire

__all__ = ["END_OF_STEP", "GRADIENTS", "Step"]

# How traces call the waits in which all ranks meet: after every step, and after one of training.
END_OF_STEP = "end of step"
GRADIENTS = "gradients"


_UNDER_WAY = (
    "a step of this model is under way; a layer, a loss or a signal handler must not start another "
    "one in it, nor anything else that all ranks do together"
)
_LEFT = (
    "the last step was left by {} on this rank alone, so other ranks may still be in it: end the "
    "job, or close the mesh on all ranks and make mesh and model anew"
)


class Step:
    """One step: of training, or forward only.

    Args:
        engine: The model.
        arguments: The batch, and what to do with it.

    Attributes:
        size: How large the global batch is, once `run` has found it out.
        outputs: In inference, on ranks of the last stage: the replica's rows, or those of each
            of its microbatches where they were given so; empty if it has none.
    """

    def __init__(self, engine: Engine, arguments: Arguments) -> None:
        self._engine = engine
        self._arguments = arguments
        self._training = arguments.training
        self._optimizer = arguments.optimizer
        self._names = ["x", *map(input_title, engine.input_names)]
        self._first_trained = engine.first_trained
        self._alarm = Alarm(engine.scope)
        self._header_read = False
        self._outside = True
        self._executor: Executor | None = None
        self._inbox: Inbox | None = None
        self._outbox: Outbox | None = None
        self.size = Size(0, 0, 0)
        self.outputs: list[Tree] = []

    def run(self) -> float:
        """Do the step and return its loss, 0 if it has none. Collective over the engine's scope.

        Raises:
            StageError: On every rank, if a stage, the loss or a message failed on any.
            MpimeshError: On every rank, if the arguments do not fit.
            BudgetError: On every rank, if one received more than a budget of its mesh had left.
        """
        engine = self._engine
        engine.check_ready()
        # A rank that left in the middle would be missed: budgets are heard when all meet.
        with engine.mesh.traffic().deferred() as self._over_budget:
            loss = self._run()
        if self._optimizer is not None:
            with engine.tracer.span("optimizer step", "optimizer"):
                self._optimizer.step()
        # By what came when the ranks had agreed already that the step went well.
        self._over_budget.check()
        return loss

    def _run(self) -> float:
        """Do all of the step but the optimizer's."""
        engine = self._engine
        problem = self._look_at_arguments()
        self._header = StepHeader(engine.scope, self._given, self._names, engine.places)
        engine.tensor.begin(self._look)
        engine.why_no_step = _UNDER_WAY
        try:
            loss = self._end(self._try(problem))
        except BaseException as error:
            if getattr(error, "agreed", False) and not self._header.is_alone:
                engine.why_no_step = ""
                raise
            # Without an agreement with the other ranks, such as after Ctrl-C.
            engine.why_no_step = _LEFT.format(type(error).__name__)
            if self._inbox is not None:
                self._inbox.abandon()
            raise
        finally:
            engine.pool.end_step()
            engine.tensor.end()
            # Each of them knows this step, and holds arrays.
            self._executor = self._inbox = self._outbox = None
            del problem  # whose traceback may hold this frame, as in the methods below
        engine.why_no_step = ""
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
        finally:
            del problem
        return None

    # -- the work of this rank ----------------------------------------------------------------

    def _call(self) -> str:
        engine = self._engine
        if self._arguments.evaluating:
            return f"evaluate of {engine.num_microbatches} microbatches"
        if not self._training:
            where = " everywhere" if self._arguments.everywhere else ""
            return f"forward{where} of {engine.num_microbatches} microbatches"
        kept = " without reducing gradients" if engine.accumulating else ""
        if engine.buckets.begun:
            kept += f", added to the gradients of {engine.buckets.begun} before"
        if not engine.stages[0].is_training():
            kept += ", in evaluation mode"
        if engine.scales_losses:
            kept += f", losses times {engine.loss_scale:g}"
        return (
            f"train_step {engine.step} of {engine.num_microbatches} microbatches by "
            f"{engine.plans.name}, stages from {self._first_trained} on trained{kept}"
            f"{'' if self._optimizer is None else f', then {type(self._optimizer).__name__}.step'}"
        )

    def _look_at_arguments(self) -> Exception | None:
        """Take in what this rank was given; return what is wrong with it. Never raises."""
        self._given = Given(self._call())
        try:
            self._batch, self._given = self._arguments.look(self._engine, self._given.call)
        except Exception as error:
            return error
        return None

    def _work(self) -> None:
        engine = self._engine
        size = self._given.size(self._names)
        # Ranks in different steps would meet in the sums of replicas or in split layers.
        meets = (self._training and engine.replicas_are_all) or engine.tensor.is_split
        if size is None or meets:
            waited = Guarded(self._header, self._alarm.look)
            engine.scope._core.wait_for(waited, what="the size of the batch")
            size = self._header.read()
            self._header_read = True
        self.size = size
        if self._arguments.with_loss and not size.rows:
            raise ShapeError("the mean loss over a batch of no rows does not exist")
        share = self._batch.share(engine, size)
        task = self._batch.task(engine, share)
        plan = engine.plans.plan(
            task.count,
            training=self._training,
            first_trained=self._first_trained if self._training else 0,
        )
        if self._training:
            engine.begin_gradients(task.count)
        free = share.part is not None
        interfaces = (
            engine.interfaces.setdefault((self._training, size.kind), {}) if not free else {}
        )
        known = Known(interfaces, share.spans, free=free)
        wire = Wire(
            engine.pipe,
            engine.library,
            engine.plans.placement,
            engine.plans.edges,
            self._look,
            engine.mesh.traffic(),
            engine.tracer,
            engine.pipe.communicator.lending if engine.library is np else None,
        )
        self._outbox = Outbox(wire, known, engine.pool, plan.send_window)
        self._inbox = Inbox(wire, known, engine.pool, plan.most_waiting)
        self._inbox.open(plan.actions)
        self._executor = self._new_executor(task, known, self._inbox, self._outbox)
        self._outside = False
        # Where losses are scaled, overflow is expected: the optimizer leaves out the step.
        scaled = engine.scales_losses
        with np.errstate(over="ignore", invalid="ignore") if scaled else nullcontext():
            self._executor.run(plan.actions)
        if self._executor.outputs:
            outputs = [tree_map(_own, self._executor.outputs[i]) for i in range(task.count)]
            self.outputs = outputs if free else [self._join(outputs)]

    def _join(self, outputs: list[Tree]) -> Tree:
        """Put the outputs of this replica's microbatches together."""
        if len(outputs) == 1:
            return outputs[0]
        structure = flatten(outputs[0])[1]
        leaves = zip(*(flatten(output)[0] for output in outputs), strict=True)
        return structure.unflatten([self._engine.xp.concatenate(one) for one in leaves])

    def _new_executor(self, task: Task, known: Known, inbox: Inbox, outbox: Outbox) -> Executor:
        engine = self._engine
        return Executor(
            engine.local,
            engine.plans.edges,
            self._first_trained,
            task,
            training=self._training,
            inbox=inbox,
            outbox=outbox,
            known=known,
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
        at_odds = not self._agreed()
        if self._training and not at_odds:
            engine.buckets.start()
        if error is None:
            error = self._over_budget.take()
        loss = 0.0 if self._executor is None or not engine.counts_loss else self._executor.loss
        status = np.array([float(error is not None), loss])
        with engine.tracer.span(END_OF_STEP, "wait"):
            status = engine.scope.all_reduce(status, label="step status").resolve()
        if status[0] or at_odds:
            try:
                self._fail(error)
            finally:
                del error
        if self._outbox is not None:
            self._outbox.finish()
        if self._training:
            with engine.tracer.span(GRADIENTS, "wait"):
                engine.buckets.synchronize()
            engine.step += 1
            engine.first_values = False
        return float(status[1]) / engine.loss_scale

    def _agreed(self) -> bool:
        """Wait until every rank has begun the step; tell whether all were given what fits."""
        try:
            self._header.read()
        except MpimeshError:  # on all ranks alike
            if self._header.is_alone:
                raise
            return False
        return True

    def _fail(self, error: Exception | None) -> NoReturn:
        """Clear up with all other ranks, and raise what they all raise."""
        running = None if self._outside or self._executor is None else self._executor.current
        rank = self._engine.mesh.rank
        failure = None if error is None else Failure.of(error, rank, running)
        note = Note(self._given, self._training, failure)
        agreed = unwind(self._engine, note, self._alarm, self._inbox, self._outbox)
        try:
            if error is None or not isinstance(agreed, StageError):
                raise agreed from error
            try:
                raise error
            except Exception:
                # Only its context: a cause is shown, and its traceback stands in the text already.
                raise agreed from None
        finally:
            # Their tracebacks hold this frame, and with it all arrays of the step.
            del agreed, error


def _own(array: Array, _path: str) -> Array:
    """Return an output that its user may keep and write to: what came from another rank is not."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        return array.copy()
    return array

"""One step over all ranks, which all of them end together and in the same way.

The protocol. Every rank works through its actions, and then meets all others in one small
all-reduce: the status, which tells failures and loss. A rank that fails sets the abort signal
first, which ends the waits of the others, so that every rank comes to the status, whatever happened
and wherever it stood. If all is well they finish their sends and the sums of their gradients, and
only then an optimizer changes parameters. If not, they exchange what failed and what was sent, take
in every message that is on its way and take back every receive that has none, complete the
reductions that any of them had started, meet once more, and raise the same error. Nothing is left
behind, and the next step works.

No sum of gradients starts before all ranks are known to take the same step: another rank may be in
another, and where the replicas are all ranks, the sum would meet its status. There are two ways.

Where nothing is to start before the status, because each rank holds the whole model and all
gradients are in one bucket, the status compares what the ranks were given, and the sum comes after
it. Whatever a rank was called with, right or wrong, the first that it starts is the status: so that
meets nothing but itself, and the sum comes where all are known to start it next. A rank that must
ask how many rows the other replicas have first asks whether all ask, by a start of the same status.

Else, with stages, parts of layers or several buckets, the header compares what the ranks were
given, and every rank starts it before its work. Among the actions is then for each stage the place
where the sums of its gradients start, and before the status every rank starts what buckets are
left, such as those of a replica without rows.

Why no rank waits for ever. Before the status a rank waits in three places: for a message, for room
to send, and for the header if it has no batch. The first two look for that signal, and end without
it only if the other end does its part. The header is started by every rank before anything can
fail. The status is started by every rank, and so is that by which some ask: who does not ask comes
to it by its end. After the status, waits are for what every rank is then known to have started or
to start next.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, NoReturn, Self

import numpy as np

from mpimesh import errors
from mpimesh.arguments import rank_names
from mpimesh.arrays import Array
from mpimesh.comm import RecvRequest, Request
from mpimesh.comm.requests import Condition
from mpimesh.errors import MpimeshError, ShapeError, StageError, StageShapeError, on_all_ranks
from mpimesh.nn.losses import LossValue
from mpimesh.parallel.batch import Batch
from mpimesh.parallel.header import CODES, Facts, Size, disagreement, fingerprint, number_of
from mpimesh.parallel.microbatch import Tree, flatten, replica_rows, tree_map
from mpimesh.parallel.plans import ABORT_TAG
from mpimesh.parallel.task import NO_TASK, Task
from mpimesh.parallel.training_engine import TrainingEngine
from mpimesh.runtime import ProcessGroup
from mpimesh.runtime.agreement import agree
from mpimesh.runtime.tracebacks import readable
from mpimesh.schedule import Action, ActionKind
from mpimesh.trace import Event

__all__ = [
    "END_OF_STEP",
    "GRADIENTS",
    "AbortSignal",
    "AbortedError",
    "Failure",
    "Step",
    "agreed_error",
]

# How traces call the waits in which all ranks meet: after every step, and after one of training.
END_OF_STEP = "end of step"
GRADIENTS = "gradients"

_SIZES = fingerprint("the sizes of the replicas' rows")

_MOST_TASKS = 64
"""Signatures of batches of which a model keeps the plan."""

_UNDER_WAY = (
    "a step of this model is under way; a layer, a loss or a signal handler must not start another "
    "one in it, nor anything else that all ranks do together"
)
_LEFT = (
    "the last step was left by {} on this rank alone, so other ranks may still be in it: end the "
    "job, or close the mesh on all ranks and make mesh and model anew"
)

_FILLER = (
    "This microbatch has no rows: replicas gather parameters together, so that one with fewer rows "
    "than others runs some of none. Let the layer take them, give all replicas as many rows, or "
    "use fully_shard(..., hybrid=True)."
)


# -- failures --------------------------------------------------------------------------------------


_LONGEST_TRACEBACK = 8000
_LONGEST_MESSAGE = 2000
_DOING = {
    ActionKind.F: "the forward",
    ActionKind.B: "the backward",
    ActionKind.I: "the backward of the input",
    ActionKind.W: "the backward of the weights",
    ActionKind.REDUCE_GRAD: "the sum of its gradients",
    ActionKind.STEP: "the step of the optimizer",
}


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of one rank.

    Attributes:
        rank: The rank in the mesh.
        action: What the pipeline did, such as ``1F2``; empty before and after the actions.
        kind: The exception's class.
        message: Its text.
        traceback: Where it was raised, from the layer or loss on that mpimesh has called.
        is_shape: Whether it is a ShapeError.
    """

    rank: int
    action: str
    kind: str
    message: str
    traceback: str
    is_shape: bool

    @classmethod
    def of(cls, error: Exception, rank: int, action: Action | None) -> Self:
        """Describe `error`, raised on `rank` during `action`."""
        text = readable(error).rstrip()
        return cls(
            rank=rank,
            action="" if action is None else str(action),
            kind=type(error).__name__,
            message=_text(error),
            traceback=text[-_LONGEST_TRACEBACK:],
            is_shape=isinstance(error, ShapeError),
        )

    def headline(self, raised: str = "") -> str:
        """Return what and where in one line; its class only if that is not the one `raised`."""
        if not self.action:
            # Many a message begins with its rank.
            who = f"rank {self.rank}"
            main = self.message.removeprefix(f"{who}: ")
            if self.kind != raised:
                main = f"{self.kind}: {main}"
            return main if self.message.startswith(f"{who} ") else f"{who}: {main}"
        action = Action.from_string(self.action)
        part = "" if action.kind.is_whole else f" of microbatch {action.microbatch}"
        doing = _DOING.get(action.kind, f"its {action.kind}")
        return (
            f"stage {action.stage} failed on rank {self.rank} in {doing}{part} ({self.action}): "
            f"{self.kind}: {self.message}"
        )

    def is_like(self, other: Failure) -> bool:
        """Tell whether another rank found the same of itself."""
        return (self.kind, self._without_rank()) == (other.kind, other._without_rank())

    def _without_rank(self) -> str:
        return re.sub(rf"\brank {self.rank}\b", "rank", self.message)


def _text(error: Exception) -> str:
    """Return the text of any exception, also of one whose text cannot be made."""
    try:
        return str(error)[:_LONGEST_MESSAGE]
    except Exception as another:
        return f"its text could not be made: {type(another).__name__}"


def agreed_error(failures: Sequence[Failure]) -> MpimeshError:
    """Return the error that every rank raises for the `failures` of a step, in rank order.

    If no stage had begun its work, it is of the class of the first failure. Else it is a
    StageError, and a ShapeError too if the failure was one. What several ranks found is said once.
    """
    staged = [failure for failure in failures if failure.action]
    first = (staged or list(failures))[0]
    own = getattr(errors, first.kind, None)
    kind: type[MpimeshError] = StageShapeError if first.is_shape else StageError
    is_own = False
    if not staged and isinstance(own, type) and issubclass(own, MpimeshError):
        kind, is_own = own, True
    raised = kind.__name__
    lines: list[str] = []
    left = [first, *(other for other in failures if other is not first)]
    while left:
        main = left[0]
        same = [one.rank for one in left[1:] if one.is_like(main)]
        left = [one for one in left[1:] if not one.is_like(main)]
        lines.append(f"also {main.headline(raised)}" if lines else main.headline(raised))
        if same:
            lines.append(f"the same on {rank_names(same)}")
    if not is_own:
        lines.append(f"--- traceback of rank {first.rank} ---\n{first.traceback}")
    error: MpimeshError = kind("\n".join(lines))
    return on_all_ranks(error)


class AbortedError(Exception):
    """Another rank has failed: leave the step."""


class AbortSignal:
    """The signal by which a failed rank ends the waits of the others in one step.

    A rank that fails sets it, once. It only wakes: what happened, and on which
    ranks, is exchanged afterwards, when all have come out of their waits.
    """

    def __init__(self, scope: ProcessGroup) -> None:
        self._scope = scope
        self._probe = scope.communicator.probe
        self._sends: list[Request] = []
        self.is_set = False

    def set(self) -> None:
        """Tell all other ranks. Never waits."""
        if self.is_set:
            return
        self.is_set = True
        communicator = self._scope.communicator
        note = np.ones(1, np.uint8)
        self._sends = [
            communicator.isend(note, peer, ABORT_TAG)
            for peer in range(self._scope.size)
            if peer != self._scope.rank
        ]

    def check(self) -> None:
        """Raise AbortedError if another rank has set it."""
        if self._scope.size > 1 and self._probe(ABORT_TAG) is not None:
            raise AbortedError

    def drain(self, setters: Iterable[int]) -> list[Request]:
        """Take in the notes of all `setters`, so that none is left for a later step.

        Returns:
            What must be waited for, with this rank's own notes.
        """
        receives: list[RecvRequest] = [
            self._scope.communicator.irecv(np.empty(1, np.uint8), peer, ABORT_TAG)
            for peer in setters
            if peer != self._scope.rank
        ]
        return [*receives, *self._sends]


# -- the step --------------------------------------------------------------------------------------


class Step:
    """One step: of training, or forward only.

    Args:
        engine: The model.
        batch: The batch, and what to do with it.

    Attributes:
        task: The work of this rank's stages, whose size is known once `run` has found it out.
        outputs: In inference, on ranks of the last stage: the replica's rows, or those of each
            of its microbatches where they were given so; empty if it has none.
    """

    def __init__(self, engine: TrainingEngine, batch: Batch) -> None:
        self._engine = engine
        self._batch = batch
        self._at_end = engine.meets_at_end
        self._abort = AbortSignal(engine.scope)
        self._has_met = False
        self._header_read = False
        self._outside = True
        self._linked = False
        self.task = NO_TASK
        self.outputs: list[Tree] = []

    def run(self) -> LossValue:
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
        if self._batch.optimizer is not None:
            with engine.tracer.span("optimizer step", "optimizer"):
                if engine.optimizer is None:
                    self._batch.optimizer.step()
                else:  # the same, whose ranks agree
                    engine.optimizer.step_together()
        # By what came when the ranks had agreed already that the step went well.
        self._over_budget.check()
        return LossValue(loss)

    def _run(self) -> float:
        """Do all of the step but the optimizer's."""
        engine = self._engine
        problem = self._look_at_arguments()
        if self._at_end:
            self._header_read = True
        else:
            facts = self._batch.facts
            engine.exchanges.begin(self._numbers, facts["step"], facts["replica"], self._own())
        self._waiting = engine.waiting
        for layers in self._waiting:
            layers.begin(self._check_abort)
        engine.why_no_step = _UNDER_WAY
        try:
            problem = self._try(problem)
            with engine.scope._core.progress.keeping(problem):
                loss = self._end(problem)
        except BaseException as error:
            if getattr(error, "agreed", False) and not engine.exchanges.is_alone:
                engine.why_no_step = ""
                raise
            # Without an agreement with the other ranks, such as after Ctrl-C.
            engine.why_no_step = _LEFT.format(type(error).__name__)
            if self._linked:
                engine.links.abandon()
            raise
        finally:
            # Each of them knows this step, and holds arrays.
            if self._linked:
                engine.links.end()
                engine.pool.end_step()
            for layers in self._waiting:
                layers.end()
            engine.executor.end()
            self.task.end()
            del problem  # whose traceback may hold this frame, as in the methods below
        engine.why_no_step = ""
        return loss

    def _try(self, problem: Exception | None) -> Exception | None:
        """Do this rank's work; return what went wrong here."""
        try:
            if problem is not None:
                raise problem
            self._work()
        except AbortedError:
            return None
        except Exception as error:
            self._abort.set()
            return error
        finally:
            del problem
        return None

    # -- the work of this rank ----------------------------------------------------------------

    def _look_at_arguments(self) -> Exception | None:
        """Take in what this rank was given; return what is wrong with it. Never raises."""
        engine, batch = self._engine, self._batch
        try:
            batch.check_optimizer(engine)
            signature = batch.signature(engine)
            task = engine.tasks.get(signature)
            if task is not None:
                self._numbers = batch.check_again(engine, task.facts, task.numbers)
                self.task = task
                return None
            batch.check(engine)
        except Exception as error:
            batch.describe(engine)
            self._numbers = batch.numbers(engine)
            return error
        self._numbers = batch.numbers(engine)
        self.task = Task(
            batch.facts,
            self._numbers,
            batch.code(engine, self._numbers) if self._at_end else 0,
            batch.size(engine),
            training=self._batch.training,
            first_trained=engine.first_trained if self._batch.training else 0,
        )
        if signature is not None:
            if len(engine.tasks) == _MOST_TASKS:
                engine.tasks.clear()
            engine.tasks[signature] = self.task
        return None

    def _work(self) -> None:
        engine, batch, task = self._engine, self._batch, self.task
        size = task.expected
        if self._at_end:
            size = self._ask_size() if size is None else size
        # Ranks in different steps would meet in the sums of replicas or in split layers.
        elif (
            size is None
            or (batch.training and engine.replicas_are_all)
            or engine.tensor.is_split
            or engine.layer_values.meets
        ):
            waited = Condition(self._has_header)
            engine.scope._core.wait_for(waited, what="the size of the batch")
            size = self._engine.exchanges.read()
            self._header_read = True
        if task.size != size:
            self._lay_out(size)
        loss = batch.loss if batch.with_loss and engine.is_last else None
        task.bind(
            batch.values,
            step=engine.step,
            loss=loss,
            denominator=1.0 if loss is None else batch.divisor(engine, size),
        )
        if self._batch.training:
            engine.begin_gradients(len(task.spans), self._check_abort, holds=self._at_end)
        if engine.pipe.size > 1:
            self._linked = True
            engine.links.begin(task, self._check_abort)
        executor = engine.executor
        self._outside = False
        # Where losses are scaled, overflow is expected: the optimizer leaves out the step.
        scaled = engine.scales_losses
        with np.errstate(over="ignore", invalid="ignore") if scaled else nullcontext():
            executor.run(task, check_abort=self._check_abort)
        if executor.outputs:
            outputs = [tree_map(_own, executor.outputs[i]) for i in range(len(task.spans))]
            self.outputs = outputs[: task.num_given] if task.free else [self._join(outputs)]

    def _ask_size(self) -> Size:
        """Return the size of a batch of which each replica has its own rows. Collective."""
        batch, exchanges = self._batch, self._engine.exchanges
        failed, _, alike = exchanges.meet(failed=False, loss=0.0, code=self._code(_SIZES))
        if failed or not (alike or self._is_same()):
            self._has_met = True  # who has failed or does not ask is at the end of its step
            raise AbortedError
        return exchanges.size_of_own(self._numbers, batch.facts["replica"], self._own())

    def _own(self) -> Sequence[int]:
        """Return what the ranks of this replica compare, if it was given rows of its own."""
        batch = self._batch
        return () if batch.facts["replica"] is None else batch.own_numbers(self._engine)

    def _code(self, more: int = 0) -> int:
        """Return in one number what this rank was given; 0 where the header has compared it."""
        if not self._at_end:
            return 0
        facts = self._batch.facts
        changing = (facts["step"] or 0) + number_of(facts["optimizer"])
        return (self.task.code + changing + more) % CODES

    def _lay_out(self, size: Size) -> None:
        """Plan the task for batches of this size."""
        engine, task = self._engine, self.task
        rows, _, kinds, own, _ = size
        if None in own:
            # A rank that was to give a replica's rows has failed, and tells so at the end.
            raise AbortedError
        if self._batch.with_loss and not rows:
            raise ShapeError("the mean loss over a batch of no rows does not exist")
        task.lay_out(
            size,
            engine.interfaces.setdefault((self._batch.training, kinds), {}),
            stages=engine.local,
            replicas=engine.data.size,
            replica=engine.data.rank or 0,
            most=engine.num_microbatches,
            alike=engine.layer_values.meets,
            sizes=self._batch.sizes if self._batch.facts["count"] else (),
        )
        task.plan = engine.plans.plan(
            len(task.spans), training=self._batch.training, first_trained=task.first_trained
        )
        task.actions = engine.executor.bind(task.plan.actions)

    def _join(self, outputs: list[Tree]) -> Tree:
        """Put the outputs of this replica's microbatches together."""
        if len(outputs) == 1:
            return outputs[0]
        structure = flatten(outputs[0])[1]
        leaves = zip(*(flatten(output)[0] for output in outputs), strict=True)
        return structure.unflatten([self._engine.xp.concatenate(one) for one in leaves])

    def _has_header(self) -> bool:
        """Tell whether the header can be read; raise if another rank has failed meanwhile."""
        if self._engine.exchanges.test():
            return True
        self._abort.check()
        return False

    def _check_abort(self) -> None:
        """End this rank's work if another has failed, or the header tells of a disagreement."""
        self._abort.check()
        if not self._header_read and self._engine.exchanges.test():
            self._header_read = True
            self._outside = True
            self._engine.exchanges.read()
            self._outside = False

    # -- the end, with all ranks ------------------------------------------------------------

    def _end(self, error: Exception | None) -> float:
        engine, batch = self._engine, self._batch
        at_odds = self._has_met or not (self._at_end or self._agreed())
        if batch.training and not (at_odds or self._at_end):
            engine.buckets.start()
        if error is None:
            error = self._over_budget.take() or self._refusal()
        if error is None and self._at_end and batch.training:
            error = engine.buckets.excess()  # which come when it is too late to refuse
        loss = engine.executor.loss if engine.counts_loss else 0.0
        failed, alike = False, True
        if not self._has_met:
            with engine.tracer.span(END_OF_STEP, "wait"):
                failed, loss, alike = engine.exchanges.meet(
                    failed=error is not None, loss=loss, code=self._code()
                )
        if failed or at_odds or not (alike or self._is_same()):
            try:
                self._fail(error)
            finally:
                del error
        if self._linked:
            engine.links.finish()
        for layers in self._waiting:
            layers.settle()
        if batch.training:
            with engine.tracer.span(GRADIENTS, "wait"):
                engine.buckets.synchronize()
            engine.step += 1
            engine.first_values = False
            if engine.checks:
                engine.trainer.note(engine.optimizer, engine.named_parameters())
        else:
            engine.first_forward = False
        return loss / engine.loss_scale

    def _refusal(self) -> MpimeshError | None:
        """Return why this rank could not change its parameters at the end of the step."""
        optimizer = self._engine.optimizer
        if self._batch.optimizer is not None and optimizer is not None:
            try:
                optimizer.check_step()
            except MpimeshError as error:
                return error
        return None

    def _agreed(self) -> bool:
        """Wait until every rank has begun the step; tell whether all were given what fits."""
        try:
            self._engine.exchanges.read()
        except MpimeshError:  # on all ranks alike
            if self._engine.exchanges.is_alone:
                raise
            return False
        return True

    def _is_same(self) -> bool:
        """Tell whether what all ranks were given fits, though some say more of it. Collective.

        So do those who have loaded values and others have not: they compare what nobody else does.
        """
        everyone = agree(self._engine.scope, "what the ranks were given", self._batch.facts)
        return disagreement(everyone, self._engine.scope.ranks) is None

    def _fail(self, error: Exception | None) -> NoReturn:
        """Clear up with all other ranks, and raise what they all raise."""
        running = None if self._outside else self._engine.executor.current
        rank = self._engine.mesh.rank
        if error is not None and running is not None and self.task.is_filler(running.microbatch):
            error.add_note(_FILLER)
        failure = None if error is None else Failure.of(error, rank, running)
        agreed = self._recover(failure)
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

    # -- after a failure ----------------------------------------------------------------------

    def _recover(self, failure: Failure | None) -> MpimeshError:
        """Clear up with all other ranks. Collective over the engine's scope.

        Every message that is on its way is taken in, every receive that has none is taken back, and
        the reductions that any rank has started are made by all, those of split layers, too. The
        gradients are 0 afterwards, unless all ranks were in inference.

        Returns:
            The error that every rank is to raise.

        Cost:
            An all-reduce of 40 bytes and an all-gather of small texts, and a barrier.
        """
        engine, abort = self._engine, self._abort
        scope = engine.scope
        mine = {
            "facts": self._batch.facts,
            "training": self._batch.training,
            "failure": None if failure is None else asdict(failure),
            "aborts": abort.is_set,
            "started": engine.buckets.started,
            "layers": [layers.notes() for layers in self._waiting],
            "sent": [
                (engine.pipe.ranks[peer], tag, sizes) for peer, tag, sizes in engine.links.sent
            ],
        }
        notes = agree(scope, "the end of a failed step", mine)
        of_layers = dict(zip(scope.ranks, (one["layers"] for one in notes), strict=True))
        for place, layers in enumerate(self._waiting):
            layers.finish({rank: one[place] for rank, one in of_layers.items()})
        waiting = abort.drain(place for place, one in enumerate(notes) if one["aborts"])
        waiting += engine.links.drain(_to_me(engine, notes))
        for request in waiting:
            scope._core.wait_for(request, what="the end of a failed step")
        if any(one["training"] for one in notes):
            engine.buckets.cancel(started=any(one["started"] for one in notes))
        engine.interfaces.clear()
        engine.tasks.clear()
        # A message of the next step must not meet a receive that is about to be taken back.
        scope.barrier(label="the end of a failed step")
        return _agreed_error(engine, notes)


def _own(array: Array, _path: str) -> Array:
    """Return an output that its user may keep and write to: what came from another rank is not."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        return array.copy()
    return array


def _to_me(engine: TrainingEngine, notes: list[dict[str, Any]]) -> dict[tuple[int, int], list[int]]:
    """Return the bytes of all messages to this rank, by the sender in the pipeline and tag."""
    places = {rank: place for place, rank in enumerate(engine.pipe.ranks)}
    return {
        (places[rank], tag): sizes
        for rank, note in zip(engine.scope.ranks, notes, strict=True)
        for dest, tag, sizes in note["sent"]
        if dest == engine.mesh.rank
    }


def _batch_cure(engine: TrainingEngine, everyone: list[Facts]) -> str:
    """Say what to do where each rank was given rows of its own."""
    data = engine.data
    rows = next((facts["rows"] for facts in everyone if facts["rows"]), None)
    if data.size == 1 or rows is None:
        return ""
    spans = [replica_rows(rows, data.size, place) for place in range(min(data.size, 4))]
    taken = ", ".join(f"{one.start}:{one.stop}" for one in spans)
    more = ", ..." if data.size > len(spans) else ""
    return (
        f"of a batch of {rows} rows the replicas along {data.name!r} take rows {taken}{more}; if "
        'each rank has read rows of its own, give them with rows="local", or as split arrays: '
        f'x = mm.DTensor.from_local(x, mesh, "{data.name}=S0"), and target so, too'
    )


def _agreed_error(engine: TrainingEngine, notes: list[dict[str, Any]]) -> MpimeshError:
    """Return the same error on every rank: that they were at odds, or what failed."""
    everyone = [note["facts"] for note in notes]
    error = disagreement(
        everyone,
        engine.scope.ranks,
        batch_cure=_batch_cure(engine, everyone),
        first=engine.first_values,
    )
    if error is None:
        return agreed_error([Failure(**note["failure"]) for note in notes if note["failure"]])
    return on_all_ranks(error)


def last_step(events: Iterable[Event]) -> list[Event]:
    """Return the events of each rank's last whole step of training.

    Args:
        events: Of any ranks, in the order in which each rank recorded its own.
    """
    ranks: dict[int, list[Event]] = {}
    for event in events:
        ranks.setdefault(event.rank, []).append(event)
    last: list[Event] = []
    for one in ranks.values():
        names = [event.name if event.category == "wait" else "" for event in one]
        if GRADIENTS not in names:
            continue
        # A step of training ends with its gradients. Its own end of step comes before these; the
        # one before that closed the step before.
        end = len(names) - 1 - names[::-1].index(GRADIENTS)
        earlier = [place for place in range(end) if names[place] == END_OF_STEP][:-1]
        last += one[earlier[-1] + 1 if earlier else 0 : end]
    return last

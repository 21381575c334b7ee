"""Gradients summed over replicas: flat memory, reduced while backward still runs.

The gradients *are* views of a few flat arrays, the buckets, so nothing is
copied together before a reduction or apart after it. A bucket's all-reduce
starts as soon as its last gradient is complete, and strictly in the order of
the buckets, which is the same on every rank whatever order the gradients come in.

When is a gradient complete? A layer that a model uses twice adds to it
twice in each backward. So the buckets count: where the number is unknown, the first cycle reduces
at its end, and from then on a gradient is complete when it was added to as often
for each backward as before. A parameter that is not used in every backward keeps its
bucket waiting until the end, which costs overlap and nothing else. Whoever knows that nothing
more will come, as a pipeline does after a stage's last backward, says so by `complete`.

Gradients of parameters that stand in stages of several ranks are reduced over more
ranks than the others. They have buckets of their own, which wait for the end of the cycle: only
then is it sure that all those ranks, which do different things, come to it.

A cycle::

    buckets.begin()                 # gradients are 0; or zero_grad()
    ... backward ...                # Parameter.accumulate calls submit
    buckets.synchronize()           # all gradients are the sums over the replicas

Every registered parameter takes part on every rank: one that no backward
touched adds zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from time import perf_counter
from typing import Any

import numpy as np

from mpimesh.arguments import as_flag, as_int, as_items, as_real, check_kind, shown
from mpimesh.arrays import OpLike, ReduceOp, as_reduce_op, namespace
from mpimesh.errors import ModuleError, ModuleStateError
from mpimesh.nn import Parameter
from mpimesh.nn.parameter import as_parameters, float_dtype
from mpimesh.parallel.gradients import entries as entry_rules
from mpimesh.parallel.gradients.bucket import Bucket, Reductions
from mpimesh.parallel.gradients.entries import BucketEntry, Plan
from mpimesh.parallel.replicas import agree_parameters, agree_touched, live_mesh
from mpimesh.parallel.slots import SlotPool
from mpimesh.runtime import DeviceMesh, ProcessGroup
from mpimesh.runtime.agreement import agree
from mpimesh.trace import NULL_TRACER, Tracer

__all__ = ["BUCKET_BYTES", "GRAD_DTYPE", "GROUP", "GradientBuckets"]

_IS_TRAINED = attrgetter("requires_grad")
GROUP = "a group of ranks, as mesh.group('dp') gives"

GRAD_DTYPE = "grad_dtype: gradients are added up"

_OPEN = (
    "gradients of steps under no_sync() are being added up, and new buckets would drop them: take "
    "the step that reduces them first, or forget them by zero_grad()"
)

BUCKET_BYTES = 4 * 1024 * 1024
"""Large enough that an all-reduce runs at full speed, small enough that several overlap."""


class GradientBuckets:
    """The gradients of some parameters, to be summed over a group.

    Making it is collective over `group`. Frozen parameters are left out. In a group of one
    rank there are no buckets and nothing is attached, but all else behaves the same.

    Args:
        parameters: Parameters that have memory, in the same order on every rank.
        group: The replicas.
        mesh: Gives the memory.
        bucket_bytes: Most bytes of a bucket; a larger gradient has one of its own.
        op: ``"sum"`` or ``"mean"``. The mean divides by the size of the group, also where a
            rank had nothing to add.
        names: The parameters' names for messages; their own if None.
        overlap: False reduces everything in :meth:`synchronize`.
        tracer: Records the time of each reduction.
        groups: For each parameter the group over which its gradient is reduced, `group` if None.
            Another one holds all of `group` and has the same parameters on all its ranks; where
            a rank has several others, they stand in one order on all ranks. They are reduced
            in :meth:`synchronize`, whatever `overlap` says.
        plan: For each bucket the numbers of its parameters, counting those that are trained and
            reduced over `group`; planned by `bucket_bytes` if None.
        grad_dtype: The dtype in which gradients are added up and reduced, where it is wider than
            the parameter's own; that of the parameters if None. A narrower one has no effect.
        uses: By the id of a parameter how often each backward adds to its gradient. What is not
            there is learnt from the first cycle, which reduces it at the end.

    Raises:
        ModuleError: If a parameter stands twice or is registered with other buckets, or `op` or
            `bucket_bytes` will not do.
        ModuleStateError: If a parameter has no memory yet.
        MismatchError: On every rank, naming the first parameter that differs in name, shape or
            dtype.

    Cost:
        An all-reduce of 40 bytes to make it; one all-reduce for each bucket and cycle.

    Example:
        >>> buckets = GradientBuckets(layer.parameters(), mesh.group("dp"), mesh=mesh)
        >>> buckets.begin()  # the gradients are 0
        >>> ctx = nn.Context()
        >>> y = layer(my_x, ctx)
        >>> loss, dy = nn.mse_loss.value_and_grad(y, my_target, denominator=rows_of_all_ranks)
        >>> layer.backward(dy, ctx)
        >>> buckets.synchronize()  # the gradients are the sums over the replicas
        >>> optimizer.step()
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        group: ProcessGroup,
        *,
        mesh: DeviceMesh,
        bucket_bytes: int = BUCKET_BYTES,
        op: OpLike = ReduceOp.SUM,
        names: Sequence[str] | None = None,
        overlap: bool = True,
        tracer: Tracer = NULL_TRACER,
        groups: Sequence[ProcessGroup | None] | None = None,
        plan: Plan | None = None,
        grad_dtype: Any = None,
        uses: Mapping[int, int] | None = None,
    ) -> None:
        self._group = check_kind(group, ProcessGroup, "group", ModuleError, wanted=GROUP)
        live_mesh(mesh)
        self._op = as_reduce_op(op)
        if self._op not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise ModuleError(f"op must be 'sum' or 'mean' of gradients, got {shown(op)}")
        self._overlap = as_flag(overlap, "overlap", ModuleError)
        if not isinstance(tracer, Tracer):
            raise ModuleError(f"tracer must be a Tracer, got {shown(tracer)}")
        listed = list(as_parameters(parameters, "parameters"))
        if names is not None:
            names = as_items(names, "names", ModuleError, wanted="a text for each parameter")
            for name in names:
                check_kind(name, str, "each of names", ModuleError, wanted="a text")
        if groups is not None:
            wanted = "a group or None for each parameter"
            for one in as_items(groups, "groups", ModuleError, wanted=wanted):
                if one is not None:
                    check_kind(one, ProcessGroup, "each of groups", ModuleError, wanted=GROUP)
        as_real(bucket_bytes, "bucket_bytes", ModuleError, least=1, finite=False)
        if plan is not None:
            wanted = "for each bucket the numbers of its parameters"
            for members in as_items(plan, "plan", ModuleError, wanted=wanted):
                for number in as_items(members, "plan", ModuleError, wanted=wanted):
                    as_int(number, "each number in plan", ModuleError, least=0)
        over = (
            [group] * len(listed)
            if groups is None
            else [group if one is None else one for one in groups]
        )
        wide = None if grad_dtype is None else float_dtype(grad_dtype, what=GRAD_DTYPE)
        self._entries, self._frozen = entry_rules.make_entries(listed, names, over, wide)
        plans = entry_rules.plans_of([*self._entries.values()], group, bucket_bytes, plan)
        rule = f"{self._op}, bucket_bytes {bucket_bytes}, plan {plan}, grad_dtype {grad_dtype}"
        named = [(entry.name, entry.parameter) for entry in self._entries.values()]
        agree_parameters(named, group, rule)
        own, *others = entry_rules.make_buckets(plans, group, mesh, self._op)
        self._line = Reductions(own, tracer)
        self._late = Reductions(list(chain(*others)), tracer)
        for entry in self._entries.values():
            entry.parameter.on_ready = self.submit
            entry.parameter.grad_dtype = entry.dtype
            entry.uses = None if uses is None else uses.get(id(entry.parameter))
        self._trained = self.parameters
        # Those that were added to in this cycle or the one before, and at first all: of the others
        # nothing has to be counted.
        self._counted = [*self._entries.values()]
        self._without_bucket = [entry for entry in self._counted if entry.bucket is None]
        self._mesh = mesh
        self._pool = SlotPool(lambda nbytes: mesh.shared_empty(nbytes, np.uint8))
        self._backwards = 0
        self._begun = 0
        self._announced = 0
        self._open = False
        self._accumulating = False
        self._cycles = 0
        self._has_sums = False

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, in the order of their reduction."""
        return self._line.buckets + self._late.buckets

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The registered parameters, in the order in which they were given."""
        return tuple(entry.parameter for entry in self._entries.values())

    @property
    def is_open(self) -> bool:
        """Whether gradients are being added up that no :meth:`synchronize` has reduced yet."""
        return self._open

    @property
    def begun(self) -> int:
        """Number of calls of :meth:`begin` since gradients were last reduced or forgotten."""
        return self._begun

    @property
    def entries(self) -> tuple[BucketEntry, ...]:
        """The counts of the parameters that are reduced over the replicas, in order."""
        return tuple(entry for entry in self._entries.values() if entry.group is self._group)

    @property
    def sums(self) -> int | None:
        """The number of the cycle whose sums are here; None while there are none to step by."""
        return self._cycles if self._has_sums else None

    @property
    def cycles(self) -> int:
        """Number of cycles that these buckets have summed."""
        return self._cycles

    @property
    def packed_bytes(self) -> int:
        """Bytes that buckets have for reductions only, from stage 2 on."""
        return self._pool.nbytes

    def divide(self, stage: int = 1, *, by_layer: bool = False) -> None:
        """From now on give each rank the sums of its part of each bucket only.

        To be done by all ranks alike; collective at stage 3. The values of the parameters move into
        flat memory, and outside of a cycle their gradients are None; see
        :mod:`mpimesh.parallel.gradients.bucket` for what is divided at which stage.

        Args:
            stage: What is divided, 1 to 3.
            by_layer: Whether values at stage 3 that not all ranks see in one memory are here only
                while a layer uses them, see :class:`LayerValues`.

        Raises:
            ModuleStateError: If gradients are being added up.
        """
        if self._open:
            raise ModuleStateError(
                f"rank {self._group.world_rank}: gradients are being added up that no "
                "synchronize() has summed yet; divide buckets between steps, not under no_sync()"
            )
        self._has_sums = False
        for turn, bucket in enumerate(self.buckets):
            # Ranks of other groups do different things at one time, and do not meet in a layer.
            meets = by_layer and bucket.group is self._group
            bucket.divide(self._mesh, stage, self._pool, turn, by_layer=meets)
        if stage > 1:
            self._group._core.context.world.trim()  # of gradients as large as the model

    def forget(self) -> None:
        """Forget the gradients, also those of steps under :meth:`no_sync`. Local.

        Raises:
            ModuleStateError: If reductions are under way; call :meth:`synchronize` first. Or if a
                parameter was frozen or unfrozen since the buckets were made.
        """
        if self._line.started:
            raise ModuleStateError(
                f"rank {self._group.world_rank}: zeros would be written into {self._line.started} "
                "buckets that are being reduced; call synchronize() first"
            )
        self._check_frozen()
        self._clear()
        self._end()
        self._has_sums = False

    def use_up(self) -> None:
        """Note that a step has been done by the sums. Local."""
        self._has_sums = False

    def agree_on_closed(self, scope: ProcessGroup) -> None:
        """Return if no rank of `scope` has gradients that new buckets would drop. Collective.

        Raises:
            ModuleStateError: On every rank, if any is adding up gradients.
        """
        problem = ModuleStateError(_OPEN) if self._open else None
        agree(scope, "new buckets", problem=problem)

    # -- a cycle: local until synchronize ---------------------------------------------

    def begin(self, backwards: int = 1, *, check_abort: Callable[[], None] | None = None) -> None:
        """Announce that `backwards` backward passes follow. Local.

        Sets the gradients to 0, unless they hold those of steps under :meth:`no_sync`.

        Args:
            backwards: Their number.
            check_abort: Called while this rank waits for a reduction before :meth:`synchronize`;
                raises if the cycle is to be left.

        Raises:
            ModuleStateError: If a parameter was frozen or unfrozen since the buckets were made.
        """
        self._check_frozen()
        if not self._open:
            for bucket in self.buckets:
                bucket.show()
            self._clear()
            self._open = True
        self._has_sums = False
        self._line.check_abort = check_abort
        self._backwards += backwards
        self._begun += 1
        for bucket in self.buckets:
            bucket.incomplete = len(bucket.parameters)
        self._announced += 1

    def zero_grad(self) -> None:
        """Forget the gradients and begin a cycle with one backward. Local.

        Raises:
            ModuleStateError: If reductions are under way; call :meth:`synchronize` first.
        """
        self.forget()
        self.begin()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up gradients without reducing them: for all but the last of several steps.

        Local, but to be done by all ranks alike.
        """
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def submit(self, parameter: Parameter) -> None:
        """Note that something was added to the gradient of `parameter`.

        `Parameter.accumulate` calls this. Starts the reduction of each bucket that is complete.

        Raises:
            ModuleError: If the parameter is not registered.
            ModuleStateError: If no cycle was begun, or the gradient is being reduced already.
        """
        entry = self._entries.get(id(parameter))
        if entry is None:
            raise ModuleError(
                f"rank {self._group.world_rank}: {parameter!r} is not registered with these buckets"
            )
        bucket = entry.bucket
        if not self._open or (bucket is not None and bucket.handle is not None):
            entry.check_addition(is_open=self._open)
        if not entry.count and entry.uses == 0:
            self._counted.append(entry)
        entry.count += 1
        entry.ready_s = perf_counter()
        if bucket is None:
            return
        if entry.uses and entry.count == entry.uses * self._backwards:
            self._complete(entry)
        self._line.move_along()

    def complete(self, parameters: Iterable[Parameter]) -> None:
        """Announce that nothing more is added to the gradients of `parameters` in this cycle.

        Local. Starts the reduction of each bucket that is complete now, in the order of the
        buckets. Parameters that are not registered, such as frozen ones, do not matter.
        """
        for parameter in parameters:
            entry = self._entries.get(id(parameter))
            if entry is not None:
                self._complete(entry)

    def start(self) -> None:
        """Start the reductions over the replicas that are left, without waiting.

        Nothing under :meth:`no_sync`.
        """
        if not self._accumulating:
            self._line.start_all()

    def synchronize(self, *, strict: bool = False) -> None:
        """Wait until every gradient is reduced. Collective; under :meth:`no_sync` does nothing.

        Args:
            strict: Refuse parameters that got a gradient on some ranks and not on others.

        Raises:
            MismatchError: With `strict`, on every rank, naming parameters and ranks.
            TransportError: If the transport failed.
        """
        if self._accumulating:
            return
        self.start()
        self._late.start_all()
        untouched = self.untouched() if strict else []
        self._line.finish()
        self._late.finish()
        for entry in self._counted:
            entry.end_cycle(self._backwards)
        for entry in self._without_bucket:
            parameter = entry.parameter
            if parameter.grad is None:
                # As in a bucket, it gets a gradient of zeros.
                parameter.grad = namespace(parameter.data).zeros(parameter.shape, entry.dtype)
        self._end()
        self._cycles += 1
        self._has_sums = True
        if strict:
            agree_touched(untouched, self._group)

    def untouched(self) -> list[str]:
        """Return the names of the parameters that got no gradient in this cycle. Local."""
        return [entry.name for entry in self._entries.values() if not entry.count]

    def cancel(self, *, started: bool) -> None:
        """Drop this cycle after an error, and set the gradients to 0.

        Args:
            started: Whether any rank of the group has started a reduction of this cycle. Then
                all are made, on all ranks: a started collective cannot be taken back.
        """
        if started:
            self._accumulating = False
            self.start()
        self._line.finish()
        self._clear()
        self._end()

    @property
    def started(self) -> bool:
        """Whether this rank has started a reduction of this cycle."""
        return self._line.started > 0

    def close(self) -> None:
        """Give the parameters free for other buckets; their gradients are dropped. Local."""
        for entry in self._entries.values():
            entry.parameter.on_ready = None
            entry.parameter.grad_dtype = None
            if entry.bucket is not None:
                entry.parameter.detach_grad()
        self._entries.clear()
        self._trained = ()
        self._counted.clear()
        self._without_bucket.clear()
        self._line = self._late = Reductions([], NULL_TRACER)

    # -- helpers -------------------------------------------------------------------------

    def _check_frozen(self) -> None:
        """Check that the parameters to train are still those to train.

        Raises:
            ModuleStateError: If one was frozen or unfrozen.
        """
        if all(map(_IS_TRAINED, self._trained)) and not any(
            parameter.requires_grad for _, parameter in self._frozen
        ):
            return
        changed = [
            entry.name for entry in self._entries.values() if not entry.parameter.requires_grad
        ]
        changed += [name for name, parameter in self._frozen if parameter.requires_grad]
        raise ModuleStateError(
            f"rank {self._group.world_rank}: parameters {changed} were frozen or unfrozen "
            "after their gradient buckets were made: call rebuild_buckets() of the model on all "
            "ranks then, or make GradientBuckets of your own anew"
        )

    @property
    def _may_start(self) -> bool:
        return self._overlap and not self._accumulating

    def _complete(self, entry: BucketEntry) -> None:
        bucket = entry.bucket
        if bucket is not None and entry.completed_in != self._announced and self._may_start:
            entry.completed_in = self._announced
            bucket.incomplete -= 1
            if not bucket.incomplete:
                self._line.start_complete()

    def _clear(self) -> None:
        for bucket in self.buckets:
            bucket.clear()
        for entry in self._counted:
            entry.count = 0
        self._counted = [entry for entry in self._counted if entry.uses != 0]
        for entry in self._without_bucket:
            entry.parameter.zero_grad()
        self._backwards = 0

    def _end(self) -> None:
        """End a cycle: there is no whole sum to show where the ranks divide the buckets."""
        self._open = False
        self._begun = 0
        self._line.check_abort = None
        self._pool.end_step()
        for bucket in self.buckets:
            if bucket.shard is not None:
                bucket.hide()

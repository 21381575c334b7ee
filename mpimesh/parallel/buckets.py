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

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from time import perf_counter
from types import ModuleType
from typing import Any

import numpy as np

from mpimesh.arguments import as_flag, as_int, as_items, as_real, check_kind, shown
from mpimesh.arrays import DType, OpLike, ReduceOp, as_reduce_op, namespace
from mpimesh.arrays.memory import ArrayPool
from mpimesh.errors import BudgetError, ModuleError, ModuleStateError
from mpimesh.nn import Parameter
from mpimesh.nn.parameter import as_parameters, float_dtype
from mpimesh.parallel.bucket import Bucket, Reductions
from mpimesh.parallel.bucket_plan import BucketTuning, Plan, plan_buckets, tuned_plan
from mpimesh.parallel.replicas import agree_texts, agree_touched, describe, live_mesh
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

_INSIDE = (
    "no_sync() is open, and is for the buckets that the model has: leave it before this, which "
    "makes or divides buckets"
)

BUCKET_BYTES = 4 * 1024 * 1024
"""Large enough that an all-reduce runs at full speed, small enough that several overlap."""


@dataclass(eq=False, slots=True)
class BucketEntry:
    """The counts of one parameter.

    Attributes:
        parameter: Whose gradient it is.
        name: Its name in messages.
        group: The ranks over which the gradient is reduced.
        dtype: That of the gradient.
        bucket: Where the gradient lives; None in a group of one rank.
        count: How often the gradient was added to in this cycle.
        uses: How often in each backward of earlier cycles; None while that is not known.
        completed_in: The last cycle in which nothing more was to be added, as far as its bucket
            knows.
        ready_s: When something was last added to the gradient, on this rank's clock.
    """

    parameter: Parameter
    name: str
    group: ProcessGroup
    dtype: DType
    bucket: Bucket | None = None
    count: int = 0
    uses: int | None = None
    completed_in: int = -1
    ready_s: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient."""
        return self.parameter.size * int(self.dtype.itemsize)

    def refused(self) -> ModuleStateError:
        """Return the error for an addition after its cycle, or while the gradient is reduced."""
        if self.bucket is not None and self.bucket.handle is not None:
            why = (
                f"gradient {self.count + 1} of parameter {self.name!r} came while its bucket is "
                f"being reduced; earlier cycles had {self.uses} for each backward. Make the "
                "buckets with overlap=False for a model whose layers run in some steps and not in "
                "others"
            )
        else:
            why = (
                f"a gradient was added to parameter {self.name!r} after the sums over the "
                "replicas; call zero_grad() or begin() of the buckets before the next backward"
            )
        return ModuleStateError(f"rank {self.group.world_rank}: {why}")


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

    Attributes:
        parameters: The registered parameters, in the order in which they were given.
        begun: Number of calls of :meth:`begin` since gradients were last reduced or forgotten.
        cycles: Number of cycles that these buckets have summed.
        sums: The number of the cycle whose sums are here; None while there are none to step by.
        accumulating: Whether gradients are added up without being reduced: inside of
            :meth:`no_sync`.

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
        wide = None if grad_dtype is None else float_dtype(grad_dtype, what=GRAD_DTYPE)
        self._entries, self._frozen = _make_entries(listed, names, group, groups, wide)
        entries = [*self._entries.values()]
        rule = f"{self._op}, bucket_bytes {bucket_bytes}, plan {plan}, grad_dtype {grad_dtype}"
        agree_texts([describe(entry.parameter, entry.name) for entry in entries], group, rule)
        self._mesh = mesh
        own, late = self._make_buckets(entries, bucket_bytes, plan)
        self._line, self._late = Reductions(own, tracer), Reductions(late, tracer)
        for entry in entries:
            entry.parameter.on_ready = self.submit
            entry.parameter.grad_dtype = entry.dtype
            entry.uses = None if uses is None else uses.get(id(entry.parameter))
        self.parameters = tuple(entry.parameter for entry in entries)
        self.begun = 0
        self.cycles = 0
        self.sums: int | None = None
        # Those that were added to in this cycle or the one before, and at first all: of the others
        # nothing has to be counted.
        self._counted = entries
        self._without_bucket = [entry for entry in entries if entry.bucket is None]
        self._pool = ArrayPool(lambda nbytes: mesh.shared_empty(nbytes, np.uint8))
        self._backwards = 0
        self._announced = 0
        self._holds = not self._overlap
        self.accumulating = False

    def _make_buckets(
        self, entries: Sequence[BucketEntry], bucket_bytes: int, plan: Plan | None
    ) -> tuple[list[Bucket], list[Bucket]]:
        """Return the buckets over the replicas, and those over other groups. Local.

        The other groups stand in the order of their first parameters.
        """
        lots: dict[ProcessGroup, list[BucketEntry]] = {self._group: []}
        for entry in entries:
            lots.setdefault(entry.group, []).append(entry)
        own: list[Bucket] = []
        late: list[Bucket] = []
        for group, lot in lots.items():
            dtypes = [entry.parameter.dtype for entry in lot]
            cut = plan_buckets([entry.nbytes for entry in lot], dtypes, bucket_bytes)
            where = ""
            if group is not self._group:
                where = f" of {group.name}"
            elif plan is not None:
                cut = tuple(map(tuple, plan))
                once = sorted(number for members in cut for number in members) == [*range(len(lot))]
                if not once or any(len({dtypes[number] for number in one}) != 1 for one in cut):
                    raise ModuleError(
                        f"a plan of buckets has each of the {len(lot)} parameters once, and in a "
                        f"bucket those of one dtype, got {cut}"
                    )
            for place, numbers in enumerate(cut if group.size > 1 else ()):
                members = [lot[number] for number in numbers]
                parameters = [entry.parameter for entry in members]
                size = sum(parameter.size for parameter in parameters)
                xp, dtype = namespace(parameters[0].value()), members[0].dtype
                empty = self._mesh.shared_empty if xp is np else xp.empty
                name = f"bucket {place}{where}"
                bucket = Bucket(parameters, empty(size, dtype), group, name, self._op)
                (late if where else own).append(bucket)
                for entry in members:
                    entry.bucket = bucket
        return own, late

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, in the order of their reduction."""
        return self._line.buckets + self._late.buckets

    @property
    def overlaps(self) -> bool:
        """True if a reduction over the replicas may start before the last gradient is there."""
        return self._overlap and len(self._line.buckets) > 1

    @property
    def packed_bytes(self) -> int:
        """Bytes that buckets have for reductions only, from stage 2 on."""
        return self._pool.nbytes

    def divide(self, stage: int = 1, *, by_layer: bool = False) -> None:
        """From now on give each rank the sums of its part of each bucket only.

        To be done by all ranks alike; collective at stage 3. The values of the parameters move into
        flat memory, and outside of a cycle their gradients are None; see
        :mod:`mpimesh.parallel.bucket` for what is divided at which stage.

        Args:
            stage: What is divided, 1 to 3.
            by_layer: Whether values at stage 3 that not all ranks see in one memory are here only
                while a layer uses them, see :class:`LayerValues`.

        Raises:
            ModuleStateError: If gradients are being added up.
        """
        if self.begun:
            raise ModuleStateError(
                f"rank {self._group.world_rank}: gradients are being added up that no "
                "synchronize() has summed yet; divide buckets between steps, not under no_sync()"
            )
        self.sums = None
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
        self.sums = None

    def agree_on_closed(self, scope: ProcessGroup) -> None:
        """Return if no rank of `scope` has gradients that new buckets would drop. Collective.

        Raises:
            ModuleStateError: On every rank, if any is adding up gradients, or is in `no_sync`.
        """
        why = _OPEN if self.begun else _INSIDE if self.accumulating else ""
        problem = ModuleStateError(why) if why else None
        agree(scope, "new buckets", problem=problem)

    def tuned_plan(self, xp: ModuleType) -> tuple[Plan | None, BucketTuning | None]:
        """Return the cut by which all are summed earliest, by measured times. Collective.

        Over the replicas; None where there are none, or no parameters.

        Args:
            xp: Whose arrays are summed.

        Cost:
            Some exchanges of small texts, of a number for each parameter at most; 32 reductions of
            up to 16 MiB.
        """
        group = self._group
        entries = [entry for entry in self._entries.values() if entry.group is group]
        if not entries or group.size == 1:
            return None, None
        # One that no backward touched is known to be complete at the end. A replica that never had
        # rows waits for nothing, and leaves it to the others to say.
        times_s = [entry.ready_s for entry in entries]
        first_s, last_s = min(filter(None, times_s), default=0.0), max(times_s)
        everyone_s = agree(group, "gradient times", [(at or last_s) - first_s for at in times_s])
        numbers = {id(entry.parameter): number for number, entry in enumerate(entries)}
        own = self._line.buckets
        return tuned_plan(
            self._mesh,
            group,
            # A reduction waits for the last of the ranks.
            ready_s=[max(times) for times in zip(*everyone_s, strict=True)],
            sizes_bytes=[entry.nbytes for entry in entries],
            dtypes=[entry.parameter.dtype for entry in entries],
            before=[[numbers[id(one)] for one in bucket.parameters] for bucket in own],
            xp=xp,
            divided=any(bucket.shard is not None for bucket in self.buckets),
        )

    # -- a cycle: local until synchronize ---------------------------------------------

    def begin(
        self,
        backwards: int = 1,
        *,
        check_abort: Callable[[], None] | None = None,
        holds: bool = False,
    ) -> None:
        """Announce that `backwards` backward passes follow. Local.

        Sets the gradients to 0, unless they hold those of steps under :meth:`no_sync`.

        Args:
            backwards: Their number.
            check_abort: Called while this rank waits for a reduction before :meth:`synchronize`;
                raises if the cycle is to be left.
            holds: Whether no reduction starts before :meth:`start` or :meth:`synchronize`.

        Raises:
            ModuleStateError: If a parameter was frozen or unfrozen since the buckets were made.
        """
        self._check_frozen()
        if not self.begun:
            for bucket in self.buckets:
                bucket.show()
            self._clear()
        self.sums = None
        self._line.check_abort = check_abort
        self._holds = holds or not self._overlap
        self._backwards += backwards
        self.begun += 1
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
        before, self.accumulating = self.accumulating, True
        try:
            yield
        finally:
            self.accumulating = before

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
        if not self.begun or (bucket is not None and bucket.handle is not None):
            raise entry.refused()
        if not entry.count and entry.uses == 0:
            self._counted.append(entry)
        entry.count += 1
        entry.ready_s = perf_counter()
        if bucket is None or self._holds:
            return
        if entry.uses and entry.count == entry.uses * self._backwards:
            self._complete(entry)
        self._line.move_along()

    def complete(self, parameters: Iterable[Parameter]) -> None:
        """Announce that nothing more is added to the gradients of `parameters` in this cycle.

        Local. Starts the reduction of each bucket that is complete now, in the order of the
        buckets. Parameters that are not registered, such as frozen ones, do not matter.
        """
        for parameter in () if self._holds else parameters:
            entry = self._entries.get(id(parameter))
            if entry is not None:
                self._complete(entry)

    def start(self) -> None:
        """Start the reductions over the replicas that are left, without waiting.

        Nothing under :meth:`no_sync`.
        """
        if not self.accumulating:
            self._line.start_all()

    def excess(self) -> BudgetError | None:
        """Return the error of a budget that the reductions of a cycle would exceed. Local.

        None if they do not, or under :meth:`no_sync`.
        """
        traffic = self._mesh.traffic()
        if self.accumulating or not traffic.budgets:
            return None
        each = [bucket.received() for bucket in self._line.buckets]
        nbytes, messages = (sum(counts) for counts in zip((0, 0), *each, strict=True))
        return traffic.excess_of("the sum of the gradients", nbytes, messages)

    def synchronize(self, *, strict: bool = False) -> None:
        """Wait until every gradient is reduced. Collective; under :meth:`no_sync` does nothing.

        Args:
            strict: Refuse parameters that got a gradient on some ranks and not on others.

        Raises:
            MismatchError: With `strict`, on every rank, naming parameters and ranks.
            TransportError: If the transport failed.
        """
        if self.accumulating:
            return
        self._line.start_all()
        self._late.start_all()
        untouched = self.untouched() if strict else []
        self._line.finish()
        self._late.finish()
        for entry in self._counted if self._backwards else ():
            uses, rest = divmod(entry.count, self._backwards)
            entry.uses = None if rest else uses
        for entry in self._without_bucket:
            parameter = entry.parameter
            if parameter.grad is None:
                # As in a bucket, it gets a gradient of zeros.
                parameter.grad = namespace(parameter.data).zeros(parameter.shape, entry.dtype)
        self._end()
        self.cycles += 1
        self.sums = self.cycles
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
            self._line.start_all()
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
        self.parameters = ()
        self._counted.clear()
        self._without_bucket.clear()
        self._line = self._late = Reductions([], NULL_TRACER)

    # -- helpers -------------------------------------------------------------------------

    def _check_frozen(self) -> None:
        """Check that the parameters to train are still those to train.

        Raises:
            ModuleStateError: If one was frozen or unfrozen.
        """
        if all(map(_IS_TRAINED, self.parameters)) and not any(
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

    def _complete(self, entry: BucketEntry) -> None:
        bucket = entry.bucket
        if bucket is None or self.accumulating:
            return
        if entry.completed_in != self._announced:
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
        self.begun = 0
        self._line.check_abort = None
        self._pool.end_step()
        for bucket in self.buckets:
            if bucket.shard is not None:
                bucket.hide()


def _make_entries(
    parameters: list[Parameter],
    names: Sequence[str] | None,
    replicas: ProcessGroup,
    groups: Sequence[ProcessGroup | None] | None,
    grad_dtype: DType | None,
) -> tuple[dict[int, BucketEntry], list[tuple[str, Parameter]]]:
    """Return an entry for each parameter to train, by its id, in order; and the frozen ones.

    To a name that several have, the number of the parameter is added, by which ranks know what they
    speak of.
    """
    groups = [None] * len(parameters) if groups is None else groups
    names = [parameter.name for parameter in parameters] if names is None else names
    if len(names) != len(parameters):
        raise ModuleError(f"got {len(names)} names for {len(parameters)} parameters")
    if len(groups) != len(parameters):
        raise ModuleError(f"got {len(groups)} groups for {len(parameters)} parameters")
    entries: dict[int, BucketEntry] = {}
    frozen: list[tuple[str, Parameter]] = []
    often = Counter(names)
    for place, (parameter, name, group) in enumerate(zip(parameters, names, groups, strict=True)):
        if id(parameter) in entries:
            raise ModuleError(f"parameter {name!r} is registered twice, the second time as {place}")
        if parameter.on_ready is not None:
            raise ModuleError(
                f"parameter {name!r} is registered with other buckets: give a whole model to one "
                "DataParallel or fully_shard, once; or take its layers out of the one before by "
                "into_inner(), or call buckets.close() of a pipeline that is trained no more"
            )
        if often[name] > 1:  # of a weight in each of several layers
            name = f"{name} of parameter {place}"
        if parameter.requires_grad:
            dtype = np.dtype(parameter.value().dtype)
            if grad_dtype is not None:
                dtype = np.promote_types(dtype, grad_dtype)
            if dtype != parameter.dtype and not parameter.takes_wider_grad:
                raise ModuleError(
                    f"parameter {name!r} of {parameter.dtype} belongs to a library that keeps "
                    f"gradients in the parameter's dtype: leave out grad_dtype={str(grad_dtype)!r}"
                )
            entries[id(parameter)] = BucketEntry(parameter, name, group or replicas, dtype)
        else:
            frozen.append((name, parameter))
    return entries, frozen

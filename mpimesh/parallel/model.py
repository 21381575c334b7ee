"""The base class of data and pipeline parallelism, and the clipping of gradients over stages."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, Self

import numpy as np

from mpimesh.arguments import as_flag, as_int, as_real, check_kind, digest_text, shown
from mpimesh.arrays import Array, to_numpy
from mpimesh.dtensor import DTensor
from mpimesh.errors import (
    ModuleError,
    ModuleStateError,
    MpimeshError,
    ShapeError,
    tell_elsewhere,
)
from mpimesh.layout import Layout, Shard
from mpimesh.nn import Parameter
from mpimesh.nn.parameter import (
    check_buffers,
    check_shape,
    check_state,
    check_values,
    refuse_names,
)
from mpimesh.nn.protocol import set_training
from mpimesh.optim import clip_grad_norm as clip_local
from mpimesh.parallel.batch import Batch, Rows, split_layout
from mpimesh.parallel.bucket_plan import BucketTuning
from mpimesh.parallel.buckets import GradientBuckets
from mpimesh.parallel.microbatch import (
    Microbatches,
    Structure,
    Tree,
    flatten,
    replica_sizes,
    tree_map,
)
from mpimesh.parallel.replicas import digest
from mpimesh.parallel.split_layers import local_part
from mpimesh.parallel.states import first_buffers, model_parts, model_target
from mpimesh.parallel.step import Step
from mpimesh.parallel.task import Interface, Leaf
from mpimesh.parallel.training_engine import TrainingEngine
from mpimesh.runtime import DeviceMesh, ProcessGroup
from mpimesh.runtime.agreement import agree, agree_alike
from mpimesh.runtime.call import Call
from mpimesh.store.parts import Parts, Saved, Value

__all__ = ["ParallelModel", "agreed_squares", "clip_grad_norm", "problem_with_norm"]


def clip_grad_norm(
    parameters: Iterable[Parameter],
    max_norm: float,
    *,
    group: ProcessGroup,
    copies: Iterable[Parameter] = (),
) -> float:
    """Scale all gradients so that their common norm over all stages is at most `max_norm`.

    Collective over `group`.

    Args:
        parameters: This rank's parameters; there may be none.
        max_norm: The limit, above 0; ``math.inf`` only measures.
        group: Ranks that hold *different* parameters: the stages of a pipeline. Replicas hold the
            same gradients, once they are reduced, and must not be in it.
        copies: Of `parameters`, those that another rank of the group holds, too, and counts: here
            they are only scaled.

    Returns:
        The norm before clipping, the same on every rank. Where it is infinite or NaN, the
        gradients are left as they are.

    Raises:
        ModuleError: If `max_norm` is not above 0.

    Cost:
        One all-reduce of 8 bytes.
    """
    wanted = "the ranks of the stages, as mesh.group('pp') gives"
    check_kind(group, ProcessGroup, "group", ModuleError, wanted=wanted)

    def all_sum(squares: float) -> float:
        return float(group.all_reduce(np.array(squares)).resolve())

    return clip_local(
        parameters, max_norm, all_sum=all_sum if group.size > 1 else None, copies=copies
    )


def problem_with_norm(max_norm: object) -> ModuleError | None:
    """Return what is wrong with the limit of a norm, None if nothing is. Local."""
    try:
        as_real(max_norm, "max_norm", ModuleError, above=0, finite=False)
    except ModuleError as error:
        return error
    return None


def agreed_squares(
    squares: float,
    problem: MpimeshError | None,
    dims: Sequence[ProcessGroup | None],
    *,
    repeats: Sequence[ProcessGroup],
    scope: ProcessGroup,
    sums: bool = True,
    limit: float | None = None,
) -> float:
    """Return the sum of a number over all ranks along several dims, if none refuses. Collective.

    Args:
        squares: This rank's.
        problem: Why this rank refuses, if it does.
        dims: The groups of this rank along the dims; None is this rank alone.
        repeats: Its groups along dims whose ranks have the same number, which counts once.
        scope: The ranks that step together: those along all of these dims, and maybe along others.
        sums: Whether this rank has sums of gradients, which all have or none.
        limit: What the norm is to be at most, if that is to be compared.

    Raises:
        MpimeshError: On every rank, if any refuses.
        ModuleStateError: On every rank, if only some have sums.
        MismatchError: On every rank, if the limits differ.

    Cost:
        One all-reduce of 24 bytes, if `scope` has no other dims; else one more for each dim.
    """
    groups = [group for group in dims if group is not None and group.size > 1]
    together = math.prod(group.size for group in (*groups, *repeats)) == scope.size
    # Of ranks that repeat each other the first one counts.
    counts = together and not any(group.rank for group in repeats)
    mine = np.array([squares if counts else 0.0, problem is not None, not sums])
    with scope._core.progress.keeping(problem):
        total, refused, without = scope.all_reduce(mine, label="norm").resolve().tolist()
    if refused or 0 < without < scope.size:
        if problem is None and not refused and not sums:
            problem = ModuleStateError(
                "there are no sums of gradients here, and on other ranks there are; call "
                "zero_grad() on all ranks or on none"
            )
        agree(scope, "refused norms", problem=problem)
    if limit is not None:
        call = Call("clip_grad_norm", scope.name, rule=f"max_norm {float(limit)!r}")
        agree(scope, call)
    if together:
        return float(total)
    for group in groups:
        squares = float(group.all_reduce(np.array(squares), label="norm").resolve())
    return squares


class ParallelModel(ABC):
    """A model that several ranks train as one.

    Parameters have the names that they have in one :class:`~mpimesh.nn.Sequential` of all
    layers, whatever the mesh, so that a state fits any.
    """

    _engine: TrainingEngine

    # -- collective ------------------------------------------------------------------------

    @abstractmethod
    def train_step(self, *batch: Any, **options: Any) -> float:
        """Compute loss and gradients of a batch. Collective."""

    def _forward(
        self,
        x: Tree | None,
        *,
        inputs: Mapping[str, Tree] | None = None,
        everywhere: bool,
        rows: Rows,
    ) -> Tree:
        engine = self._engine
        batch = Batch(training=False, x=x, inputs=inputs, everywhere=everywhere, rows=rows)
        step = Step(engine, batch)
        step.run()
        output = joined_output(engine, step, everywhere=everywhere)
        is_everywhere = everywhere or engine.pipe.size == 1
        is_whole_mesh = engine.scope.size == engine.mesh.size
        if batch.is_split and is_everywhere and is_whole_mesh and engine.xp is np:
            return _split_output(engine, step, output)
        return output

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale the gradients so that their norm over the whole model is at most `max_norm`.

        Collective. Returns the norm before, the same on every rank; see
        :func:`mpimesh.parallel.clip_grad_norm`. A parameter that several ranks hold counts once.

        Raises:
            ModuleError: On every rank, if on any `max_norm` is not a number above 0.
            ModuleStateError: On every rank, if only some have sums of gradients; on this one, if
                the replicas divide them and there is no :class:`ParallelOptimizer`.

        Cost:
            One all-reduce of 24 bytes.
        """
        engine = self._engine
        engine.check_ready()
        if engine.optimizer is not None:
            return engine.optimizer.clip_grad_norm(max_norm)
        if engine.why_no_optimizer:
            raise ModuleStateError(f"rank {engine.mesh.rank}: {engine.why_no_optimizer}")
        parameters = self.parameters()
        problem = problem_with_norm(max_norm)
        all_sum = partial(
            agreed_squares,
            problem=problem,
            dims=(engine.tensor.group, engine.pipe),
            repeats=(engine.data,),
            scope=engine.scope,
            sums=engine.buckets.sums is not None,
            limit=max_norm if engine.mesh._core.context.settings.checks else None,
        )
        copies = [*engine.ties.copies, *engine.tensor.copies(parameters)]
        limit = 1.0 if problem else max_norm  # where there is one, all_sum raises
        return clip_local(parameters, limit, all_sum=all_sum, copies=copies)

    def check_replicas(self) -> None:
        """Verify that all replicas hold the same parameters, bit for bit. Collective.

        So do all ranks that hold one and the same parameter.

        Raises:
            MismatchError: On every rank, naming the first parameter that was found to differ.
        """
        self._engine.check_ready()
        self._engine.check_values()

    def rebuild_buckets(self) -> None:
        """Make the gradient buckets anew, after freezing or unfreezing. Collective.

        Call it between steps: the sums of the last one are dropped.

        Raises:
            MismatchError: On every rank, with the buckets as before, if a parameter is frozen on
                some of the ranks that hold it.
            ModuleStateError: On every rank, with the buckets as before, if gradients of steps under
                :meth:`no_sync` are being added up.
        """
        self._engine.rebuild_buckets()

    def tune_buckets(self) -> BucketTuning | None:
        """Cut the gradient buckets by measured times. Collective; after a few training steps.

        From when each gradient was complete in the last step, on the slowest of the replicas, and
        how long reductions take, follows the cut by which all are summed earliest (see
        ``parallel/bucket_plan.py``). Call it between steps: sums are dropped. Making the model
        with ``bucket_bytes`` forces the size instead, and :meth:`rebuild_buckets` goes back to it.

        Returns:
            What was found, the same on all replicas; None where there are no replicas, or no
            parameters to train.

        Raises:
            ModuleStateError: On every rank, if there was no training step yet, or gradients of
                steps under :meth:`no_sync` are being added up.

        Cost:
            Some exchanges of small texts, and 24 sums of up to 16 MiB.

        Example:
            >>> for x, target in first_batches:
            ...     model.train_step(x, target, optimizer=optimizer)
            >>> print(model.tune_buckets())
        """
        engine = self._engine
        engine.check_ready()
        engine.buckets.agree_on_closed(engine.scope)
        problem = None
        if not engine.buckets.cycles:
            problem = ModuleStateError(
                "gradients are timed in a training step, and no buckets can be tuned before the "
                "first one: call train_step(), then tune_buckets()"
            )
        agree(engine.scope, "the tuning of buckets", problem=problem)
        plan, tuning = engine.buckets.tuned_plan(engine.xp)
        engine.rebuild_buckets(plan)
        return tuning

    def full_state_dict(self) -> dict[str, Array]:
        """Return the values of the whole model on every rank, as host arrays. Collective.

        To go on with a training another day as if it had not ended, save with them the state of
        the :class:`ParallelOptimizer`, which has :attr:`step`, and that of its
        :class:`~mpimesh.optim.LossScaler` if it has one. With a plain optimizer save
        :attr:`step`, too: what dropout draws depends on it.

        Example:
            >>> if mesh.rank == 0:  # each a flat dict, which np.savez writes without pickle
            ...     np.savez("model.npz", **values)
            ...     np.savez("optimizer.npz", **state)

            with ``values = model.full_state_dict()`` and ``state = optimizer.full_state_dict()``
            of all ranks. And on any other mesh:

            >>> model.load_state_dict(np.load("model.npz"))
            >>> optimizer.load_state_dict(np.load("optimizer.npz"))

        Buffers of replicas may differ, such as means of the rows that each has seen: it has those
        of the first replica.

        Cost:
            Two broadcasts for each parameter and buffer, over the stages; an all-gather of what is
            split, and a broadcast of each buffer over the replicas.
        """
        engine = self._engine
        engine.check_ready()
        given = engine.parameters_to_give()
        with engine.layer_values.whole():
            values = {
                name: engine.everywhere(
                    engine.tensor.whole(parameter) if name in given else None, f"parameter {name}"
                )
                for name, parameter in engine.named_parameters(everywhere=True)
            }
        return values | first_buffers(engine)

    def gathered(self, *, write: bool = False) -> AbstractContextManager[None]:
        """Return a context in which this rank has all values of its parameters. Collective.

        For what reads or writes ``parameter.data`` between steps where :func:`mpimesh.fully_shard`
        leaves a rank its part only, as over nodes; nothing is moved where it has all. All replicas
        enter and leave it together.

        Args:
            write: Keep what was written. Every rank writes, into arrays of its own, and all
                replicas the same; at the end the values are compared, and become the model's once.
                Without it what is written may be lost, or be seen by other ranks.

        Raises:
            MismatchError: At the end of writing, on every rank, if replicas have written different
                values; the model keeps those that it had. So it does if the block raises.

        Cost:
            One all-gather for each bucket, and memory for all values of this rank's layers; to
            write, that of a copy, too, and reading it once.

        Example:
            >>> with model.gathered():
            ...     largest = max(abs(one.data).max() for one in model.parameters())
        """
        engine = self._engine
        engine.check_ready()
        writes = as_flag(write, "write", ModuleError)
        return _writing(engine) if writes else engine.layer_values.whole()

    # -- local -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Array]:
        """Return copies of the values of this rank's parameters and buffers, by name. Local.

        As :meth:`mpimesh.nn.Module.state_dict`, which says what to do where there is no room for
        them. Where each rank has the whole model, as in a :class:`DataParallel` without split
        layers, it is the whole state. Names are those in the whole model.
        Ranks of a pipeline have those of their stages, and of a split parameter their block:
        :meth:`full_state_dict` returns the whole on every rank, and :meth:`load_state_dict` needs
        it.
        """
        values = {name: parameter.value() for name, parameter in self.named_parameters()}
        values |= {name: buffer.value() for name, buffer in self._engine.named_buffers()}
        return {name: array.copy() for name, array in values.items()}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Copy values into this rank's parameters and buffers; all or, on an error, none. Local.

        A ``"step"`` in it, as :func:`mpimesh.load` gives of a saved model, is the number of steps
        to go on from; without it the number stays.
        Where ranks have the parameters once, as at stage 3 of :func:`mpimesh.fully_shard`, it is
        collective over the replicas: no rank writes what another still reads.

        Shapes:
            state[name]: that of the parameter or buffer. `state` holds the whole model.

        Raises:
            ModuleError: If names of the model are missing, or there are others.
            ShapeError: If a shape differs.
            DTypeError: If values are no numbers.
            MismatchError: On every rank, where it is collective, if ranks refuse different things.
        """
        engine = self._engine
        engine.check_ready()
        with engine.layer_values.whole(write=True):
            if engine.shares_values:
                changes = agree_alike(
                    engine.data,
                    "load_state_dict",
                    lambda: self._new_values(state),
                    _digest_of,
                )
            else:
                changes = self._new_values(state)
            for data, values in changes:
                data[...] = values
        if "step" in state and "step" not in dict(engine.named_parameters(everywhere=True)):
            engine.set_step(state["step"])
        engine.first_values = True
        if engine.checks:
            names = sorted(state.keys() - {"step"})
            texts = [engine.loaded, *(f"{name} {digest(state[name])}" for name in names)]
            engine.loaded = digest_text("\n".join(texts).encode())

    def _new_values(self, state: Mapping[str, Array]) -> list[tuple[Array, Array]]:
        """Return the memory of this rank's values, and what a state has for it. Local."""
        engine = self._engine
        check_state(state)
        expected = dict(engine.named_parameters(everywhere=True))
        buffers = dict(engine.named_buffers(everywhere=True))
        known = expected.keys() | buffers.keys()
        if "step" in state and "step" not in known:
            as_int(state["step"], "step", ModuleError, least=0)
            state = {name: value for name, value in state.items() if name != "step"}
        refuse_names(
            "a state must name each parameter and buffer of the whole model once, as that of "
            "full_state_dict() does",
            known - state.keys(),
            state.keys() - known,
            buffers,
            "; what is missing may be taken from the model, {**model.full_state_dict(), **state}",
        )
        for name, parameter in expected.items():
            check_shape(name, parameter.global_shape, state[name])
        mine = dict(engine.named_parameters())
        values = {name: local_part(name, one, state[name]) for name, one in mine.items()}
        return check_values(mine, values) + check_buffers(dict(engine.named_buffers()), state)

    def _stored_parts(self) -> Mapping[str, Parts | Value]:
        """Return what this rank has of the parameters, and the count of steps; see `Storable`."""
        self._engine.check_ready()
        return model_parts(self._engine)

    def _restored_parts(
        self, saved: Mapping[str, Saved | Value], *, strict: bool
    ) -> tuple[Mapping[str, Parts], Callable[[], None]]:
        """Return where the parameters are read to: their memory; see `Storable`."""
        self._engine.check_ready()
        return model_target(self._engine, saved, strict=strict)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which steps add up gradients without reducing them.

        For all but the last of several steps whose gradients belong together; on all ranks alike.
        """
        self._engine.check_ready()
        return self._engine.no_sync()

    def parameters(self) -> list[Parameter]:
        """Return the parameters that live on this rank, in the order of the layers."""
        return [parameter for _, parameter in self._engine.named_parameters()]

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        """Return the parameters that live on this rank, with their names in the whole model."""
        return self._engine.named_parameters()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Forget the gradients; those of steps under :meth:`no_sync`, too.

        Steps do so by themselves, so it is never needed before one.

        Args:
            set_to_none: Without effect; for programs that name it, as PyTorch's may.
        """
        self._engine.check_ready()
        self._engine.buckets.forget()

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the model."""
        return self._engine.mesh

    @property
    def buckets(self) -> GradientBuckets:
        """The gradients that live on this rank."""
        return self._engine.buckets

    @property
    def num_microbatches(self) -> int:
        """Most microbatches of a replica's rows."""
        return self._engine.num_microbatches

    @property
    def step(self) -> int:
        """Number of training steps done; set it, on all ranks, when training resumes.

        A state of a :class:`ParallelOptimizer` sets it. What dropout draws depends on it: where it
        starts from 0 again, the masks of the first steps come again. So the first step with an
        optimizer that has done steps is refused until it is set.

        Raises:
            ModuleError: If it is set to something else than a whole number of at least 0.
        """
        return self._engine.step

    @step.setter
    def step(self, value: int) -> None:
        self._engine.set_step(value)

    def is_training(self) -> bool:
        """Tell whether the model is in training mode, as it is at first."""
        return self._engine.stages[0].is_training()

    def set_training(self, training: bool) -> None:
        """Choose training or evaluation."""
        for stage in self._engine.stages:
            set_training(stage, training)

    def train(self) -> Self:
        """Choose training. Returns the model."""
        self.set_training(True)
        return self

    def eval(self) -> Self:
        """Choose evaluation: dropout is the identity. Returns the model."""
        self.set_training(False)
        return self


_WRITTEN = "the end of gathered(write=True)"
_BY_TRAIN_STEP = (
    "train_step(x, target, loss=...) does forward and backward of the whole batch, and adds up the "
    "gradients of the ranks"
)
_DEVICE = "memory is chosen when the model is made: xp=cupy puts it on the mesh's device"
_DTYPE = "the dtype is chosen when the model is made: dtype="
_SYNC = "steps under no_sync() add up gradients without reducing them"
_PARTS = "the layers stand in what the model was made of, and parameters() are those of this rank"
_GATHERED = (
    "each step has the parameters that it needs; `with model.gathered():` has all of them for a "
    "moment, and full_state_dict() gives them as host arrays"
)

tell_elsewhere(
    ParallelModel,
    {
        "backward": _BY_TRAIN_STEP,
        "module": "a pipeline has its layers in stages: local_stages are those of this rank",
        **dict.fromkeys(("to", "cuda", "cpu"), _DEVICE),
        **dict.fromkeys(("half", "bfloat16", "float", "double"), _DTYPE),
        **dict.fromkeys(("set_requires_gradient_sync", "require_backward_grad_sync"), _SYNC),
        **dict.fromkeys(("modules", "named_modules", "children", "named_children"), _PARTS),
        **dict.fromkeys(("unshard", "reshard", "summon_full_params"), _GATHERED),
        "requires_grad_": "freeze layers, layer.freeze(), and call rebuild_buckets() after it",
        "register_comm_hook": "buckets are reduced by one all-reduce, in the dtype of grad_dtype=",
        "join": "ranks may have unequal numbers of rows, also none, but all call each train_step",
        "optim_state_dict": "a ParallelOptimizer has it: optimizer.full_state_dict()",
    },
)


@contextmanager
def _writing(engine: TrainingEngine) -> Iterator[None]:
    """Have copies of all values here; what replicas have written alike becomes the model's."""
    with engine.layer_values.whole(write=True):
        memories = [(one, one.value()) for _, one in engine.named_parameters()]
        for one, memory in memories:
            one.data = memory.copy()
        try:
            try:
                yield
            except Exception as error:
                # The others are about to compare.
                what = f"gathered(write=True) was left by {type(error).__name__}: {error}"
                with suppress(MpimeshError):
                    agree(engine.scope, _WRITTEN, problem=ModuleStateError(what))
                raise
            odd = [one for one, memory in memories if np.shape(one.data) != memory.shape]
            problem = ShapeError(f"{odd[0]!r} has got {shown(odd[0].data)}") if odd else None
            agree(engine.scope, _WRITTEN, problem=problem)
            engine.check_values("what is written in gathered(write=True) must be so on all of them")
            written = [one.data for one, _ in memories]
        finally:
            for one, memory in memories:
                one.data = memory
        # Ranks that have one memory write the same bytes there, each all of them.
        for (_, memory), values in zip(memories, written, strict=True):
            memory[...] = values


def _digest_of(changes: Sequence[tuple[Array, Array]]) -> str:
    """Return what tells values that are loaded from others. Reads them once."""
    texts = [
        digest_text(np.ascontiguousarray(to_numpy(values)).reshape(-1).view(np.uint8).data)
        for _, values in changes
    ]
    return f"values {digest_text(' '.join(texts).encode())}"


# -- outputs of all replicas together, in the order of the batch ----------------------------------


def joined_output(engine: TrainingEngine, step: Step, *, everywhere: bool) -> Tree | None:
    """Return the outputs of a forward step on ranks of the last stage, or on all. Collective.

    They are one for the whole batch, or Microbatches if it was given so; where each replica was
    given its own rows, those of this rank's.
    """
    outputs, task = step.outputs, step.task
    if engine.is_last and engine.data.size > 1 and task.rows + task.count:
        if task.own:
            outputs = [_or_empty(engine, outputs)] if 0 in task.own else outputs
        elif task.count:
            outputs = _given_to_all(engine, engine.data, outputs)
        else:
            sizes = replica_sizes(task.rows, engine.data.size)
            outputs = [_over_replicas(engine, outputs, sizes)]
    if everywhere and engine.pipe.size > 1:
        outputs = _given_to_all(engine, engine.pipe, outputs if engine.is_last else [])
    if not outputs:
        return None
    return Microbatches(outputs) if task.count else outputs[0]


def _split_output(engine: TrainingEngine, step: Step, output: Tree) -> Tree:
    """Return this rank's rows of an output as blocks of arrays that are split as the input is."""
    layout, rows = split_layout(engine), step.task.rows
    if step.task.own:
        shard = Shard.of_sizes(0, [rows or 0 for rows in step.task.own])
        placements = [shard if isinstance(spec, Shard) else spec for spec in layout.placement]
        layout = Layout(engine.mesh, placements)
    return tree_map(
        lambda leaf, _: DTensor(engine.mesh, layout, (rows, *leaf.shape[1:]), leaf.dtype, leaf),
        output,
    )


def _over_replicas(engine: TrainingEngine, outputs: list[Tree], sizes: list[int]) -> Tree:
    """Put the rows of all replicas together."""
    output = _or_empty(engine, outputs) if 0 in sizes else outputs[0]
    leaves, structure = flatten(output)
    handles = [engine.data.all_gather(leaf, sizes=sizes, label="outputs") for leaf in leaves]
    return structure.unflatten([handle.resolve() for handle in handles])


def _or_empty(engine: TrainingEngine, outputs: list[Tree]) -> Tree:
    """Return the output; where a replica had no rows, no rows of what the others have."""
    mine = []
    for leaves, structure in map(flatten, outputs):
        rows = (Leaf(tuple(leaf.shape[1:]), leaf.dtype) for leaf in leaves)
        mine.append(Interface(structure, tuple(rows)).to_json())
    known = next(filter(None, agree(engine.data, "the shapes of outputs", mine)))
    if outputs:
        return outputs[0]
    interface = Interface.from_json(known[0])
    return interface.structure.unflatten(
        [engine.xp.empty(leaf.shape(0), leaf.dtype) for leaf in interface.leaves]
    )


def _given_to_all(engine: TrainingEngine, group: ProcessGroup, outputs: list[Tree]) -> list[Tree]:
    """Return what all ranks of a group have together, in the order of the ranks."""
    mine = [flatten(output)[1].to_json() for output in outputs]
    everyone = agree(group, "the structure of outputs", mine)
    taken = []
    for rank, structures in enumerate(everyone):
        for place, text in enumerate(structures):
            structure = Structure.from_json(text)
            here = rank == group.rank
            leaves = flatten(outputs[place])[0] if here else [None] * structure.num_leaves
            handles = [group.broadcast(leaf, root=None, label="outputs") for leaf in leaves]
            taken.append((structure, handles))
    return [
        structure.unflatten([engine.xp.asarray(handle.resolve()) for handle in handles])
        for structure, handles in taken
    ]

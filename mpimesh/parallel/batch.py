"""A step's batch and other arguments on one rank: checked, and compared with those of others."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Literal, Protocol

import numpy as np

from mpimesh.arguments import shown
from mpimesh.arrays import Array, HostArray
from mpimesh.dtensor import DTensor, DVariable
from mpimesh.errors import (
    ModuleError,
    ModuleStateError,
    ShapeError,
    UnknownNameError,
)
from mpimesh.layout import Layout, Replicate, Shard
from mpimesh.nn import Loss
from mpimesh.nn.protocol import loss_advice
from mpimesh.optim.optimizer import numbers_text
from mpimesh.parallel.checked import CHECKED, options_text
from mpimesh.parallel.header import (
    OWN_ROWS,
    UNKNOWN,
    Facts,
    Size,
    bits_of,
    code_of,
    fingerprint,
    number_of,
)
from mpimesh.parallel.microbatch import Microbatches, Tree, flatten, num_rows, tree_map
from mpimesh.parallel.task import input_title
from mpimesh.parallel.training_engine import TrainingEngine

__all__ = [
    "Batch",
    "Rows",
    "SupportsStep",
    "check_loss",
    "kind_of",
    "parts_of",
    "rows_of",
    "split_layout",
]

Rows = Literal["whole", "local"]
"""The rows of plain arrays: those of the global batch, or those of this rank's replica."""

_SAMPLE = 4096


class SupportsStep(Protocol):
    """A changer of parameters by their gradients, such as an :class:`~mpimesh.optim.Optimizer`."""

    def step(self) -> object:
        """Change the parameters."""


@dataclass(slots=True, eq=False)
class Batch:
    """A step's arguments on one rank.

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
        values: Once it is checked, what was given, by title: each value, or its microbatches.
        sizes: The rows of the batch, or of each of its microbatches.
        is_split: Whether the values are this rank's blocks of split arrays.
        facts: What the ranks compare.
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
    values: dict[str, Sequence[Tree]] = field(init=False, default_factory=dict)
    sizes: tuple[int, ...] = field(init=False, default=())
    is_split: bool = field(init=False, default=False)
    facts: Facts = field(init=False, default_factory=dict)

    @property
    def with_loss(self) -> bool:
        """True if the step computes a loss, so that its last stage needs one, and targets."""
        return self.training or self.evaluating

    # -- a batch like one before ---------------------------------------------------------------

    def signature(self, engine: TrainingEngine) -> Hashable:
        """Return what all that :meth:`check` finds depends on; None if that is not all.

        Two batches of one signature have the same facts and pass the same checks, but for what
        :meth:`check_again` sees to. None where values are compared, and for split arrays,
        microbatches, and whatever has to be converted.
        """
        is_first = engine.first_values if self.training else engine.first_forward
        kinds = _signature(self.x), _signature(self.target), _signature(self.inputs)
        if is_first or engine.mesh._core.context.settings.checks or None in kinds:
            return None
        options: list[Any] = [self.denominator, self.rows]
        if any(type(option) not in (int, float, str, NoneType) for option in options):
            return None
        return (
            kinds,
            (self.training, self.evaluating, self.everywhere, self.rows),
            (type(self.loss), str(self.denominator), type(self.optimizer)),
            engine.buckets.accumulating,
            engine.buckets.begun,
            engine.stages[0].is_training(),
            engine.loss_share,
            engine.scales_losses and engine.loss_scale,
            engine.first_trained,
            engine.layer_values.meets,
        )

    def check_again(
        self, engine: TrainingEngine, facts: Facts, numbers: Sequence[int]
    ) -> list[int]:
        """Take in a batch of the signature of one that was checked; check what can differ.

        Args:
            engine: The model.
            facts: Those of the batch that was checked.
            numbers: Its numbers.

        Returns:
            The numbers of this one.

        Raises:
            ModuleError: If the loss does not fit.
        """
        check_loss(self.loss, f"rank {engine.mesh.rank}")
        engine.tensor.check_loss(self.loss)
        self.facts = facts = {**facts, "step": engine.step if self.training else None}
        numbers = [*numbers]
        if self.optimizer is not None:
            facts["optimizer"] = text = numbers_of(self.optimizer)
            numbers[_optimizer_place(engine, facts)] = fingerprint(text)
        self.values = {title: (value,) for title, value in self._given().items()}
        if facts["rows"] is not None:
            self.sizes = (facts["rows"],)
        if facts["replica"] is not None:
            facts["counted"] = self.counted(engine)
        return numbers

    # -- checks --------------------------------------------------------------------------------

    def check(self, engine: TrainingEngine) -> None:
        """Take in the values, and note what the ranks are to compare. Local.

        Raises:
            MpimeshError: If something is missing on this rank, or does not fit.
        """
        who = f"rank {engine.mesh.rank}"
        self.describe(engine)
        sizes, split, origin = self._take(engine)
        missing = self._missing(engine)
        if missing:
            raise ShapeError(f"{who} holds {missing}, got None")
        if self.with_loss and engine.is_last and self.loss is None:
            raise ModuleError(
                f"{who} needs loss=, got None: give one, such as loss=nn.cross_entropy, where the "
                "last stage is, or the whole model"
            )
        check_loss(self.loss, who)
        engine.tensor.check_loss(self.loss)
        is_local = self._are_local(split, who)
        self._check_rows(sizes, who)
        first = next(iter(sizes), None)
        self.sizes = () if first is None else sizes[first]
        is_cut = first is not None and self._is_cut(first)
        # The rows of the only replica are the whole batch.
        replica = engine.data.rank if is_local and engine.data.size > 1 else None
        checks = bool(engine.mesh._core.context.settings.checks)
        # Without checks nothing is brought from a device for it.
        is_first = engine.first_values if self.training else engine.first_forward
        unseen = is_first and (checks or engine.xp is np)
        self.is_split = "x" in split
        self.facts |= {
            "rows": None if first is None else sum(self.sizes),
            "count": None if first is None else OWN_ROWS if replica is not None else 0,
            "goal": self._goal(engine),
            "kinds": {
                title: "; ".join(map(kind_of, parts))
                for title, parts in self.values.items()
                if title != "target"
            },
            "sums": self._checksums(whole=checks) if checks or unseen else {},
            "optimizer": None if self.optimizer is None else numbers_of(self.optimizer),
            "parameters": engine.digests() if self.training and (checks or unseen) else {},
            "replica": replica,
            "counted": None if replica is None else self.counted(engine),
        }
        if checks:
            given = None if self.denominator is None else _as_number(self.denominator)
            self.facts |= {
                "trained": engine.trainer.text(engine.optimizer, engine.named_parameters())
                if self.training
                else None,
                "denominator": given,
                "origin": origin,
                "loaded": engine.loaded or None,
            }
        if is_cut and replica is None:
            self.facts["count"] = len(self.sizes)
            self.facts["sizes"] = ", ".join(map(str, self.sizes))

    def describe(self, engine: TrainingEngine) -> None:
        """Begin the facts with what this rank calls. Local, and never raises."""
        call, how = "train_step", f"{engine.num_microbatches} microbatches"
        if self.evaluating:
            call = "evaluate"
        elif not self.training:
            call = f"forward{' everywhere' if self.everywhere else ''}"
        else:
            how += f" by {engine.plans.name}, stages from {engine.first_trained} on trained"
            if engine.buckets.accumulating:
                how += " without reducing gradients"
            if engine.buckets.begun:
                how += f", added to the gradients of {engine.buckets.begun} before"
            if not engine.stages[0].is_training():
                how += ", in evaluation mode"
            if engine.loss_share != 1:
                how += f", with a share of {engine.loss_share:g}"
            if engine.scales_losses:
                how += f", losses times {engine.loss_scale:g}"
            if self.optimizer is not None:
                how += f", then {type(self.optimizer).__name__}.step"
        self.facts = {
            "call": call,
            "step": engine.step if self.training else None,
            "how": how,
            "place": engine.place,
            **dict.fromkeys(("rows", "count", "sizes", "goal", "optimizer", "replica", "counted")),
            **dict.fromkeys(CHECKED),
            **{name: {} for name in ("kinds", "sums", "parameters")},
        }

    def _take(
        self, engine: TrainingEngine
    ) -> tuple[dict[str, tuple[int, ...]], list[str], str | None]:
        """Take in all that was given here.

        Returns:
            The rows of each value, or of its microbatches, by title; which are split arrays; and
            which of the batches of Batches the last of these is, None if it is of none.
        """
        inputs = {} if self.inputs is None else self.inputs
        if not isinstance(inputs, Mapping):
            raise ModuleError(f"inputs must be a dict of arrays by name, got {inputs!r}")
        for name in inputs:
            if name not in engine.input_names:
                raise UnknownNameError(
                    f"no stage takes an input called {name!r}; the stages take "
                    f"{', '.join(map(repr, engine.input_names)) or 'none'}: name it in "
                    f"PipelineStage(i, inputs=({name!r},))"
                )
        sizes: dict[str, tuple[int, ...]] = {}
        split: list[str] = []
        origins: list[object] = [None]
        for title, value in self._given().items():
            blocks: list[Array] = []

            def block(x: DTensor, path: str, blocks: list[Array] = blocks) -> Array:
                origins.append(getattr(x, "_origin", None))
                blocks.append(_block(engine, x, path))
                return blocks[-1]

            self.values[title] = parts = parts_of(value, title, block=block)
            sizes[title] = tuple(map(rows_of, parts))
            if blocks:
                split.append(title)
                if len(blocks) < len(flatten(parts[0])[0]):
                    raise ModuleError(
                        f"{title} holds split arrays and others: give each as a DTensor that is "
                        "split by rows, or none"
                    )
        return sizes, split, origins[-1] if isinstance(origins[-1], str) else None

    def _given(self) -> dict[str, Any]:
        """Return the values that this rank was given, by title."""
        values: dict[str, Any] = {"x": self.x, "target": self.target}
        for name, value in (self.inputs or {}).items():
            values[input_title(name)] = value
        return {title: value for title, value in values.items() if value is not None}

    def _is_cut(self, title: str) -> bool:
        """Tell whether a value was given as microbatches."""
        return isinstance(self._given()[title], Microbatches)

    def _are_local(self, split: Sequence[str], who: str) -> bool:
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
            cut = next(filter(self._is_cut, self.values), None)
            if cut is not None:
                raise ModuleError(
                    f'{who}: {cut} is Microbatches, which with rows="local" are not dealt to the '
                    "replicas: give the Microbatches of all replicas on every rank, or arrays"
                )
            return True
        plain = [title for title in self.values if title not in split]
        if split and plain:
            raise ModuleError(
                f"on {who} {split[0]} is split by rows and {plain[0]} is not: give both as "
                f'DTensors; or both as plain arrays of this rank\'s rows with rows="local"; or '
                f"{split[0]}.full(), which all ranks call, beside the whole {plain[0]}"
            )
        return bool(split)

    def _check_rows(self, sizes: Mapping[str, tuple[int, ...]], who: str) -> None:
        """Refuse values whose rows do not belong together."""
        first = next(iter(sizes), "")
        for title in sizes:
            if self._is_cut(first) != self._is_cut(title):
                cut, whole = (first, title) if self._is_cut(first) else (title, first)
                raise ShapeError(
                    f"on {who} {cut} is given as Microbatches and {whole} is not: give all so, "
                    "or none"
                )
            if len(sizes[first]) != len(sizes[title]):
                raise ShapeError(
                    f"{first} and {title} must have the same number of microbatches; on {who} "
                    f"{first} has {len(sizes[first])} and {title} {len(sizes[title])}"
                )
            for place, (one, other) in enumerate(zip(sizes[first], sizes[title], strict=True)):
                if one != other:
                    where = f" in microbatch {place}" if self._is_cut(title) else ""
                    raise ShapeError(
                        f"{first} and {title} must have the same rows; on {who} {first} has {one} "
                        f"and {title} {other}{where}"
                    )

    def _missing(self, engine: TrainingEngine) -> str:
        """Say which stage lacks what, if any does."""
        if "x" not in self.values and engine.is_first:
            return "the first stage and needs x"
        if self.with_loss and engine.is_last and "target" not in self.values:
            return "the last stage and needs target"
        for number, stage in engine.local.items():
            for name in stage.inputs:
                if input_title(name) not in self.values:
                    return f"stage {number} and needs inputs={{{name!r}: ...}}"
        return ""

    def check_optimizer(self, engine: TrainingEngine) -> None:
        """Refuse an optimizer that cannot change the parameters now. Local.

        Raises:
            ModuleError: If it cannot.
            ModuleStateError: If it has done steps that the model does not know of.
        """
        who = f"rank {engine.mesh.rank}"
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
        if engine.optimizer is None and engine.checked_optimizer is not self.optimizer:
            self._check_held(engine, who)
            engine.checked_optimizer = self.optimizer
        done = getattr(self.optimizer, "steps", 0)
        if not engine.step and not engine.is_step_known and isinstance(done, int) and done:
            raise ModuleStateError(
                f"{who}: the optimizer has done {done} steps, and the model does not know of any: "
                f"set model.step = {done} to go on with that training, as what dropout draws goes "
                "by it, or model.step = 0 to begin another"
            )
        if engine.buckets.accumulating:
            raise ModuleError(
                f"{who}: a step under no_sync leaves gradients that are not summed over the "
                "replicas; give optimizer= to the last of the steps only"
            )

    def _check_held(self, engine: TrainingEngine, who: str) -> None:
        """Refuse an optimizer of another model, and warn of parameters that it leaves out."""
        held: Any = getattr(self.optimizer, "params", None)
        groups = getattr(self.optimizer, "param_groups", None)
        if isinstance(groups, list):
            held = [one for group in groups for one in group["params"]]
        if not isinstance(held, list | tuple):
            return
        ids = {id(one) for one in held}
        mine = engine.buckets.parameters
        left = [one for one in mine if ids.isdisjoint((id(one), id(getattr(one, "tensor", one))))]
        if mine and len(left) == len(mine):
            raise ModuleError(
                f"{who}: the optimizer has {len(held)} parameters, and none of the {len(mine)} "
                "that this model trains on this rank, so that nothing would change: make it of "
                "model.parameters()"
            )
        if left:
            warnings.warn(
                f"{who}: the optimizer leaves out {len(left)} of the {len(mine)} parameters that "
                f"this model trains on this rank, such as {left[0]!r}, which stay as they are: "
                "make it of model.parameters(), or freeze() what is not to be trained",
                UserWarning,
                stacklevel=2,
            )

    def _goal(self, engine: TrainingEngine) -> str | None:
        """Say what loss this rank computes; None if it does not hold the last stage."""
        if not self.with_loss or not engine.is_last:
            return None
        given = self.denominator
        count = "what the batch counts" if given is None else _as_number(given)
        return f"{options_text(self.loss)} divided by {count}"

    def _checksums(self, *, whole: bool) -> dict[str, str]:
        """Return by title the checksum of each value on the host without Python objects."""
        sums = {}
        for title, parts in self.values.items():
            leaves = [
                leaf
                for part in parts
                for leaf in flatten(part)[0]
                if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject
            ]
            if leaves:
                sums[title] = _checksum(leaves, whole=whole)
        return sums

    # -- what goes to other ranks, and on to the stages ------------------------------------------

    def counted(self, engine: TrainingEngine) -> float | None:
        """Return what the replica's own targets count, None if that is their rows.

        Raises:
            ModuleError: If it is less than 0.
        """
        if not self.with_loss or not engine.is_last or self.denominator is not None:
            return None
        if getattr(self.loss, "count", None) is None or self.loss is None:
            return None
        counted = self._count(self.loss)
        if not counted >= 0:
            raise ModuleError(
                f"{type(self.loss).__name__}.count must give a number of at least 0, got {counted}"
            )
        return counted

    def numbers(self, engine: TrainingEngine) -> list[int]:
        """Return what all ranks compare, see :meth:`StepExchanges.begin`. Local."""
        facts, titles = self.facts, engine.titles
        is_whole = facts["replica"] is None
        sums = facts["sums"] if is_whole else {}
        numbers = [
            facts["rows"] if is_whole and facts["rows"] is not None else UNKNOWN,
            UNKNOWN if facts["count"] is None else facts["count"],
            fingerprint(f"{facts['call']} of {facts['how']}"),
            number_of(facts["goal"]),
            number_of(facts["sizes"]),
            *(number_of(facts["kinds"].get(title)) for title in titles),
            *(number_of(sums.get(title)) for title in (*titles, "target")),
        ]
        parameters = str(facts["parameters"]) if facts["parameters"] else None
        for text in (facts["optimizer"], parameters):
            # Rows that only ranks of one place fill in, so that only they are compared.
            row = [UNKNOWN] * engine.places
            row[facts["place"]] = number_of(text)
            numbers += row
        if engine.checks:
            numbers += [number_of(facts[name]) for name in CHECKED]
        return numbers

    def code(self, engine: TrainingEngine, numbers: Sequence[int]) -> int:
        """Return in one number what all of `numbers` say but for those of the optimizer."""
        numbers = [*numbers]
        numbers[_optimizer_place(engine, self.facts)] = UNKNOWN
        return code_of(numbers)

    def own_numbers(self, engine: TrainingEngine) -> list[int]:
        """Return what the ranks of a replica compare that was given its own rows."""
        sums = self.facts["sums"]
        texts = [number_of(sums.get(title)) for title in (*engine.titles, "target")]
        return [sum(self.sizes), bits_of(self.facts["counted"]), *texts]

    def size(self, engine: TrainingEngine) -> Size | None:
        """Return the size of the global batch; None if this rank cannot tell."""
        rows, count, kinds = self.facts["rows"], self.facts["count"], self.facts["kinds"]
        if rows is None or count == OWN_ROWS:
            return None
        if count:
            return rows, count, (), (), None
        if any(title not in kinds for title in engine.titles):
            return None
        return rows, 0, tuple(fingerprint(kinds[title]) for title in engine.titles), (), None

    def divisor(self, engine: TrainingEngine, size: Size) -> float:
        """Return what the loss is divided by, scaled before anything is rounded."""
        rows, _, _, own, counted = size
        denominator = self.denominator
        if denominator is None and own:
            denominator = float(rows) if counted is None else counted
        elif denominator is None:
            denominator = 0.0 if self.loss is None else self._count(self.loss)
        if not denominator and self.denominator is None:
            denominator = 1.0  # of padding alone: a sum over nothing, whose gradients are 0
        return denominator / (engine.loss_scale * engine.loss_share)

    def _count(self, loss: Loss) -> float:
        """Return what the targets here count."""
        counted = getattr(loss, "count", None)
        if counted is None:
            return float(sum(self.sizes))
        return float(sum(float(counted(part)) for part in self.values["target"]))


# -- values: arrays, or trees of them --------------------------------------------------------------


def parts_of(
    value: Any, name: str, *, block: Callable[[DTensor, str], Array] | None = None
) -> tuple[Tree, ...]:
    """Return a value that a user gave as arrays: itself, or each of its microbatches.

    Args:
        value: An array, or anything that ``np.asarray`` takes; or a tuple or a dict of them; or
            microbatches of those.
        name: Its name.
        block: What gives this rank's block of a split array; None refuses these.

    Raises:
        ModuleError: If it is built otherwise.
        ShapeError: If an array has no rows, or not as many as the others.
    """

    def taken(x: Any, path: str) -> Array:
        if block is None or not isinstance(x, DTensor | DVariable):
            return _as_array(x, path)
        return block(x.value() if isinstance(x, DVariable) else x, path)

    is_cut = isinstance(value, Microbatches)
    parts: list[Tree] = []
    for place, part in enumerate(value if is_cut else [value]):
        title = f"{name}[{place}]" if is_cut else name
        parts.append(tree_map(_as_array if is_cut else taken, part, name=title))
        leaves, structure = flatten(parts[-1], name=title)
        paths = [title + path for path in structure.paths()]
        rows = [num_rows(leaf, name=path) for leaf, path in zip(leaves, paths, strict=True)]
        for other, path in zip(rows, paths, strict=True):
            if other != rows[0]:
                raise ShapeError(
                    f"all arrays of {title} must have the same rows; {paths[0]} has {rows[0]} and "
                    f"{path} {other}"
                )
    return tuple(parts)


def _as_number(denominator: object) -> str:
    """Return a denominator as the ranks compare it."""
    try:
        return str(float(denominator))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise ModuleError(f"denominator must be a number above 0, got {denominator!r}") from None


def rows_of(tree: Tree) -> int:
    """Return the rows of a value, which all of its arrays have."""
    return int(flatten(tree)[0][0].shape[0])


def kind_of(tree: Tree) -> str:
    """Return the shapes and dtypes of a row, in words."""
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


def _signature(value: Any) -> Hashable:
    """Return the structure, shapes and dtypes of a value of plain arrays; None for any other."""
    kind = type(value)
    if kind is np.ndarray:
        return value.shape, value.dtype
    if value is None:
        return ()
    if kind is tuple or kind is dict:
        entries = value if kind is tuple else value.values()
        inner = tuple(map(_signature, entries))
        return None if None in inner else (kind, inner, None if kind is tuple else tuple(value))
    return None


def _checksum(arrays: Sequence[HostArray], *, whole: bool) -> str:
    """Return eight hexadecimal digits that tell the values of `arrays` from most others.

    Cost:
        Reads them once, about a second for 2 GB; or some thousand elements of each, spread over it.
    """
    crc = 0
    for x in arrays:
        part = x if whole else x.flat[:: max(1, x.size // _SAMPLE)]
        crc = zlib.crc32(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data, crc)
    return f"{crc:08x}"


def split_layout(engine: TrainingEngine) -> Layout:
    """Return the layout of a batch of which each replica has its rows."""
    mesh, data = engine.mesh, engine.data
    split = data.name if data.size > 1 else None
    return Layout(mesh, [Shard(0) if dim == split else Replicate() for dim in mesh.dim_names])


def _block(engine: TrainingEngine, x: DTensor, path: str) -> Array:
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


def _optimizer_place(engine: TrainingEngine, facts: Facts) -> int:
    """Return where the optimizer stands in :meth:`Batch.numbers`, counted from the end."""
    more = len(CHECKED) if engine.checks else 0
    return int(facts["place"]) - 2 * engine.places - more


def numbers_of(optimizer: SupportsStep) -> str:
    """Return an optimizer's class, and those of its numbers that replicas must have alike."""
    parts = getattr(optimizer, "optimizers", (optimizer,))
    return "; ".join([f"{type(one).__name__} {numbers_text(one)}" for one in parts])

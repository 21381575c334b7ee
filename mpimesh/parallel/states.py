"""States of models and optimizers under the names of the whole model, so that they fit any mesh.

A state dict is whole on every rank. For a checkpoint each rank has its parts, and nothing is
gathered, to save or to load: where replicas divide a bucket each has its span of the parameters in
it, and where the ranks of a node see values in one memory, each has those that it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mpimesh.arguments import as_int, shown
from mpimesh.arrays import Array, HostArray, namespace, to_numpy
from mpimesh.errors import MismatchError, ModuleError, MpimeshError, ShapeError
from mpimesh.nn import Parameter
from mpimesh.nn.parameter import Buffer
from mpimesh.optim import LossScaler, Optimizer
from mpimesh.optim.optimizer import check_arrays, check_steps, numbers_text
from mpimesh.parallel.bucket import STAGES, BucketShard, flat_places, inside
from mpimesh.parallel.buckets import GradientBuckets
from mpimesh.parallel.optimizer_shards import Layouts, LentOptimizer, State, places_of
from mpimesh.parallel.replicas import difference, digest
from mpimesh.parallel.split_layers import local_part
from mpimesh.parallel.stage import named_buffers
from mpimesh.parallel.training_engine import TrainingEngine
from mpimesh.runtime import ProcessGroup
from mpimesh.runtime.agreement import agree
from mpimesh.runtime.call import Call
from mpimesh.store.modules import (
    OPTIMIZER,
    STEP,
    STORED,
    FlatSpan,
    StateNames,
    buffer_targets,
    check_names,
    parameter_target,
    state_parts,
    state_target,
)
from mpimesh.store.parts import Parts, Saved, Value

__all__ = [
    "agree_optimizers",
    "agree_states",
    "first_buffers",
    "full_state",
    "is_finite",
    "model_parts",
    "model_target",
    "optimizers_parts",
    "optimizers_target",
    "problem_with",
    "why_no_step",
    "why_not_written",
]

_FLAT = StateNames("/", "params/")
"""The names in a flat state: ``params/NAME/mean`` of a parameter, ``lr`` of the optimizer."""


def full_state(
    engine: TrainingEngine,
    lent: Sequence[LentOptimizer],
    states: Sequence[Mapping[str, Any]],
    *,
    single: bool,
) -> dict[str, Any]:
    """Return the states of all parameters of a model as one flat dict. Collective over its ranks.

    Args:
        engine: The model.
        lent: The optimizers.
        states: Their states, of this rank's whole parameters.
        single: Whether there is one optimizer, not a list of them, whose names begin with numbers.

    Cost:
        Two broadcasts for each array, over the stages; and an all-gather of what is split.
    """
    flat: dict[str, Any] = {"step": engine.step}
    names = _names_of(lent, _FLAT, single=single)
    for own_names, state in zip(names, states, strict=True):
        for key, value in state.items():
            if key != "params":
                flat[own_names.of(key)] = np.array(value) if isinstance(value, tuple) else value
    places = places_of(lent)
    mine: dict[str, Mapping[str, Any]] = {}
    facts: dict[str, tuple[int, int, list[str]]] = {}
    for name, parameter in engine.parameters_to_give().items():
        if id(parameter) in places:
            number, place = places[id(parameter)]
            mine[name] = own = states[number]["params"][place]
            facts[name] = number, int(own["steps"]), sorted(own.keys() - {"steps"})
    stages = agree(engine.pipe, Call("full_state_dict", engine.pipe.name), facts)
    described = {name: stated for stage in stages for name, stated in stage.items()}
    for name, parameter in engine.named_parameters(everywhere=True):
        if name not in described:
            continue
        number, steps, arrays = described[name]
        flat[names[number].of("steps", name)] = steps
        for array in arrays:
            part = engine.tensor.whole(parameter, mine[name][array]) if name in mine else None
            whole = engine.everywhere(part, f"{array} of {name}")
            flat[names[number].of(array, name)] = whole
    return flat


def _names_of(
    lent: Sequence[LentOptimizer], names: StateNames, *, single: bool
) -> list[StateNames]:
    """Return the names of each optimizer's state, which begin with numbers if there is a list."""
    return [names] if single else [*map(names.numbered, range(len(lent)))]


def nested_states(state: Any, count: int) -> tuple[list[Any], int | None]:
    """Return the state of each optimizer, and the model's count of steps, if it is there. Local.

    Args:
        state: A state or a list of them, nested or flat, as users load them.
        count: The number of optimizers.

    Raises:
        ModuleError: If there are more or less, or it is no state, or 'step' no count.
    """
    if isinstance(state, Mapping) and "params" not in state:
        flat_values = {str(key): state[key] for key in state}
        for key, value in flat_values.items():  # np.load gives arrays for numbers and texts, too
            if isinstance(value, np.ndarray) and not value.shape:
                flat_values[key] = value.item()
        states: list[Any] = [_nested(flat_values, one) for one in _FLAT.found_in(flat_values)]
        if STEP in flat_values:
            states[0][STEP] = flat_values[STEP]
    elif isinstance(state, Mapping):
        states = [state]
    elif isinstance(state, Sequence) and not isinstance(state, str | bytes):
        states = list(state)
    else:
        raise ModuleError(
            "state must be a dict as state_dict() or full_state_dict() gives, or a list of them "
            f"for a list of optimizers, got {shown(state)}"
        )
    if len(states) != count:
        raise ModuleError(f"state is of {len(states)} optimizers, and there are {count}")
    steps = [one["step"] for one in states if isinstance(one, Mapping) and "step" in one]
    step = as_int(steps[0], "'step' in state", ModuleError, least=0) if steps else None
    return [
        {key: one[key] for key in one if key != "step"} if isinstance(one, Mapping) else one
        for one in states
    ], step


def _nested(flat: Mapping[str, Any], names: StateNames) -> dict[str, Any]:
    """Return the state of one optimizer out of a flat one."""
    state: dict[str, Any] = {"params": {}}
    for name, value in flat.items():
        if not name.startswith(names.prefix):
            continue
        parameter, key = names.split(name)
        if parameter:
            state["params"].setdefault(parameter, {})[key] = value
        else:
            state[key] = tuple(value.tolist()) if isinstance(value, np.ndarray) else value
    return state


def _local_state(
    engine: TrainingEngine, lent: LentOptimizer, state: Mapping[str, Any]
) -> dict[str, Any]:
    names = engine.names
    known = {name for name, _ in engine.named_parameters(everywhere=True)}
    mine = [names[id(parameter)] for parameter in lent.parameters]
    by_name = state["params"]
    missing = sorted(set(mine) - by_name.keys())
    unknown = sorted(by_name.keys() - known)
    foreign = sorted((by_name.keys() & set(names.values())) - set(mine))
    if missing or unknown or foreign:
        raise ModuleError(
            f"a full state of {type(lent.optimizer).__name__} has all parameters that it was "
            f"given, by their names in the whole model; missing: {missing or 'none'}, not in the "
            f"model: {unknown or 'none'}, not of this optimizer: {foreign or 'none'}"
        )
    params: list[dict[str, Any]] = []
    for name, parameter in zip(mine, lent.parameters, strict=True):
        own: dict[str, Any] = {}
        who = f"parameter {name!r}"
        check_steps(who, by_name[name])
        check_arrays(who, by_name[name], None)  # it may have a part of the shape here
        for key, value in by_name[name].items():
            try:
                own[key] = value if key == "steps" else local_part(name, parameter, value)
            except ShapeError as error:
                raise ShapeError(f"{key!r} of the optimizer: {error}") from None
        params.append(own)
    return {**state, "params": params}


# -- checks; first those that are local -----------------------------------------------------------


_BLOCK_ELEMENTS = 1 << 16
_OPTIMIZERS = "the optimizers"


def problem_with(
    optimizers: Sequence[object],
    engine: TrainingEngine,
    zero: object,
    scaler: object,
    group: object,
) -> str:
    """Say why these cannot train a model; empty if they can."""
    if not isinstance(zero, int) or zero not in STAGES:
        return f"zero must be a stage of ZeRO, 0 to 3, got {shown(zero)}"
    if zero < engine.stage:
        return (
            f"zero={zero} is less than the stage of the model, {engine.stage}, whose parts stay "
            "divided: leave out zero"
        )
    if scaler is not None and not isinstance(scaler, LossScaler):
        return f"scaler must be a LossScaler or None, got {shown(scaler)}"
    if not isinstance(group, ProcessGroup):
        return f"group must be a group of ranks, as mesh.group() gives, got {shown(group)}"
    together = set(engine.scope.ranks)
    if not together <= set(group.ranks):
        return (
            f"{len(together)} ranks step together, and group {group.name!r} has only "
            f"{len(together & set(group.ranks))} of them: they would not leave out the same steps"
        )
    if engine.optimizer is not None:
        return "the model has a ParallelOptimizer; give it several optimizers as a list"
    known = {id(parameter) for _, parameter in engine.named_parameters()}
    seen: set[int] = set()
    for one in optimizers:
        if not isinstance(one, Optimizer):
            kind = f"{type(one).__module__}.{type(one).__name__}"
            if kind.startswith("torch."):
                return (
                    f"{kind} of PyTorch cannot be divided among ranks; use an optimizer of "
                    "mpimesh.optim, such as mm.optim.Adam(model.parameters())"
                )
            return (
                f"optimizer must be of mpimesh.optim, or a list of such, got {type(one).__name__}"
            )
        if zero and not one.elementwise:
            return (
                f"{type(one).__name__} does not change each element by itself, so that ranks "
                "cannot divide parameters; use zero=0"
            )
        problem = _foreign(one.params, known, seen)
        if problem:
            return problem
    return "" if optimizers else "optimizer must be at least one, got none"


def _foreign(parameters: Sequence[Parameter], known: set[int], seen: set[int]) -> str:
    for parameter in parameters:
        if id(parameter) not in known:
            return f"{parameter!r} is none of model.parameters(), which an optimizer here takes"
        if id(parameter) in seen:
            return f"{parameter!r} belongs to two optimizers"
        seen.add(id(parameter))
    return ""


def why_no_step(buckets: GradientBuckets) -> str:
    """Say why the parameters of these buckets cannot be stepped; empty if they can."""
    if buckets.sums is None:
        return (
            "there are no sums of gradients to step by: call train_step() before each step(), the "
            "last time not under no_sync()"
        )
    return why_not_written(buckets)


def why_not_written(buckets: GradientBuckets) -> str:
    """Say which parameter has values that a step would not write; empty if none has."""
    for bucket in buckets.buckets:
        views = [] if bucket.shard is None else bucket.shard.views
        for parameter, view in zip(bucket.parameters, views, strict=False):
            if parameter.data is not view:
                return (
                    f"{parameter!r} has got another array for its values, and the replicas divide "
                    "those that it had: write into it, parameter.data[...] = "
                )
    return ""


def is_finite(x: Array) -> bool:
    """Tell whether no element is infinite or NaN."""
    xp = namespace(x)
    step = _BLOCK_ELEMENTS if xp is np else max(1, x.size)
    flat = x.reshape(-1)
    return all(bool(xp.isfinite(flat[at : at + step]).all()) for at in range(0, flat.size, step))


def agree_optimizers(optimizers: Sequence[Optimizer], engine: TrainingEngine) -> None:
    """Return if all replicas change each parameter by the same rule, and all parts of it.

    Collective over the ranks that step together.

    Raises:
        MismatchError: On every rank, naming the first optimizer or parameter that differs.

    Cost:
        Three exchanges of small texts.
    """
    names = engine.names
    texts = [
        f"optimizer {number}: {type(one).__name__} of {numbers_text(one)}"
        for number, one in enumerate(optimizers)
    ]
    texts += [
        f"{names[id(parameter)]} of optimizer {number}, {'with' if decays else 'without'} decay"
        for number, one in enumerate(optimizers)
        for parameter, decays in zip(one.params, one.decays, strict=True)
    ]
    problem = None
    for group in (engine.data, engine.tensor.group):
        if group is None:
            continue
        differs = difference(texts, group, _OPTIMIZERS)
        if differs is not None:
            problem = MismatchError(
                f"the ranks of group {group.name!r} must have the same optimizers, with the same "
                f"numbers and the same decay_mask, but they have\n{differs[1]}"
            )
    scope = engine.scope
    agree(scope, _OPTIMIZERS, problem=problem)


# -- states that all ranks take over, or none does ------------------------------------------------


_WHAT = "load_state_dict of the optimizer"


def agree_states(
    engine: TrainingEngine, lent: Sequence[LentOptimizer], state: Any
) -> tuple[list[State], int | None]:
    """Return states of whole parameters, if they fit on every rank and replicas have the same.

    Collective over the ranks that step together. With them comes the model's count of steps, if
    it is in the state.

    Args:
        engine: The model.
        lent: Its optimizers.
        state: A state or several, as users load them.

    Raises:
        MpimeshError: On every rank, if it is so on any.

    Cost:
        Three exchanges of small texts; with replicas, reading the state once.
    """
    problem: MpimeshError | None = None
    states: list[State] = []
    step: int | None = None
    try:
        nested, step = nested_states(state, len(lent))
        for one, own in zip(lent, nested, strict=True):
            by_name = isinstance(own, Mapping) and isinstance(own.get("params"), Mapping)
            states.append(_local_state(engine, one, own) if by_name else own)
            one.optimizer.check_state(states[-1], one.parameters)
    except MpimeshError as error:
        problem = error
    agree(engine.scope, _WHAT, problem=problem)
    replicas = engine.data
    texts = [f"step {step}", *_texts(engine, lent, states)] if replicas.size > 1 else []
    differs = difference(texts, replicas, _WHAT)
    if differs is not None:
        problem = MismatchError(
            f"the ranks of group {replicas.name!r} must load the same state, and nothing is "
            f"changed, as they have\n{differs[1]}"
        )
    agree(engine.scope, _WHAT, problem=problem)
    return states, step


def _texts(
    engine: TrainingEngine, lent: Sequence[LentOptimizer], states: Sequence[State]
) -> list[str]:
    """Return what replicas must have alike: the numbers, and digests of arrays."""
    names = engine.names
    texts: list[str] = []
    for number, (one, state) in enumerate(zip(lent, states, strict=True)):
        texts += [f"{key} {state[key]!r} of optimizer {number}" for key in one.optimizer.numbers]
        for parameter, own in zip(one.parameters, state["params"], strict=True):
            name = names[id(parameter)]
            texts.append(f"{int(own['steps'])} steps of {name}")
            texts += [
                f"{key} of {name} with values {digest(own[key])}"
                for key in sorted(own.keys() - {"steps"})
            ]
    return texts


_SCALER = "scaler."


# -- models ---------------------------------------------------------------------------------------


def model_parts(engine: TrainingEngine) -> dict[str, Parts | Value]:
    """Return what this rank has of a model's state, and the count of steps. Local.

    Buffers of replicas may differ: those of the first one are the model's.
    """
    spans = _spans_of_values(engine)
    found: dict[str, Parts | Value] = {STEP: engine.step}
    for name, parameter in engine.named_parameters():
        span, shard = spans.get(id(parameter), (FlatSpan.block(parameter), None))
        found[name] = span.parts(_values(parameter, span, shard))
    first = _buffers_to_give(engine)
    is_first = not engine.data.rank and not (engine.tensor.group and engine.tensor.group.rank)
    for name, buffer in engine.named_buffers():
        parts = Parts.all_of(buffer.value())
        found[name] = parts if is_first and name in first else replace(parts, parts=())
    return found


def _buffers_to_give(engine: TrainingEngine) -> dict[str, Buffer]:
    """Return this rank's buffers, but for those that an earlier rank has, too."""
    return {
        name: buffer
        for name, buffer, numbers in named_buffers(engine.stages)
        if engine.plans.placement[numbers[0]] == (engine.pipe.rank or 0)
    }


def first_buffers(engine: TrainingEngine) -> dict[str, HostArray]:
    """Return the buffers of the whole model, those of the first replica. Collective.

    Raises:
        ModuleError: On every rank, if one on any cannot be in a state.
        MismatchError: On every rank, if replicas of a stage have different ones.
    """
    given = _buffers_to_give(engine)
    what, mine = Call("buffers", engine.scope.name), [engine.place, [*given]]
    refused = next(filter(None, (one.problem() for one in given.values())), "")
    problem = ModuleError(refused) if refused else None
    rows = agree(engine.scope, what, mine, problem=problem)
    known: dict[int, list[str]] = {}
    for number, names in rows:
        if known.setdefault(number, names) != names:
            raise MismatchError(
                f"the replicas of one stage must have the same buffers, and have {names} and "
                f"{known[number]}: one that is None at first has to get its array everywhere"
            )
    found: dict[str, HostArray] = {}
    for name in dict.fromkeys(name for _, names in rows for name in names):
        part = to_numpy(given[name].value()) if name in given else None
        whole = engine.everywhere(part, f"buffer {name}")
        for group in (engine.data, engine.tensor.group):
            if group is not None and group.size > 1:
                whole = group.broadcast(whole, label=f"buffer {name}").resolve()
        found[name] = np.array(whole)
    return found


def model_target(
    engine: TrainingEngine, saved: Mapping[str, Saved | Value], *, strict: bool
) -> tuple[dict[str, Parts], Callable[[], None]]:
    """Return where a model's state is read to: into its memory, on all replicas. Local.

    The count of steps is taken over if it was saved.

    Raises:
        ModuleError: If names are missing or unknown, and `strict`; or the count is none.
        ShapeError: If a shape differs.
        DTypeError: If values are not of floating point.
        ModuleStateError: If there are values here of which this rank has only a part, as in
            ``model.gathered()``.
    """
    buffers = dict(engine.named_buffers(everywhere=True))
    known = {name for name, _ in engine.named_parameters(everywhere=True)} | buffers.keys()
    names = saved.keys() - {STEP}
    check_names(
        "the state of a model", known - names, names - known, strict=strict, buffers=buffers
    )
    step = as_int(saved[STEP], "step", ModuleError, least=0) if STEP in saved else None
    spans = _spans_of_values(engine)
    wanted: dict[str, Parts] = {}
    for name, parameter in engine.named_parameters():
        if name not in saved:
            continue
        span, shard = spans.get(id(parameter), (FlatSpan.block(parameter), None))
        if shard is not None and shard.values is None:
            shard.check_hidden()
        values = _values(parameter, span, shard)
        wanted[name] = parameter_target(name, parameter, saved[name], values, span)
    wanted |= buffer_targets(dict(engine.named_buffers()), saved)

    def take() -> None:
        if step is not None:
            engine.set_step(step)
        engine.first_values = True

    return wanted, take


def _spans_of_values(engine: TrainingEngine) -> dict[int, tuple[FlatSpan, BucketShard | None]]:
    """Return by its id which part of a parameter this rank writes, where it may not be all.

    With it comes the shard that has the values; None if other memory has.
    """
    lots: list[tuple[Sequence[Parameter], slice, BucketShard | None]] = [
        (shared.parameters, shared.part, None) for shared in engine.frozen_values
    ]
    shards = [bucket.shard for bucket in engine.buckets.buckets if bucket.shard is not None]
    lots += [(shard.parameters, shard.written, shard) for shard in shards]
    spans: dict[int, tuple[FlatSpan, BucketShard | None]] = {}
    for parameters, part, shard in lots:
        for one, place in flat_places(parameters):
            mine = inside(place, part)
            spans[id(one)] = FlatSpan(one.global_shape, one.box, mine.start, mine.stop), shard
    return spans


def _values(parameter: Parameter, span: FlatSpan, shard: BucketShard | None) -> Array:
    """Return the memory of this rank's part of a parameter."""
    if parameter.data is not None or shard is None:
        values = parameter.value()
        return values.reshape(-1)[span.start : span.stop] if span.is_flat else values
    before = shard.parameters[: shard.parameters.index(parameter)]
    start = max(0, sum(one.size for one in before) - shard.part.start)
    return shard.own[start : start + span.stop - span.start]


# -- optimizers -----------------------------------------------------------------------------------


def optimizers_parts(
    engine: TrainingEngine,
    lent: Sequence[LentOptimizer],
    states: Sequence[State],
    layouts: Layouts,
    *,
    single: bool,
    scaler: LossScaler | None,
) -> dict[str, Parts | Value]:
    """Return what this rank has of the state of a model's optimizers. Local.

    Args:
        engine: The model.
        lent: Its optimizers.
        states: Their states, of this rank's parts.
        layouts: How these lie.
        single: Whether there is one optimizer, not a list of them, whose names begin with numbers.
        scaler: The scaler of losses.
    """
    found: dict[str, Parts | Value] = {STEP: engine.step}
    if scaler is not None:
        found |= {f"{_SCALER}{key}": value for key, value in scaler.state_dict().items()}
    every = _names_of(lent, STORED, single=single)
    for names, each, state in zip(every, lent, states, strict=True):
        own = state_parts(state, _spans_of_state(engine, each, layouts))
        found |= {names.prefix + key: value for key, value in own.items()}
    return found


def optimizers_target(
    engine: TrainingEngine,
    lent: Sequence[LentOptimizer],
    states: Sequence[State],
    layouts: Layouts,
    saved: Mapping[str, Saved | Value],
    *,
    strict: bool,
) -> tuple[dict[str, Parts], list[State], dict[str, Any]]:
    """Return where states are read to: into new memory, of this rank's parts. Local.

    Args:
        engine: The model.
        lent: Its optimizers.
        states: Their states now, of this rank's parts.
        layouts: How these lie, and the new ones, too.
        saved: What there is, by name: of one optimizer or of several.
        strict: Whether names that are missing or unknown are refused.

    Returns:
        Where to read, by name; the states with that memory; and of the state of the scaler what
        there is.

    Raises:
        MpimeshError: If what is saved does not fit.
    """
    prefixes = [names.prefix for names in STORED.found_in(saved)]
    if len(prefixes) != len(lent):
        raise ModuleError(f"the state is of {len(prefixes)} optimizers, and there are {len(lent)}")
    scaling = {f"{_SCALER}{key}" for key in LossScaler().state_dict()} & saved.keys()
    rest = saved.keys() - {STEP} - scaling
    known = {name for name, _ in engine.named_parameters(everywhere=True)}
    wanted: dict[str, Parts] = {}
    found: list[State] = []
    unknown = {key for key in rest if not key.startswith(tuple(prefixes))}
    for prefix, each, state in zip(prefixes, lent, states, strict=True):
        own = {key.removeprefix(prefix): saved[key] for key in rest if key.startswith(prefix)}
        spans = _spans_of_state(engine, each, layouts)
        mine = {name for name, _, _ in spans}
        names = known - ({*engine.names.values()} - mine)
        numbers = {OPTIMIZER, *each.optimizer.numbers}
        unknown |= {
            f"{prefix}{key}" for key in own.keys() - numbers if STORED.split(key)[0] not in names
        }
        new, arrays = state_target(
            each.optimizer, spans, own, strict=strict, current=state, xp=engine.xp
        )
        found.append(new)
        wanted |= {f"{prefix}{key}": parts for key, parts in arrays.items()}
    check_names("the state of an optimizer", (), unknown, strict=strict)
    return wanted, found, {key.removeprefix(_SCALER): saved[key] for key in scaling}


def _spans_of_state(
    engine: TrainingEngine, lent: LentOptimizer, layouts: Layouts
) -> list[tuple[str, Parameter, FlatSpan]]:
    """Return the name of each parameter, and the part of its state that this rank has."""
    names = engine.names
    spans = []
    for one in lent.parameters:
        span = FlatSpan.block(one)
        if id(one) in layouts:
            group, layout = layouts[id(one)]
            ((start, stop),) = layout.box((one.size,), group.rank or 0)
            span = FlatSpan(one.global_shape, one.box, start, stop)
        spans.append((names[id(one)], one, span))
    return spans

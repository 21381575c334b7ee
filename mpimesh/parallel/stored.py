"""A rank's parts of a model and of the state of its optimizers, for checkpoints.

All names are those of the whole model. Nothing is gathered, to save or to load: where replicas
divide a bucket each has its span of the parameters in it, and where the ranks of a node see values
in one memory, each has those that it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mpimesh.arguments import as_int
from mpimesh.arrays import Array
from mpimesh.errors import ModuleError
from mpimesh.nn import Parameter
from mpimesh.optim import LossScaler
from mpimesh.parallel.engine import Engine
from mpimesh.parallel.gradients.bucket import Shard
from mpimesh.parallel.gradients.pieces import Layouts, LentOptimizer, State
from mpimesh.store.modules import (
    OPTIMIZER,
    STEP,
    Span,
    check_names,
    parameter_target,
    state_parts,
    state_target,
)
from mpimesh.store.parts import Parts, Saved, Value

__all__ = ["model_parts", "model_target", "optimizers_parts", "optimizers_target"]

_SCALER = "scaler."


# -- models ---------------------------------------------------------------------------------------


def model_parts(engine: Engine) -> dict[str, Parts | Value]:
    """Return what this rank has of a model's parameters, and the count of steps. Local."""
    spans = _spans_of_values(engine)
    found: dict[str, Parts | Value] = {STEP: engine.step}
    for name, parameter in engine.named_parameters():
        span, shard = spans.get(id(parameter), (Span.block(parameter), None))
        found[name] = span.parts(_values(parameter, span, shard))
    return found


def model_target(
    engine: Engine, saved: Mapping[str, Saved | Value], *, strict: bool
) -> tuple[dict[str, Parts], Callable[[], None]]:
    """Return where a model's parameters are read to: into their memory. Local.

    The count of steps is taken over if it was saved.

    Raises:
        ModuleError: If names are missing or unknown, and `strict`; or the count is none.
        ShapeError: If a shape differs.
        DTypeError: If values are not of floating point.
        ModuleStateError: If somebody has values here of which this rank keeps only a part, as in
            ``model.gathered()``.
    """
    known = dict(engine.named_parameters(everywhere=True))
    names = saved.keys() - {STEP}
    check_names("the state of a model", known.keys() - names, names - known.keys(), strict=strict)
    step = as_int(saved[STEP], "step", ModuleError, least=0) if STEP in saved else None
    spans = _spans_of_values(engine)
    wanted: dict[str, Parts] = {}
    for name, parameter in engine.named_parameters():
        if name not in saved:
            continue
        span, shard = spans.get(id(parameter), (Span.block(parameter), None))
        if shard is not None and shard.values is None:
            shard.check_hidden()
        values = _values(parameter, span, shard)
        wanted[name] = parameter_target(name, parameter, saved[name], values, span)

    def take() -> None:
        if step is not None:
            engine.set_step(step)
        engine.first_values = True

    return wanted, take


def _spans_of_values(engine: Engine) -> dict[int, tuple[Span, Shard | None]]:
    """Return by its id which part of a parameter this rank writes, where it may not be all.

    With it comes the shard that has the values; None if other memory has.
    """
    lots: list[tuple[Sequence[Parameter], slice, Shard | None]] = [
        (shared.parameters, shared.part, None) for shared in engine.frozen_values
    ]
    shards = [bucket.shard for bucket in engine.buckets.buckets if bucket.shard is not None]
    lots += [(shard.parameters, shard.written, shard) for shard in shards]
    spans: dict[int, tuple[Span, Shard | None]] = {}
    for parameters, part, shard in lots:
        end = 0
        for one in parameters:
            begin, end = end, end + one.size
            start, stop = (min(max(edge, begin), end) - begin for edge in (part.start, part.stop))
            spans[id(one)] = Span(one.global_shape, one.box, start, stop), shard
    return spans


def _values(parameter: Parameter, span: Span, shard: Shard | None) -> Array:
    """Return the memory of this rank's part of a parameter."""
    if parameter.data is not None or shard is None:
        values = parameter.value()
        return values.reshape(-1)[span.start : span.stop] if span.is_flat else values
    before = shard.parameters[: shard.parameters.index(parameter)]
    start = max(0, sum(one.size for one in before) - shard.part.start)
    return shard.own[start : start + span.stop - span.start]


# -- optimizers -----------------------------------------------------------------------------------


def optimizers_parts(
    engine: Engine,
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
    for number, (each, state) in enumerate(zip(lent, states, strict=True)):
        prefix = "" if single else f"{number}."
        own = state_parts(state, _spans_of_state(engine, each, layouts))
        found |= {f"{prefix}{key}": value for key, value in own.items()}
    return found


def optimizers_target(
    engine: Engine,
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
    prefixes = [*_prefixes(saved)] or [""]
    if len(prefixes) != len(lent):
        raise ModuleError(f"the state is of {len(prefixes)} optimizers, and there are {len(lent)}")
    scaling = {f"{_SCALER}{key}" for key in LossScaler().state_dict()} & saved.keys()
    rest = saved.keys() - {STEP} - scaling
    known = {name for name, _ in engine.named_parameters(everywhere=True)}
    here = {id(parameter): name for name, parameter in engine.named_parameters()}
    wanted: dict[str, Parts] = {}
    found: list[State] = []
    unknown = {key for key in rest if not key.startswith(tuple(prefixes))}
    for prefix, each, state in zip(prefixes, lent, states, strict=True):
        own = {key.removeprefix(prefix): saved[key] for key in rest if key.startswith(prefix)}
        spans = _spans_of_state(engine, each, layouts)
        mine = {name for name, _, _ in spans}
        names = known - ({*here.values()} - mine)
        numbers = {OPTIMIZER, *each.optimizer.numbers}
        unknown |= {
            f"{prefix}{key}" for key in own.keys() - numbers if key.rpartition(".")[0] not in names
        }
        new, arrays = state_target(
            each.optimizer, spans, own, strict=strict, current=state, xp=engine.xp
        )
        found.append(new)
        wanted |= {f"{prefix}{key}": parts for key, parts in arrays.items()}
    check_names("the state of an optimizer", (), unknown, strict=strict)
    return wanted, found, {key.removeprefix(_SCALER): saved[key] for key in scaling}


def _prefixes(saved: Mapping[str, object]) -> Iterator[str]:
    """Yield how the names of each optimizer begin, where there are several."""
    number = 0
    while f"{number}.{OPTIMIZER}" in saved:
        yield f"{number}."
        number += 1


def _spans_of_state(
    engine: Engine, lent: LentOptimizer, layouts: Layouts
) -> list[tuple[str, Parameter, Span]]:
    """Return the name of each parameter, and the part of its state that this rank has."""
    names = {id(parameter): name for name, parameter in engine.named_parameters()}
    spans = []
    for one in lent.parameters:
        span = Span.block(one)
        if id(one) in layouts:
            group, layout = layouts[id(one)]
            ((start, stop),) = layout.box((one.size,), group.rank or 0)
            span = Span(one.global_shape, one.box, start, stop)
        spans.append((names[id(one)], one, span))
    return spans

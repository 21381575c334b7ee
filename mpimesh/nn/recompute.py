"""The state that a layer's forward may change, as it was before: for a forward that runs again.

A forward may count batches, keep statistics, or draw from a generator of its own. Where it runs
again for its backward, it is to see all this as the first time, and leave no trace.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np

from mpimesh.arrays.namespace import is_cupy
from mpimesh.nn.module import Module
from mpimesh.nn.protocol import is_layer

__all__ = ["Holder", "State", "state_before", "with_state"]

Holder: TypeAlias = tuple[dict[str, Any], Collection[str]]
"""A dict of attributes, and the names in it that are no state."""

State: TypeAlias = list[tuple[Holder, dict[str, Any]]]
"""Copies of what changes, by holder and name."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic)
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)


def state_before(layer: object) -> State:
    """Return copies of numbers, arrays that can be written, generators, and containers of these."""
    memo: dict[int, Any] = {}
    return [
        (
            holder,
            {
                name: _copied(value, memo)
                for name, value in holder[0].items()
                if name not in holder[1] and _is_state(value)
            },
        )
        for holder in _holders(layer, set())
    ]


@contextmanager
def with_state(state: State) -> Iterator[None]:
    """Have copies of `state` in its layers, and afterwards what is there now."""
    now = [dict(holder) for (holder, _), _ in state]
    memo: dict[int, Any] = {}
    try:
        for (holder, skipped), before in state:
            for name in [name for name in holder if name not in skipped]:
                if name not in before and _is_state(holder[name]):
                    del holder[name]
            holder.update((name, _copied(value, memo)) for name, value in before.items())
        yield
    finally:
        for ((holder, _), _), values in zip(state, now, strict=True):
            holder.clear()
            holder.update(values)


def _holders(layer: object, seen: set[int]) -> Iterator[Holder]:
    if id(layer) in seen:
        return
    seen.add(id(layer))
    own = getattr(layer, "state_holders", None)
    if own is not None:
        yield from own()
        return
    attributes = getattr(layer, "__dict__", {})
    yield attributes, ()
    children = (
        [child for _, child in layer.named_children()]
        if isinstance(layer, Module)
        else [value for value in attributes.values() if is_layer(value)]
    )
    for child in children:
        yield from _holders(child, seen)


def _is_state(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.flags.writeable and not value.dtype.hasobject
    kinds = (*_PLAIN, *_GENERATORS, list, tuple, dict, set, deque)
    return isinstance(value, kinds) or is_cupy(value) or _is_torch(value)


def _is_torch(value: Any) -> bool:
    """Tell whether it is a tensor that is no parameter, or a generator, of PyTorch."""
    torch = sys.modules.get("torch")
    if torch is None or isinstance(value, torch.nn.Parameter):
        return False
    return isinstance(value, torch.Tensor | torch.Generator)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of state; other things in containers stay as they are."""
    if isinstance(value, _PLAIN) or not _is_state(value):
        return value
    if id(value) not in memo:
        # With the value itself, so that its id stays its own.
        memo[id(value)] = value, _copy(value, memo)
    return memo[id(value)][1]


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, _GENERATORS):
        return copy.deepcopy(value)
    if isinstance(value, dict):
        made = copy.copy(value)
        made.update((key, _copied(entry, memo)) for key, entry in value.items())
        return made
    if type(value) in (list, tuple, deque):
        entries = [_copied(entry, memo) for entry in value]
        return deque(entries, value.maxlen) if type(value) is deque else type(value)(entries)
    if isinstance(value, list | tuple | deque | set):
        return copy.copy(value)
    if not _is_torch(value):
        return value.copy()
    if not hasattr(value, "get_state"):
        # What autograd has made is put there anew by each forward.
        return value if value.requires_grad else value.clone()
    made = type(value)(device=value.device)
    made.set_state(value.get_state())
    return made

"""Trees of what is saved: taken apart into arrays and values by name, and put together again.

A tree is a dict, a list or a tuple of trees, or one of these leaves:

- an array: of NumPy, CuPy or PyTorch, a :class:`~mpimesh.DTensor`, a :class:`DVariable`;
- a value: what JSON can say, and NumPy's numbers, complex numbers, bytes and tuples;
- an object with a state: a model or an optimizer that is stored by its parts, a layer, a plain
  optimizer, a generator of random numbers, a PyTorch module or optimizer, or anything else that has
  `state_dict` and `load_state_dict`.

The name of a leaf is its path, ``model.0.weight``. A list or a tuple without arrays and objects is
one value, such as a list of all losses.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from mpimesh.arguments import shown
from mpimesh.arrays import Array, refuse_objects
from mpimesh.dtensor import DTensor, DVariable
from mpimesh.errors import DamagedError, MpimeshError, ShapeError, StoreError
from mpimesh.layout.boxes import whole
from mpimesh.nn import Module
from mpimesh.optim import Optimizer
from mpimesh.runtime import DeviceMesh
from mpimesh.store.modules import (
    Wanted,
    has_names,
    module_parts,
    optimizer_parts,
    restored_module,
    restored_optimizer,
    restored_torch_optimizer,
    take_torch_state,
    torch_optimizer_parts,
    torch_state,
)
from mpimesh.store.parts import Parts, Saved, Value, from_json, to_json

__all__ = ["Flat", "Into", "flatten", "in_order", "leaf_names", "mesh_of", "rebuilt", "take_apart"]

ARRAY, VALUE, OBJECT = "array", "value", "object"
"""Leaves of a structure. An object's arrays and values have names that begin with its own."""

Structure: TypeAlias = Any
"""JSON: a leaf, or ``{"dict": [[key, structure], ...]}``, ``{"list": [...]}``, ``{"tuple": [...]}``
or ``{"state": structure}`` of an object's `state_dict`."""

_MOST_DEPTH = 60


@dataclass(slots=True)
class Flat:
    """A tree taken apart.

    Attributes:
        structure: How it is built.
        arrays: What this rank has of each array, by name.
        values: The values by name, as JSON can say them.
        copies: The names of arrays that every rank has whole, with the same values.
    """

    structure: Structure = None
    arrays: dict[str, Parts] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    copies: list[str] = field(default_factory=list)

    def add(self, name: str, leaf: Parts | Value) -> None:
        """Add an array or a value.

        Raises:
            StoreError: If the name is taken.
        """
        if name in self.arrays or name in self.values:
            raise StoreError(
                f"two leaves of the tree have the name {name!r}, which is made of the keys on "
                "the way to each; rename a key"
            )
        if isinstance(leaf, Parts):
            self.arrays[name] = leaf
        else:
            self.values[name] = leaf


def join(prefix: str, key: object) -> str:
    """Return the name of what stands at `key` of `prefix`."""
    return f"{prefix}.{key}" if prefix else str(key)


# -- values ---------------------------------------------------------------------------------------


_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic)


def is_value(tree: Any) -> bool:
    """Tell whether a tree is one value, and no dict whose entries have names of their own."""
    if isinstance(tree, dict) and tree and all(type(key) is str for key in tree):
        return False
    return all(isinstance(leaf, _PLAIN) for leaf in _leaves(tree))


# -- objects --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ByName:
    """An object whose arrays and values are stored by names; see `Storable`."""

    parts: Callable[[], Mapping[str, Parts | Value]]
    restored: Callable[..., Wanted]


def _by_name(tree: Any, names: Mapping[int, str]) -> _ByName | None:
    """Return how an object is stored by names; None if it is not. `names` are of parameters."""
    if is_stored(tree):
        return _ByName(tree._stored_parts, tree._restored_parts)
    if isinstance(tree, Module):
        return _ByName(partial(module_parts, tree), partial(restored_module, tree))
    if isinstance(tree, Optimizer):
        return _ByName(
            partial(optimizer_parts, tree, names), partial(restored_optimizer, tree, names)
        )
    if is_torch(tree) and hasattr(tree, "param_groups") and has_names(tree, names):
        return _ByName(
            partial(torch_optimizer_parts, tree, names),
            partial(restored_torch_optimizer, tree, names),
        )
    return None


@dataclass(frozen=True, slots=True)
class _ByState:
    """An object that says its state as a tree, and takes one over."""

    state: Callable[[], Any]
    take: Callable[[Any], object]


def _by_state(tree: Any) -> _ByState | None:
    """Return how an object says its state; None if it does not."""
    if is_torch(tree):
        return _ByState(partial(torch_state, tree), partial(take_torch_state, tree))
    if isinstance(tree, np.random.Generator):
        kind = tree.bit_generator
        return _ByState(lambda: kind.state, lambda state: setattr(kind, "state", state))
    if isinstance(tree, np.random.RandomState):
        return _ByState(partial(tree.get_state, legacy=False), tree.set_state)
    methods = [getattr(type(tree), name, None) for name in ("state_dict", "load_state_dict")]
    return _ByState(tree.state_dict, tree.load_state_dict) if all(map(callable, methods)) else None


def is_stored(tree: Any) -> bool:
    """Tell whether an object is stored by its parts."""
    return hasattr(type(tree), "_stored_parts")


def is_torch(tree: Any) -> bool:
    """Tell whether an object is a module or an optimizer of PyTorch, which somebody imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tree, torch.nn.Module | torch.optim.Optimizer)


def _torch_tensor(tree: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tree, torch.Tensor)


def is_dict(tree: Any) -> bool:
    """Tell whether a tree is a dict, such as an ordered one, and no object that says its state."""
    return isinstance(tree, dict) and not (is_stored(tree) or hasattr(tree, "load_state_dict"))


def is_array(tree: Any) -> bool:
    """Tell whether a leaf is an array of any library."""
    return (
        isinstance(tree, np.ndarray | DTensor | DVariable)
        or _torch_tensor(tree)
        or (hasattr(tree, "__cuda_array_interface__") and hasattr(tree, "dtype"))
    )


def parts_of(array: Any, name: str) -> Parts:
    """Return what this rank has of an array, as live memory.

    Raises:
        StoreError: If it has no values to save.
    """
    if isinstance(array, DVariable):
        array = array.value_to_save() if array.save_as_bf16 else array.value()
    if isinstance(array, DTensor):
        if array.layout.partial_op:
            raise StoreError(
                f"{name} lies as summands ({array.layout.text}), which are no values yet: "
                'redistribute it first, as in x.redistribute("dp=R")'
            )
        box = array.layout.box(array.shape, array.mesh.rank) if array.is_member else None
        parts = () if box is None else ((box, array.local),)
        return Parts(array.shape, array.dtype, parts, getattr(array, "_origin", None))
    if _torch_tensor(array):
        array = torch_state(array)
    if isinstance(array, np.ma.MaskedArray):
        raise StoreError(f"{name} is a masked array: save its data and its mask, as two arrays")
    if isinstance(array, np.ndarray):
        array = np.asarray(array)
    refuse_objects(array.dtype)
    return Parts(array.shape, array.dtype, ((whole(array.shape), array),))


def _leaves(tree: Any, depth: int = 0) -> Iterator[Any]:
    """Yield what is in a tree and is no dict, list or tuple.

    Raises:
        StoreError: If it has no end.
    """
    if depth > _MOST_DEPTH:
        raise StoreError(f"a tree may be {_MOST_DEPTH} deep; this one is deeper, or is in itself")
    if isinstance(tree, dict | list | tuple):
        for entry in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(entry, depth + 1)
    else:
        yield tree


def names_in(tree: Any) -> dict[int, str]:
    """Return by its id the name of each parameter in the models and layers of a tree.

    The tensor of a parameter of PyTorch has the same name.
    """
    return {
        id(one): name
        for leaf in _leaves(tree)
        if isinstance(leaf, Module) or (is_stored(leaf) and hasattr(leaf, "named_parameters"))
        for name, parameter in leaf.named_parameters()
        for one in (parameter, getattr(parameter, "tensor", parameter))
    }


def mesh_of(tree: Any) -> DeviceMesh | None:
    """Return the mesh of what is in a tree; None if nothing has one.

    Raises:
        StoreError: If there are several, on different ranks.
    """
    meshes = [getattr(leaf, "mesh", None) for leaf in _leaves(tree)]
    found = [mesh for mesh in meshes if isinstance(mesh, DeviceMesh)]
    if len({mesh.mesh.ids.tobytes() for mesh in found}) > 1:
        raise StoreError(
            "the tree has arrays on meshes of different ranks: say which ranks save it together, "
            "by mesh="
        )
    return found[0] if found else None


# -- taking apart ---------------------------------------------------------------------------------


def flatten(tree: Any) -> Flat:
    """Take a tree apart. Local.

    Raises:
        StoreError: If it has a leaf that cannot be saved, or two of one name.
    """
    flat = Flat()
    flat.structure = _flatten(tree, "", flat, names_in(tree))
    return flat


def _flatten(tree: Any, name: str, flat: Flat, names: Mapping[int, str]) -> Structure:
    if is_array(tree):
        flat.add(name or ARRAY, parts_of(tree, name or "the array"))
        if not isinstance(tree, DTensor | DVariable):
            flat.copies.append(name or ARRAY)
        return ARRAY
    if is_value(tree):
        flat.add(name or VALUE, to_json(tree, name))
        return VALUE
    if is_dict(tree):
        _check_keys(tree, name)
        return {
            "dict": [
                [to_json(key, name), _flatten(entry, join(name, key), flat, names)]
                for key, entry in tree.items()
            ]
        }
    if type(tree) in (list, tuple):
        return {
            type(tree).__name__: [
                _flatten(entry, join(name, place), flat, names) for place, entry in enumerate(tree)
            ]
        }
    by_name = _by_name(tree, names)
    if by_name is not None:
        for key, leaf in by_name.parts().items():
            full = join(name, key)
            flat.add(full, leaf if isinstance(leaf, Parts) else to_json(leaf, full))
            if isinstance(tree, Module) and isinstance(leaf, Parts):
                flat.copies.append(full)
        return OBJECT
    by_state = _by_state(tree)
    if by_state is None:
        return to_json(tree, name)  # which refuses it
    return {"state": _flatten(by_state.state(), name, flat, names)}


def _check_keys(tree: Mapping[Any, Any], name: str) -> None:
    """Refuse a key that reads as a name inside of what stands at another key.

    Raises:
        StoreError: If there is one.
    """
    dotted = [str(key) for key in tree if "." in str(key)]
    inside: dict[str, str] = {}
    for text in dotted:
        for place, letter in enumerate(text):
            if letter == ".":
                inside.setdefault(text[:place], text)
    for key, entry in tree.items() if dotted else ():
        if str(key) in inside and not is_array(entry) and not is_value(entry):
            raise StoreError(
                f"{join(name, inside[str(key)])} reads as a part of {join(name, key)}, which is a "
                f"{type(entry).__name__}: rename a key"
            )


# -- putting together -----------------------------------------------------------------------------


@dataclass(slots=True)
class Into:
    """Memory for the arrays of a checkpoint, and actions for when all are read.

    Attributes:
        arrays: The memory by name.
        finish: Called in order, on all ranks, once all arrays are read on all of them.
        result: Makes the tree that is returned, after that.
    """

    arrays: dict[str, Parts] = field(default_factory=dict)
    finish: list[Callable[[], object]] = field(default_factory=list)
    result: Callable[[], Any] = lambda: None


@dataclass(frozen=True, slots=True)
class Source:
    """The contents of a checkpoint, by the names that the tree has.

    Attributes:
        path: Its name, for messages.
        structure: How the saved tree is built; None where nobody has said.
        arrays: The arrays.
        values: The values.
        strict: Whether names that are missing are refused.
        chosen: Tells whether something of a name is to be loaded.
        entries: Those of structures that were looked at, by their ids.
    """

    path: str
    structure: Structure
    arrays: Mapping[str, Saved]
    values: Mapping[str, Value]
    strict: bool
    chosen: Callable[[str], bool]
    entries: dict[int, dict[str, tuple[Any, Structure]]] = field(default_factory=dict)

    def under(self, name: str) -> dict[str, Saved | Value]:
        """Return what has a name that begins with `name`, by the rest of the name."""
        prefix = f"{name}." if name else ""
        found = {**self.arrays, **self.values}
        return {
            key.removeprefix(prefix): entry if isinstance(entry, Saved) else from_json(entry)
            for key, entry in found.items()
            if key.startswith(prefix) and self.chosen(key)
        }

    def at(self, name: str) -> Structure:
        """Return the structure of what stands at `name`; None if there is none."""
        found, rest = self.structure, name
        while rest:
            key = rest
            while key not in self._entries(found):
                key, dot, _ = key.rpartition(".")
                if not dot:
                    return None
            found, rest = self._entries(found)[key][1], rest[len(key) + 1 :]
        return found

    def _entries(self, structure: Structure) -> dict[str, tuple[Any, Structure]]:
        """Return the entries of a structure, from the second time on at once."""
        known = self.entries.get(id(structure))
        if known is None:
            known = self.entries[id(structure)] = _entries(structure)
        return known

    def flat_at(self, name: str, *, dots: bool) -> Structure:
        """Return as one dict what stands at `name` where nothing says how it hangs together.

        So it is with files of other makers, and with other names than those that were saved.

        Args:
            name: The name.
            dots: Whether keys may have dots; else None is returned for them.
        """
        start = f"{name}."
        below = [
            [key.removeprefix(start), entry]
            for key, (_, entry) in self._entries(self.structure).items()
            if key.startswith(start)
        ]
        if not below or not (dots or all("." not in key for key, _ in below)):
            return None
        return {"dict": below}

    def missing(self, name: str) -> StoreError:
        """Return the error for a name that is not there, or is of another kind."""
        if name in self.arrays:
            saved = self.arrays[name]
            return StoreError(
                f"{name} of {self.path} is an array of shape {saved.shape} and {saved.dtype}, and "
                "the tree has a value there"
            )
        if name in self.values:
            found = shown(from_json(self.values[name]))
            return StoreError(f"{name} of {self.path} is {found}, and the tree has an array there")
        near = sorted({*self.arrays, *self.values})
        listed = ", ".join(near[:8]) + (f" and {len(near) - 8} more" if len(near) > 8 else "")
        return StoreError(
            f"{self.path} has nothing of the name {name!r}; it has {listed or 'nothing'}: take "
            "this out of the tree, give rename=, or strict=False to leave it as it is"
        )


def _entries(structure: Structure) -> dict[str, tuple[Any, Structure]]:
    """Return the entries of a dict, list, tuple or state by their names."""
    if not isinstance(structure, dict) or len(structure) != 1:
        return {}
    kind, inner = next(iter(structure.items()))
    if kind == "state":
        return _entries(inner)
    try:
        if kind == "dict":
            return {str(from_json(key)): (from_json(key), entry) for key, entry in inner}
        if kind in ("list", "tuple"):
            return {str(place): (place, entry) for place, entry in enumerate(inner)}
    except (TypeError, ValueError):
        pass
    raise DamagedError(f"the structure of the checkpoint is damaged at {shown(structure)}")


def in_order(structure: Structure) -> Structure:
    """Return a structure with the entries of dicts in the order of their keys."""
    if isinstance(structure, list):
        return [in_order(one) for one in structure]
    if not isinstance(structure, dict):
        return structure
    return {
        kind: sorted(([key, in_order(one)] for key, one in inner), key=lambda row: str(row[0]))
        if kind == "dict"
        else in_order(inner)
        for kind, inner in structure.items()
    }


def leaf_names(structure: Structure, name: str = "") -> Iterator[str]:
    """Yield the names of the leaves of a tree that is built so, and of empty parts."""
    entries = _entries(structure)
    if not entries:
        yield name or "its root"
    for key, (_, entry) in entries.items():
        yield from leaf_names(entry, join(name, key))


def take_apart(tree: Any, source: Source) -> Into:
    """Return where what is saved goes in a tree. Local; nothing has changed yet.

    Raises:
        StoreError: If something is missing that the tree has.
        MpimeshError: If what is saved does not fit.
    """
    into = Into()
    into.result = _take(tree, "", source, into, names_in(tree))
    return into


def _take(
    tree: Any, name: str, source: Source, into: Into, names: Mapping[int, str]
) -> Callable[[], Any]:
    if is_array(tree):
        return _take_array(tree, name or ARRAY, source, into)
    if is_value(tree):
        return _take_value(tree, name, source, into)
    if is_dict(tree):
        made = {
            key: _take(entry, join(name, key), source, into, names) for key, entry in tree.items()
        }
        return lambda: _like(tree, {key: make() for key, make in made.items()})
    if type(tree) in (list, tuple):
        row = [
            _take(entry, join(name, place), source, into, names) for place, entry in enumerate(tree)
        ]
        return lambda: type(tree)(make() for make in row)
    by_name = _by_name(tree, names)
    if by_name is not None:
        _take_object(by_name, name or type(tree).__name__, name, source, into)
    else:
        by_state = _by_state(tree)
        if by_state is None:
            to_json(tree, name)  # which refuses it
        else:
            _take_state(by_state, tree, name, source, into)
    return lambda: tree


def _like(tree: dict[Any, Any], entries: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dict of the kind of a tree with other entries."""
    made = {} if type(tree) is dict else copy.copy(tree)  # with PyTorch's versions, which it has
    made.update(entries)
    return made


def _take_value(tree: Any, name: str, source: Source, into: Into) -> Callable[[], Any]:
    key = name or VALUE
    if not source.chosen(key):
        return lambda: tree
    if key in source.values:
        value = from_json(source.values[key])
        return lambda: value
    structure = source.at(name)
    if structure is not None and structure != ARRAY:
        if tree is None or isinstance(tree, dict | list | tuple):
            return rebuilt(source, into, name, structure)
        if source.strict:
            raise StoreError(
                f"{name or 'the tree'} of {source.path} has parts, and {shown(tree)} stands for "
                "them: give None, [] or {} there to get all, or only= for some"
            )
    elif source.strict:
        raise source.missing(key)
    return lambda: tree


def _take_array(tree: Any, name: str, source: Source, into: Into) -> Callable[[], Any]:
    if not source.chosen(name):
        return lambda: tree
    saved = source.arrays.get(name)
    if saved is None:
        if source.strict:
            raise source.missing(name)
        return lambda: tree
    if isinstance(tree, DVariable):
        value = tree.value().copy()
        into.arrays[name] = _fitting(parts_of(value, name), saved, name)
        into.finish.append(partial(tree.assign, value))
        return lambda: tree
    target = _fitting(parts_of(tree, name), saved, name)
    for _, array in target.parts:
        if isinstance(array, np.ndarray) and not array.flags.writeable:
            raise StoreError(f"{name} is read-only, and is to be read into: give a copy of it")
    into.arrays[name] = target
    return lambda: tree


def _fitting(target: Parts, saved: Saved, name: str) -> Parts:
    if target.shape != saved.shape:
        raise ShapeError(f"{name} has shape {target.shape}, and was saved with {saved.shape}")
    return target


def _take_object(by_name: _ByName, what: str, name: str, source: Source, into: Into) -> None:
    saved = source.under(name)
    if not saved:
        if source.strict and source.chosen(name):
            raise source.missing(name)
        return
    prefix = f"{name}." if name else ""
    keys = (key for key in (*source.arrays, *source.values) if key.startswith(prefix))
    strict = source.strict and all(map(source.chosen, keys))  # else some are left out on purpose
    try:
        wanted, finish = by_name.restored(saved, strict=strict)
    except MpimeshError as error:
        hint = "; only= loads what fits" if isinstance(error, ShapeError) else ""
        raise type(error)(f"{what} of {source.path}: {error}{hint}") from None
    for key, parts in wanted.items():
        into.arrays[join(name, key)] = parts
    into.finish.append(finish)


def _take_state(by_state: _ByState, tree: Any, name: str, source: Source, into: Into) -> None:
    structure = source.at(name)
    if structure is None and isinstance(source.structure, dict) and "dict" in source.structure:
        # The keys of a module of PyTorch are names; of other states dots say that dicts are nested.
        is_module = is_torch(tree) and not hasattr(tree, "param_groups")
        structure = source.flat_at(name, dots=is_module)
    if structure is None:
        if source.strict and source.chosen(name):
            raise source.missing(name)
        return
    make = rebuilt(source, into, name, structure)
    if isinstance(tree, np.random.Generator | np.random.RandomState):
        expected, found = by_state.state()["bit_generator"], make()
        kind = found.get("bit_generator") if isinstance(found, dict) else None
        if kind != expected:
            raise StoreError(
                f"{name or 'the generator'} is of {expected}, and was saved as "
                f"{shown(kind)}: make it of the kind that was saved"
            )

    def finish() -> None:
        try:
            by_state.take(make())
        except (TypeError, ValueError, KeyError) as error:
            if isinstance(error, MpimeshError):
                raise
            raise StoreError(
                f"{name or 'the tree'} of {source.path} is no state of this "
                f"{type(tree).__name__}: {error}"
            ) from error

    into.finish.append(finish)


Making: TypeAlias = Callable[[str, Saved], tuple[Any, Parts]]
"""Makes an array, and returns it with its memory."""


def rebuilt(
    source: Source,
    into: Into,
    name: str = "",
    structure: Structure = None,
    new: Making | None = None,
) -> Callable[[], Any]:
    """Have a part of the saved tree read into new arrays; return what makes it then.

    Args:
        source: The checkpoint. What is not chosen is left out of dicts, and None in lists.
        into: Takes what is to be read.
        name: The name of the part.
        structure: How it is built. Objects become dicts by name.
        new: Makes an array; None makes one of NumPy.
    """
    return _rebuilt(source, into, name, structure, new or _numpy_array) or (lambda: None)


def _rebuilt(
    source: Source, into: Into, name: str, structure: Structure, new: Making
) -> Callable[[], Any] | None:
    """Do the same; None if nothing of it is chosen."""
    if structure in (ARRAY, VALUE):
        key = name or structure
        if not source.chosen(key):
            return None
        if structure == ARRAY and key in source.arrays:
            array, into.arrays[key] = new(key, source.arrays[key])
            return lambda: array
        if structure == VALUE and key in source.values:
            value = from_json(source.values[key])
            return lambda: value
        raise DamagedError(f"{source.path} lacks the {structure} {key!r}, which its tree has")
    if structure == OBJECT:
        found: dict[str, Any] = {}
        for key, entry in source.under(name).items():
            if isinstance(entry, Saved):
                full = join(name, key)
                found[key], into.arrays[full] = new(full, entry)
            else:
                found[key] = entry
        return (lambda: found) if found else None
    entries = _entries(structure)
    if isinstance(structure, dict) and "state" in structure:
        return _rebuilt(source, into, name, structure["state"], new)
    parts = {
        key: _rebuilt(source, into, join(name, text), entry, new)
        for text, (key, entry) in entries.items()
    }
    if parts and not any(parts.values()):
        return None
    row = [part or (lambda: None) for part in parts.values()]
    kind = next(iter(structure)) if isinstance(structure, dict) and len(structure) == 1 else ""
    if kind == "dict":
        return lambda: {key: part() for key, part in parts.items() if part is not None}
    if kind == "tuple":
        return lambda: tuple(part() for part in row)
    if kind == "list":
        return lambda: [part() for part in row]
    raise DamagedError(f"the structure of {source.path} is damaged at {name or 'its root'}")


def _numpy_array(name: str, saved: Saved) -> tuple[Array, Parts]:
    array = np.empty(saved.shape, saved.dtype)
    return array, Parts.all_of(array)

"""The exceptions of mpimesh: what went wrong, as a type that can be caught.

Every class derives from :class:`MpimeshError` and, beside it, from the built-in
exception that a caller would expect (`ValueError` for a wrong value, `KeyError`
for an unknown name, and so on), so that code which does not know mpimesh still
catches it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, Self, TypeVar

__all__ = [
    "ArrayValueError",
    "AxisError",
    "AxisTypeError",
    "BudgetError",
    "ClosedError",
    "CollectiveTimeoutError",
    "DTypeError",
    "DamagedError",
    "DeadlockError",
    "Elsewhere",
    "GroupError",
    "IndexOutOfRangeError",
    "LaunchError",
    "LayoutError",
    "MeshError",
    "MismatchError",
    "MissingPackageError",
    "ModuleError",
    "ModuleStateError",
    "MpimeshError",
    "NoRuleError",
    "OutOfMemoryError",
    "PeerLostError",
    "RankError",
    "ReduceOpError",
    "RemoteError",
    "ScheduleError",
    "SettingsError",
    "ShapeError",
    "SharedGpuWarning",
    "StageError",
    "StageShapeError",
    "StoreError",
    "TraceError",
    "TransportError",
    "UnknownNameError",
    "UnresolvedError",
    "UnresolvedWarning",
    "WorldSizeError",
    "on_all_ranks",
    "tell_elsewhere",
    "tell_missing",
]


class MpimeshError(Exception):
    """The base of all mpimesh exceptions.

    Attributes:
        agreed: True if the same error is raised on every rank of the group, so
            that one traceback is enough to show.
    """

    agreed: bool = False

    @classmethod
    def everywhere(cls, message: str) -> Self:
        """Return the error as one that every rank of the group raises alike."""
        return on_all_ranks(cls(message))


E = TypeVar("E", bound=MpimeshError)


def on_all_ranks(error: E) -> E:
    """Mark `error` as one that every rank of the group raises alike, and return it."""
    error.agreed = True
    return error


class SettingsError(MpimeshError, ValueError):
    """A ``MPIMESH_*`` environment variable holds a value that cannot be used."""


class MeshError(MpimeshError, ValueError):
    """A mesh, topology or device description breaks a rule."""


class UnknownNameError(MeshError, KeyError):
    """A name (of a mesh dim, a group, a schedule) that does not exist."""

    def __str__(self) -> str:
        # KeyError would print the repr of its argument.
        return str(self.args[0]) if self.args else ""


class WorldSizeError(MeshError):
    """The mesh needs another number of ranks than the world has."""


class LaunchError(MpimeshError, RuntimeError):
    """The MPI world is not the one that the launcher started."""


class GroupError(MpimeshError, ValueError):
    """A process group cannot be made or used as asked."""


class LayoutError(MpimeshError, ValueError):
    """Placements that break a rule, or that do not fit an array or a mesh."""


class NoRuleError(MpimeshError, TypeError):
    """A function that has no rule for split arrays, where gathering them is not allowed."""


class RankError(MpimeshError, ValueError):
    """A rank that is outside its group, or may not take part."""


class ShapeError(MpimeshError, ValueError):
    """An array has a shape, size or memory layout that the operation refuses."""


class ArrayValueError(MpimeshError, ValueError):
    """The values of an array were asked for with a number that breaks a rule."""


class AxisError(ShapeError, IndexError):
    """An axis that an array does not have, or that is no whole number.

    Of an axis that the array does not have it is a `numpy.exceptions.AxisError`, too.
    """


class AxisTypeError(AxisError, TypeError):
    """An axis that is no whole number."""


class IndexOutOfRangeError(MpimeshError, IndexError):
    """An index that an array does not have, or that is no index."""


class DTypeError(MpimeshError, TypeError):
    """An array has a dtype that the operation refuses."""


class ReduceOpError(MpimeshError, ValueError):
    """A reduction that does not exist, or not for this dtype."""


class MismatchError(MpimeshError, RuntimeError):
    """The ranks of a group called different collectives, or with different arguments.

    With ``MPIMESH_CHECKS`` on it is raised on every rank of the group, naming each rank's call;
    else on the ranks that share a node with one that differs, naming those of the node. Data may
    have moved then: results of that operation mean nothing. Each later collective of the group
    raises it again. The mesh can be closed and another one made; it keeps its MPI communicators,
    for messages may still be on their way in them.
    """


class ClosedError(MpimeshError, RuntimeError):
    """A mesh, group or handle was used after it was closed."""


class BudgetError(MpimeshError, RuntimeError):
    """An operation receives more than a budget has left; the message names it, and what was used.

    See :meth:`~mpimesh.DeviceMesh.budget`.
    """


class UnresolvedError(MpimeshError, RuntimeError):
    """A mesh was closed while results of collectives had not been resolved."""


class UnresolvedWarning(RuntimeWarning):
    """A :class:`~mpimesh.CollectiveTensor` was dropped before it was resolved.

    As a coroutine that nobody awaits, it is a RuntimeWarning, which Python shows by default.
    """


class SharedGpuWarning(RuntimeWarning):
    """Several ranks compute on the same GPU; the message says which, and what to do."""


class CollectiveTimeoutError(MpimeshError, TimeoutError):
    """An operation did not finish within its limit; the message names who is missing."""


class DeadlockError(MpimeshError, RuntimeError):
    """Ranks wait for each other in a circle; the message says who waits for what.

    Virtual ranks find it always, processes with ``MPIMESH_CHECKS`` on.
    """


class OutOfMemoryError(MpimeshError, MemoryError):
    """There is no memory for an array, or for the copy of one that is to be moved."""


class TransportError(MpimeshError, RuntimeError):
    """The library that moves the bytes reported a failure."""


class PeerLostError(TransportError):
    """A rank left the mesh or the job while another still waited for it.

    Attributes:
        exit_code: What the job should end with if nobody catches this.
    """

    exit_code: int = 1


class RemoteError(MpimeshError, RuntimeError):
    """Another rank failed; the message holds its rank and its traceback."""


class ScheduleError(MpimeshError, ValueError):
    """A pipeline schedule is incomplete, out of order, or would deadlock."""


class TraceError(MpimeshError, ValueError):
    """An event, a tracer or a picture of events was asked for with values that break a rule."""


class StageError(RemoteError):
    """A pipeline stage raised; the same error ends the step on every rank of the mesh.

    The message says which stage, rank and microbatch, and holds the traceback from the layer or
    loss on. On the rank that failed, `__context__` is the exception itself.
    """


class StageShapeError(StageError, ShapeError):
    """A StageError whose cause is an array that does not fit, such as one between two stages."""


class ModuleError(MpimeshError, ValueError):
    """A layer, loss or optimizer was given a value that it refuses."""


class StoreError(MpimeshError, OSError):
    """A checkpoint or an array in files cannot be written, read, or taken over as asked."""


class DamagedError(StoreError, ValueError):
    """A file is not what it should be: cut off, changed, or of another kind."""


class ModuleStateError(MpimeshError, RuntimeError):
    """A layer, loss or optimizer was used out of order, such as backward before forward."""


class MissingPackageError(MpimeshError, ImportError):
    """A part of mpimesh was asked for that needs a package which is not installed."""


# -- attributes of other libraries, which a class has not ------------------------------------------


class Elsewhere:
    """An attribute that a class has not, which it refuses with a word on where it is.

    It stands in the class: with a ``__getattr__`` Python finds every attribute slower.

    Args:
        name: The attribute.
        where: Where it is, for a person.
    """

    def __init__(self, name: str, where: str) -> None:
        self._name = name
        self._where = where

    def __get__(self, obj: object, owner: type[Any]) -> Self:
        if obj is None:
            return self
        raise AttributeError(
            f"{owner.__name__!r} object has no attribute {self._name!r}; {self._where}",
            name=self._name,
            obj=obj,
        )

    def __repr__(self) -> str:
        return f"<no attribute: {self._where}>"


def tell_elsewhere(owner: Any, where: Mapping[str, str]) -> None:
    """Have objects of a class refuse attributes with a word on where these are.

    ``hasattr`` is False for them, and ``dir`` leaves them out. A subclass may define them.

    Args:
        owner: The class.
        where: By the attribute where it is, for a person.
    """
    listed: Callable[[object], Iterable[str]] = owner.__dir__

    def names(self: object) -> list[str]:
        refused = (name for name in where if isinstance(getattr(type(self), name, None), Elsewhere))
        return sorted(set(listed(self)).difference(refused))

    for name, place in where.items():
        setattr(owner, name, Elsewhere(name, place))
    owner.__dir__ = names


def tell_missing(module: str, cure: Callable[[str], str]) -> None:
    """Have a module refuse a name that it has not with what stands for it.

    It is no ``def __getattr__`` in the module: type checkers would take every name then.

    Args:
        module: Its name.
        cure: Gives for a name what to write instead.
    """
    owner: Any = sys.modules[module]

    def refuse(name: str) -> NoReturn:
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}; {cure(name)}", name=name, obj=owner
        )

    owner.__getattr__ = refuse

"""Wrong arguments of every public callable: an error of mpimesh that names them, on all ranks."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
import mpimesh.dtensor as dtensor
from mpimesh import parallel, store
from mpimesh.errors import DeadlockError, MpimeshError
from tests.helpers import warned
from tests.helpers.depth import is_deep
from tests.helpers.public_calls import CALLS, LOCAL, Call, Place
from tests.helpers.wrong_values import Thing, wrong_values

Case = tuple[str, str]
"""A parameter, and the name of what is given for it."""

QUESTIONS = {
    "Mesh.contains_dim",
    "Mesh.contains_rank",
    "DeviceMesh.contains_dim",
    "DeviceMesh.contains_rank",
    "DeviceMesh.get_group",
    "DeviceMesh.group_rank",
    "DeviceMesh.in_group",
}
"""Those that answer no to what they do not know."""

TAKEN = {
    ("DeviceMesh.barrier", "name"),
    ("mm.shift", "fill"),  # not looked at where the ends are joined
}
"""Arguments for which an object() does; and so it does as any label."""

PEERS = {
    "ProcessGroup.send",
    "ProcessGroup.send_init",
    "ProcessGroup.recv",
    "ProcessGroup.recv_init",
    "DeviceMesh.set_rank",
}
"""Those for which one value means another rank on each."""

OF_THE_ROOT = {
    ("ProcessGroup.gather", "out"),
    ("ProcessGroup.gather_init", "out"),
    ("ProcessGroup.reduce", "out"),
    ("ProcessGroup.reduce_init", "out"),
    ("ProcessGroup.scatter", "x"),
    ("kapsl.gather", "local"),  # is compared with the output
    ("kapsl.gather", "output"),
    ("kapsl.scatter", "data"),
    ("tvm.scatter_from_worker0", "x"),
}
"""Arguments that only the root looks at: the others wait for it."""

NOT_OF_RANK_1 = OF_THE_ROOT | {("mm.distribute from a root", "x")}
"""Arguments that a rank that is not the root may give as it likes."""

ELSEWHERE = {
    "dtensor.BlockPlace",
    "mm.CollectiveTensor",
    "mm.MeshTopology",
    "mm.MpimeshError",
    "mm.ProcessGroup",
    "mm.ReduceOp",
    "mm.exit_all",
}
"""Records and enumerations, what is made by others only, and what ends the process."""

INSIDE = {
    *(f"Placement.{name}" for name in ("count", "index")),
    *(f"ProcessGroup.{name}" for name in ("recv_next", "recv_prev", "send_next", "send_prev")),
    "dtensor.DVariable",
    "dtensor.run_on",
}
"""Python's own, the same by another name, what the library's other rooms call, and a subclass."""


def test_a_call_that_works_is_known_for_every_name():
    """The others' rooms have tests of their own for what they take."""
    known = {name.split()[0] for name in CALLS}
    rooms = {*parallel.__all__, *store.__all__}
    elsewhere = ELSEWHERE | {f"mm.{name}" for name in rooms}
    classes: list[type] = [
        mm.Mesh,
        mm.MeshTopology,
        mm.DeviceMesh,
        mm.ProcessGroup,
        mm.CollectiveTensor,
        mm.Layout,
        mm.Shard,
        mm.Replicate,
        mm.Partial,
        mm.Placement,
        mm.Random,
        mm.Halo,
        mm.dtensor.HaloField,
    ]
    names = {f"mm.{name}" for name in mm.__all__ if takes_arguments(getattr(mm, name))}
    others = [name for name in dtensor.__all__ if name not in mm.__all__]
    names |= {f"dtensor.{name}" for name in others if takes_arguments(getattr(dtensor, name))}
    names |= {f"{one.__name__}.{name}" for one in classes for name in public_methods(one)}
    assert not sorted(names - known - elsewhere - INSIDE)


def takes_arguments(thing: Any) -> bool:
    """Tell whether it is a class or a function with parameters."""
    if isinstance(thing, type):
        return True
    return callable(thing) and bool(inspect.signature(thing).parameters)


def public_methods(kind: type) -> Iterator[str]:
    """Yield the methods that take arguments."""
    for name in dir(kind):
        found = inspect.getattr_static(kind, name)
        if name.startswith("_") or isinstance(found, property):
            continue
        method = getattr(kind, name)
        if not callable(method):
            continue
        bound = isinstance(found, classmethod | staticmethod)
        if len(inspect.signature(method).parameters) > (0 if bound else 1):
            yield name


@pytest.mark.scaled
@pytest.mark.parametrize("name", [name for name in CALLS if name not in PEERS])
def test_what_all_ranks_give_wrongly_is_refused_on_all(name):
    left = [case for case in cases_of(name, quick=8) if (name, case[0]) not in OF_THE_ROOT]
    while left:
        done, outcomes = run(name, left, wrong_ranks=(0, 1))
        for case, outcome in zip(left, outcomes, strict=False):
            check(name, case, outcome, TAKEN)
            kinds = {type(one) for one in outcome}
            # Of a limit of no time, the last rank that comes does not hear.
            assert len(kinds) == 1 or case == ("timeout_s", "0"), (name, case, outcome)
        left = left[done:]


@pytest.mark.scaled
@pytest.mark.parametrize("name", [name for name in CALLS if name not in LOCAL])
def test_what_one_rank_gives_wrongly_is_refused_without_a_hang(name):
    for case in cases_of(name, quick=2):
        _, (outcome,) = run(name, [case], wrong_ranks=(1,))
        check(name, case, outcome[1:], TAKEN | NOT_OF_RANK_1)


def cases_of(name: str, *, quick: int) -> list[Case]:
    """Return `quick` cases, four times as many in a deep run, always the same ones."""
    found: list[str] = []

    def look() -> None:
        place = Place()
        found.extend(parameters(name, place))
        place.finish()

    mm.run_virtual(2, look)
    cases = [
        (parameter, value)
        for parameter in sorted({*found})
        for value in wrong_values()
        # A class is a function, and what it raises is the caller's own.
        if (parameter, value) not in {("function", "class"), ("callback", "class")}
    ]
    most = min(len(cases), 4 * quick if is_deep() else quick)
    return random.Random(name).sample(cases, most)


def run(
    name: str, cases: list[Case], *, wrong_ranks: tuple[int, ...]
) -> tuple[int, list[list[Any]]]:
    """Try cases one after the other until one is taken or leaves the ranks apart.

    Returns:
        How many were tried, and what came of each on each rank: an error, or None.
    """
    tried: list[list[Any]] = []

    def try_all(place: Place, control: mm.DeviceMesh) -> None:
        for number, case in enumerate(cases):
            error = attempt(name, case, place, wrong=control.rank in wrong_ranks)
            # Meets the other rank also where that is still in the call: all wait then.
            place.finish()
            codes = control.group().all_gather(np.array([error is None])).resolve()
            if control.rank == 0:
                tried.append([None, None])
            control.group().barrier()
            tried[number][control.rank] = error
            control.group().barrier()
            if codes.any() or len(wrong_ranks) == 1:
                return

    def main() -> None:
        with mm.DeviceMesh("all=2") as control:
            place = Place()
            try:
                try_all(place, control)
            finally:
                place.finish()

    try:
        with warned.ignored:  # NumPy's, of numbers such as infinity
            mm.run_virtual(2, main)
    except MpimeshError as error:
        if len(wrong_ranks) > 1:
            case = cases[len(tried)]
            raise AssertionError(f"{name} with {case} leaves the ranks apart: {error}") from None
        return 1, [[None, error]]
    return len(tried), tried


def attempt(name: str, case: Case, place: Place, *, wrong: bool) -> BaseException | None:
    """Call with one wrong argument; return what it raises."""
    function, arguments = good_call(name, place)
    if wrong:
        parameter, value = case
        arguments[parameter] = wrong_values()[value]
    try:
        result = function(**arguments)
        while isinstance(result, mm.CollectiveTensor):
            result = result.resolve()
        if isinstance(result, mm.DeviceMesh):
            result.close()
    except DeadlockError:
        raise
    except Exception as error:
        return error
    return None


def check(name: str, case: Case, outcome: list[Any], taken: set[tuple[str, str]]) -> None:
    """Check that errors are of mpimesh and name the parameter, and that not everything is taken."""
    parameter, value = case
    for error in outcome:
        if error is None:
            known = parameter == "label" or name in QUESTIONS or (name, parameter) in taken
            assert value != "object" or known, f"{name} takes an object() as {parameter}"
        elif not isinstance(error, MemoryError):
            assert isinstance(error, MpimeshError), (name, case, repr(error))
        if isinstance(error, MpimeshError) and not isinstance(error, DeadlockError):
            named = parameter in str(error) or Thing.__name__ in str(error)
            assert value != "object" or named or "object" in str(error), (name, case, error)


def good_call(name: str, place: Place) -> Call:
    """Return a call that works."""
    function, arguments = CALLS[name](place)
    if name in ("Halo.exchange", "Halo.start"):
        arguments = {key: place.halo.field(place.tensor) for key in arguments}
    return function, dict(arguments)


def parameters(name: str, place: Place) -> list[str]:
    """Return the names of all parameters that can be given by name."""
    function, arguments = good_call(name, place)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = inspect.signature(function).parameters.values()
    return list(dict.fromkeys([*arguments, *(one.name for one in found if one.kind in named)]))

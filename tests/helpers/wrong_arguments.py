"""Calls with one wrong argument: they work, or raise an error of mpimesh that names it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import mpimesh as mm
from mpimesh.errors import MpimeshError
from tests.helpers import warned

__all__ = ["WRONG", "Case", "outcomes", "uncovered"]

WRONG: dict[str, Any] = {
    "None": None,
    "text": "x",
    "3": 3,
    "nan": float("nan"),
    "inf": float("inf"),
    "-1": -1,
    "0": 0,
    "1.5": 1.5,
    "2**70": 2**70,
    "1j": 1j,
    "[]": [],
    "{}": {},
    "object": object(),
    "class": int,
    "Mesh": mm.Mesh("dp=1"),
    "scalar": np.array(2.0),
    "empty": np.zeros((0, 2)),
    "odd": np.zeros((2, 0, 3), np.complex128),
    "objects": np.array([None, "x"], object),
    "texts": np.array(["x"]),
}

Case = tuple[Callable[..., Any], dict[str, Any]]
"""A function, or a method of a new object, and arguments by name with which it works."""


def outcomes(make: Callable[[], Case], *, also: dict[str, str] | None = None) -> Iterator[str]:
    """Yield what is wrong with a call that is given wrong arguments, one at a time.

    Args:
        make: Makes the call anew.
        also: By its name what messages may call an argument instead.
    """
    function, arguments = make()
    function(**arguments)
    for name in arguments:
        for kind, value in WRONG.items():
            function, given = make()
            given = {**given, name: value}
            problem = _problem(function, given, name, (also or {}).get(name, name))
            if problem:
                yield f"{getattr(function, '__qualname__', function)}({name}={kind}): {problem}"


def _problem(function: Callable[..., Any], given: dict[str, Any], name: str, word: str) -> str:
    try:
        with warned.errors:
            function(**given)
    except MpimeshError as error:
        named = re.search(rf"(?<!\w)({re.escape(name)}|{word})(?!\w)", str(error))
        return "" if named else f"does not name {name!r}: {type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def uncovered(module: Any, cases: dict[str, Any], left_out: set[str]) -> list[str]:
    """Return the public functions, classes and methods of a room that no case calls."""
    missing = []
    for name in module.__all__:
        one = getattr(module, name)
        if inspect.isclass(one):
            methods = [
                f"{name}.{key}"
                for key, value in vars(one).items()
                if not key.startswith("_")
                and (inspect.isfunction(value) or isinstance(value, classmethod | staticmethod))
                and len(inspect.signature(getattr(one, key)).parameters)
                > (0 if isinstance(value, classmethod | staticmethod) else 1)
            ]
            missing += [one for one in (name, *methods) if one not in cases]
        elif callable(one) and name not in cases:
            missing.append(name)
    return [one for one in missing if one not in left_out and one.split(".")[0] not in left_out]

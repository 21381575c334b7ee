"""Values that are wrong for most arguments."""

from __future__ import annotations

from typing import Any

import numpy as np

import mpimesh as mm

__all__ = ["Thing", "wrong_values"]


class Thing:
    """An object that is nothing in particular; its repr holds its address."""


def wrong_values() -> dict[str, Any]:
    """Return values of many kinds, made anew: generators are used up, and ranks have their own."""
    return {
        "None": None,
        "text": "x",
        "empty text": "",
        "surrogate": "\ud800",
        "bytes": b"x",
        "3": 3,
        "-1": -1,
        "0": 0,
        "True": True,
        "int8": np.int8(1),
        "2**70": 2**70,
        "2**62": 1 << 62,
        "nan": float("nan"),
        "inf": float("inf"),
        "1.5": 1.5,
        "1j": 1j,
        "[]": [],
        "()": (),
        "{}": {},
        "set": {"a"},
        "range": range(3),
        "generator": (number for number in (1, 2)),
        "(0, 0)": (0, 0),
        "[None]": [None],
        "[text]": ["x"],
        "[-1]": [-1],
        "[1.5]": [1.5],
        "[2**70]": [2**70],
        "ragged": [[1], [1, 2]],
        "{text: 1}": {"x": 1},
        "object": Thing(),
        "function": lambda *_: None,
        "class": int,
        "array 2x0": np.zeros((2, 0)),
        "array 3x3": np.ones((3, 3)),
        "array of text": np.array("x"),
        "array of objects": np.array([Thing()]),
        "array of nan": np.array(np.nan),
        "array of dates": np.array("2020", "M8[D]"),
        "array of records": np.zeros(2, "i4,f4"),
        "Mesh": mm.Mesh("a=2"),
        "Layout": mm.Layout(mm.Mesh("dp=2"), "S0"),
        "Shard": mm.Shard(0),
    }

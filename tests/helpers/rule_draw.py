"""Random operands and arguments of calls on split arrays, drawn as text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.helpers.rule_fuzz import Case, Operand, expected_of

__all__ = [
    "CASES",
    "DTYPE_TEXTS",
    "Draw",
    "Family",
    "cases",
    "mask",
]


DIMS = ("a=1", "a=2", "a=2", "a=3", "a=3", "a=4", "a=5", "a=2,b=2", "a=1,b=3", "a=2,b=1")
DTYPES = {
    "b": ["bool"],
    "i": ["int8", "int16", "int32", "int64"],
    "u": ["uint8", "uint16", "uint32", "uint64"],
    "f": ["float16", "float32", "float64"],
    "c": ["complex64", "complex128"],
}
DTYPE_TEXTS = [repr(name) for row in DTYPES.values() for name in row]
_REDUCIBLE = {"sum": "iufc", "mean": "fc", "prod": "iufc", "min": "biuf", "max": "biuf"}
_LENGTHS = (0, 1, 1, 2, 2, 3, 3, 4, 5, 7)


class Draw:
    """One case in the making: a mesh, operands, and a source of random numbers.

    With `op` most operands are summands for that reduction; with `kind` arrays are of that dtype,
    but for masks, indices and the like.
    """

    def __init__(self, seed: str, dims: str = "", op: str = "", kind: str = "") -> None:
        self.kind = kind
        self.rng = random.Random(seed)
        self.op = op
        self.dims = dims or self.rng.choice(DIMS)
        self.operands: list[Operand] = []

    # -- choices ---------------------------------------------------------------------------

    def pick(self, *rows: Any) -> Any:
        """Return one of some values."""
        return self.rng.choice(rows)

    def chance(self, share: float) -> bool:
        """Return True in so many of all cases."""
        return self.rng.random() < share

    def number(self, low: int, high: int) -> int:
        """Return a whole number, `high` among them."""
        return self.rng.randint(low, high)

    def options(self, **choices: str | Sequence[Any]) -> str:
        """Return keyword arguments as text, each in two of five cases; words become strings."""
        found = ""
        for name, rows in choices.items():
            if self.chance(0.4):
                value = (
                    repr(self.pick(*rows.split())) if isinstance(rows, str) else self.pick(*rows)
                )
                found += f", {name}={value}"
        return found

    # -- arrays ----------------------------------------------------------------------------

    def shape(self, low: int = 0, high: int = 3) -> tuple[int, ...]:
        """Return a shape of so many axes, some of them short."""
        return tuple(self.pick(*_LENGTHS) for _ in range(self.number(low, high)))

    def dtype(self, kinds: str = "biufc") -> str:
        """Return a dtype of some kinds."""
        name: str = self.pick(*DTYPES[self.pick(*kinds)])
        return name

    def array(
        self,
        shape: tuple[int, ...] | None = None,
        kinds: str = "bbiiuufffcc",
        flavour: str | None = None,
        ndim: tuple[int, int] = (0, 3),
        dtype: str = "",
    ) -> str:
        """Add an operand, and return its name."""
        shape = self.shape(*ndim) if shape is None else shape
        if self.kind and not dtype and set(kinds) & set("iufc"):
            dtype = self.kind
            flavour = flavour or self.pick("", "nan")
        dtype = dtype or self.dtype(kinds)
        if flavour is None:
            flavour = self.pick("", "", "nan", "inf") if np.dtype(dtype).kind == "f" else ""
            if np.dtype(dtype).kind == "c":
                flavour = self.pick("", "", "", "nan")
        place = self._placement(shape, np.dtype(dtype).kind)
        if self.op in ("mean", "prod") and np.dtype(dtype).kind == "c" and "P" in place:
            flavour = ""  # no complex factors or multiples of what is not finite come to it again
        self.operands.append(Operand(place, shape, dtype, self.number(0, 999), flavour))
        return f"x{len(self.operands) - 1}"

    def _placement(self, shape: tuple[int, ...], kind: str) -> str:
        sizes = [int(part.split("=")[1]) for part in self.dims.split(",")]
        specs: list[str] = []
        for size in sizes:
            choice = self.number(0, 9)
            if self.op and choice < 7 and kind in _REDUCIBLE[self.op]:
                specs.append(f"P({self.op})")
            elif choice == 0 or (not shape and choice < 7):
                specs.append("R")
            elif choice in (1, 2) and kind in "iufc" and not self.op:
                specs.append("P")
            elif not shape:
                specs.append("R")
            else:
                axis = self.number(0, len(shape) - 1)
                if choice < 6 and len(sizes) == 1:
                    edges = sorted(self.number(0, shape[axis]) for _ in range(size - 1))
                    parts = np.diff([0, *edges, shape[axis]]).tolist()
                    specs.append(f"S{axis}({','.join(map(str, parts))})")
                else:
                    specs.append(f"S{axis}")
        return ", ".join(specs)

    def of(self, name: str) -> Operand:
        """Return the operand of a name."""
        return self.operands[int(name[1:])]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of an operand."""
        return self.of(name).shape

    def ndim(self, name: str) -> int:
        """Return how many axes an operand has."""
        return len(self.of(name).shape)

    # -- axes ------------------------------------------------------------------------------

    def axis(self, name: str, *, wrong: float = 0.04) -> int:
        """Return an axis of an operand, sometimes one that it lacks."""
        ndim = self.ndim(name)
        if not ndim or self.chance(wrong):
            return int(self.pick(0, -1, ndim, -ndim - 1))
        return self.number(-ndim, ndim - 1)

    def axes(self, name: str) -> str:
        """Return None, an axis or several, as text."""
        ndim = self.ndim(name)
        choice = self.number(0, 5)
        if choice < 2:
            return "None"
        if choice < 4 or not ndim:
            return str(self.axis(name))
        if self.chance(0.05):
            return str(self.pick("()", "(0, 0)", "1.5", "(7,)"))
        rows = self.rng.sample(range(ndim), self.number(1, ndim))
        return repr(tuple(axis - ndim * self.number(0, 1) for axis in rows))

    def stretched(self, shape: tuple[int, ...], *, wrong: float = 0.04) -> tuple[int, ...]:
        """Return a shape that broadcasts to another, sometimes one that does not."""
        if self.chance(wrong):
            return (*shape, 3) if self.chance(0.5) else tuple(n + 2 for n in shape)
        kept = shape[self.number(0, len(shape)) :] if self.chance(0.4) else shape
        return tuple(1 if self.chance(0.2) else n for n in kept)

    # -- literals --------------------------------------------------------------------------

    def scalar(self, kinds: str = "if") -> str:
        """Return a number as text."""
        if self.kind and self.chance(0.6):
            return f"{self.literal(())}[()]"
        kind = self.pick(*kinds)
        if kind == "b":
            return str(self.chance(0.5))
        if kind == "i":
            return str(self.number(-3, 5))
        if kind == "f":
            return str(self.pick(-1.5, 0.0, 0.5, 2.0, 3.0))
        return str(self.pick(1 + 2j, -1j))

    def literal(self, shape: tuple[int, ...], kinds: str = "biuf") -> str:
        """Return a plain array as text: the same on all ranks."""
        dtype = self.dtype(kinds)
        rows = [self.number(0, 4) for _ in range(int(np.prod(shape)))]
        if np.dtype(self.kind or "b").kind in "mMSUV" and kinds != "b":
            return f"of_kind(np.array({rows}, int).reshape({shape}), {self.kind!r})"
        return f"np.array({rows}, {dtype!r}).reshape({shape})"

    def other(self, shape: tuple[int, ...], kinds: str = "biufc", **how: Any) -> str:
        """Return an operand of a shape: a split array, a plain one or a number."""
        choice = self.number(0, 9)
        if choice < 6:
            return self.array(shape, kinds, **how)
        if choice < 8:
            return self.literal(shape, kinds.replace("c", "") or "f")
        return self.scalar("if" if "f" in kinds else "i")

    def indices(self, length: int, shape: tuple[int, ...], *, wrong: float = 0.05) -> str:
        """Return whole numbers below a length as text: a list, a plain or a split array."""
        low, high = (-length, length - 1) if length else (0, 0)
        if self.chance(wrong):
            high += 2
        if length and self.chance(0.3):
            dtype = self.dtype("i")
            return self.array(shape, dtype=dtype, flavour=f"index:{length}")
        rows = [self.number(low, high) for _ in range(int(np.prod(shape)))]
        if len(shape) == 1 and rows and self.chance(0.5):
            return repr(rows)
        return f"np.array({rows}, int).reshape({shape})"

    # -- out= ------------------------------------------------------------------------------

    def with_out(self, text: str, share: float = 0.15, *, kinds: str = "biufc") -> str:
        """Return a call, sometimes with `out=` an operand like its result, rarely unlike."""
        if not self.chance(share):
            return text
        expected = expected_of(Case(self.dims, text, tuple(self.operands)))
        if not isinstance(expected.found, np.ndarray) or expected.found.dtype.kind == "V":
            return text
        shape, kind = expected.found.shape, expected.found.dtype.str
        if self.chance(0.1):
            shape = tuple(n + (n != 1) * 2 for n in shape)
        elif kinds and self.chance(0.1):
            kind = self.dtype(kinds)
        # What has been written must be in `out`, too; in a layout of its own, never in summands.
        out = self.array(shape, dtype=kind, flavour="")
        last = self.operands[-1]
        place = ", ".join(
            "R" if one.strip()[0] == "P" else one for one in last.placement.split(", ")
        )
        self.operands[-1] = Operand(place, shape, kind, last.seed, "")
        return f"[{text[:-1]}, out={out}), {out}]"

    def done(self, text: str, rule: str, *, exact: bool) -> Case:
        """Return the case."""
        return Case(self.dims, text, tuple(self.operands), exact, rule, any_error=bool(self.kind))


# -- which function draws the calls of a rule ------------------------------------------------------

Family = Callable[[Draw, str], str]
CASES: dict[str, tuple[Family, bool]] = {}
"""For each rule what draws a call of it, and whether results are equal to the bit."""


def cases(*names: str, exact: bool = False) -> Callable[[Family], Family]:
    """Mark what draws the calls of some functions of NumPy, without ``np.`` before them."""

    def register(family: Family) -> Family:
        for name in names:
            CASES[name if name.startswith("operator.") else f"np.{name}"] = (family, exact)
        return family

    return register


def mask(d: Draw, x: str) -> str:
    """Return what goes with an operand as its `where`: an array, split or not, or a number."""
    shape = d.stretched(d.shape_of(x))
    return str(d.pick(d.array(shape, "b"), d.literal(shape, "b"), "True", "False"))

"""Random calls for every rule of split arrays: those of ufuncs, operators and methods are here.

The others are beside this module, a function for each family of rules.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

import mpimesh as mm
from mpimesh.dtensor.dispatch import FUNCTIONS, name_of
from tests.helpers import rule_products, rule_shapes, rule_values
from tests.helpers.rule_draw import CASES, DTYPE_TEXTS, Draw, cases
from tests.helpers.rule_fuzz import Case

_FAMILIES = (rule_products, rule_shapes, rule_values)  # imported, they register their families

__all__ = [
    "CASES",
    "KINDS",
    "METHODS",
    "OPERATORS",
    "draw_cases",
    "draw_kinds",
    "operator_methods",
    "public_methods",
    "rule_names",
]


LATER = ("np.linalg.lstsq", "np.ufunc.accumulate", "operator.eq", "operator.ne")
"""Rules that come after each round: the draws of all others stay as they were without them."""


def draw_cases(seed: int, count: int, dims: str = "", op: str = "") -> list[Case]:
    """Return `count` cases: one of each rule in turn, but more of those with many forms.

    Args:
        seed: Of random numbers.
        count: How many.
        dims: The mesh of all; any of a few if empty.
        op: The reduction for which most operands are to be summands.
    """
    more = {"np.ufunc": 24, "method": 14, "operator": 14, "operator.getitem": 8}
    more |= {"operator.setitem": 6, "np.ufunc.reduce": 3}
    rows = [name for name in sorted({*CASES} - {*LATER}) for _ in range(more.get(name, 1))]
    found: list[Case] = []
    number = 0
    while len(found) < count:
        last = number % len(rows) == len(rows) - 1
        for name in (rows[number % len(rows)], *(LATER if last else ())):
            draw = Draw(f"{seed} {number} {name}", dims, op)
            family, exact = CASES[name]
            text = family(draw, name)
            if draw.operands:
                found.append(draw.done(text, name, exact=exact))
        number += 1
    return found


KINDS = ("M8[D]", "m8[s]", "U3", "S3", "V3", "i4,f8", "bool", "complex64", "float16", "longdouble")
"""Dtypes beside the usual ones, for :func:`draw_kinds`."""


def draw_kinds(kind: str, rounds: int, seed: int = 0) -> list[Case]:
    """Return so many cases of each rule, with arrays of a dtype that few programs have."""
    found = []
    for name in sorted(CASES):
        for number in range(rounds * (8 if name in _FORMS else 1)):
            draw = Draw(f"{seed} {number} {name} {kind}", kind=kind)
            family, exact = CASES[name]
            text = family(draw, name)
            if draw.operands and name not in _ODD.get(kind, ()):
                found.append(draw.done(text, name, exact=exact))
    return found


_ODD = {
    "m8[s]": ("np.average",),  # NumPy's fails for options that change nothing in it
    "U3": ("np.min_scalar_type",),  # as of a scalar, which has its own length
    "S3": ("np.min_scalar_type",),
    "V3": ("np.histogram_bin_edges",),  # it does not look at the values
    "i4,f8": ("np.inner", "np.argmin", "np.argmax"),  # NumPy returns memory as it was
}
"""For some dtypes the rules in which NumPy does not say what is right."""

_FORMS = ("np.ufunc", "method", "operator", "operator.getitem", "operator.setitem")


def rule_names() -> set[str]:
    """Return the names of all rules there are: what needs cases."""
    return {_spelled(function) for function in FUNCTIONS}


def _spelled(function: Any) -> str:
    if function in (np.ufunc.reduce, np.ufunc.accumulate):
        return f"np.ufunc.{function.__name__}"
    return name_of(function).replace("numpy.", "np.").replace("_operator.", "operator.")


def public_methods() -> set[str]:
    """Return the methods and properties that split arrays have beside NumPy's arrays."""
    return {
        name for name in dir(mm.DTensor) if hasattr(np.ndarray, name) and not name.startswith("_")
    }


def operator_methods() -> set[str]:
    """Return the methods of operators that split arrays have beside NumPy's arrays."""
    words = {f"__{name.strip('_')}__" for name in operator.__all__}
    words |= {f"__{letter}{name.strip('_')}__" for name in words for letter in "ri"}
    words |= {"__bool__", "__int__", "__float__", "__complex__", "__len__", "__format__"}
    words |= {"__divmod__", "__rdivmod__"}
    own = {name for kind in mm.DTensor.__mro__[:-1] for name in vars(kind)}
    return words & own


# -- ufuncs, operators, methods ------------------------------------------------------------------

UFUNCS = sorted(
    name
    for name, one in vars(np).items()
    if isinstance(one, np.ufunc) and one.signature is None and name == one.__name__
)


@cases("ufunc", exact=False)
def _ufunc(d: Draw, rule: str) -> str:
    name = d.pick(*UFUNCS)
    ufunc = getattr(np, name)
    shape = d.shape()
    if d.chance(0.05):  # one fault at a time: which of two is told is nobody's business
        name, shape, wrong, kinds = "hypot", (2, 3), 1.0, "f"
        ufunc = np.hypot
    else:
        wrong, kinds = 0.0, "bbiiuufffcc"
    first = d.array(shape if ufunc.nin == 1 else d.stretched(shape, wrong=0.0), kinds)
    others = [d.stretched(shape, wrong=wrong) for _ in range(ufunc.nin - 1)]
    args = [first, *(d.other(one, kinds[-1:] + kinds) for one in others)]
    if ufunc.nin == 2 and d.chance(0.3):
        args.reverse()
    if ufunc.nin == 2 and d.chance(0.08) and d.ndim(first) < 2:
        return f"np.{name}.outer({args[0]}, {args[1]})"
    if d.chance(0.03):
        return f"np.{name}.{d.pick('reduceat', 'at')}({args[0]}, [0])"
    text = f"np.{name}({', '.join(args)}"
    text += d.options(dtype="f8 f4 i8 c16") if d.chance(0.3) else ""
    text += d.options(casting="unsafe no same_kind") if d.chance(0.2) else ""
    if ufunc.nout == 1 and d.chance(0.1):
        out = d.with_out(text + ")", 1.0)
        if out.startswith("["):
            mask = d.array(d.stretched(shape), "b")
            return out.replace(", out=", f", where={mask}, out=", 1)
        return out
    return d.with_out(text + ")") if ufunc.nout == 1 else text + ")"


@cases("ufunc.reduce")
def _reduce(d: Draw, rule: str) -> str:
    name = d.pick(*[one for one in UFUNCS if getattr(np, one).nin == 2])
    flavour = None
    if name in ("multiply", "power", "float_power", "ldexp"):
        flavour = "unit"
    x = d.array(flavour=flavour)
    return f"np.{name}.reduce({x}, axis={d.axes(x)}{d.options(keepdims=[True], initial=[1, 2.5])})"


_BINARY = [
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "divmod", "lshift", "rshift"),
    *("and", "or", "xor", "lt", "le", "gt", "ge", "eq", "ne"),
]
_REFLECTED = [one for one in _BINARY if one not in ("lt", "le", "gt", "ge", "eq", "ne")]
_IN_PLACE = [one for one in _REFLECTED if one != "divmod"]
OPERATORS = {
    *(f"__{name}__" for name in (*_BINARY, "matmul", "neg", "pos", "abs", "invert")),
    *(f"__r{name}__" for name in (*_REFLECTED, "matmul")),
    *(f"__i{name}__" for name in (*_IN_PLACE, "matmul")),
    *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__len__"),
    *("__getitem__", "__setitem__", "__format__"),
}
"""The methods of Python's operators: those that split arrays have beside NumPy's arrays."""

_SIGNS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "pow": "**",
    "lshift": "<<",
    "rshift": ">>",
    "and": "&",
    "or": "|",
    "xor": "^",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "eq": "==",
    "ne": "!=",
    "matmul": "@",
}


def _operator(d: Draw, rule: str) -> str:
    name = d.pick(*sorted(OPERATORS - {"__getitem__", "__setitem__"}))
    bare = name.strip("_")
    if bare in ("bool", "int", "float", "complex", "index", "len", "format"):
        # Of NumPy's arrays of one element only those without axes are numbers, from 2.4 on.
        x = d.array(d.pick((), (2,), (0,), (1,)) if bare in ("bool", "len") else (), flavour="")
        if bare == "format":
            return f"'{{:.2f}}'.format({d.array((), 'f', flavour='')})"
        if bare == "index":
            return f"[3, 4, 5, 6, 7][abs({x})]"
        return f"{bare}({x})"
    shape = d.shape(1, 2) if "matmul" in bare else d.shape()
    if bare in ("neg", "pos", "abs", "invert"):
        x = d.array(shape)
        return f"x0.__{bare}__()" if d.chance(0.5) else f"np.{_UNARY[bare]}({x})"
    x = d.array(shape)
    if "matmul" in bare:
        y = d.array(d.pick(shape[-1:], shape[::-1], shape), flavour="")
        if bare.startswith("r"):
            return f"np.ones({shape[::-1]}) @ x0"
        if bare.startswith("i"):
            return f"then(x0, x0.__imatmul__(np.ones(({shape[-1]},) * 2, {d.of(x).dtype!r})))"
        return f"x0 @ {y}"
    if bare.startswith("i") and bare[1:] in _IN_PLACE:
        y = d.other(d.stretched(shape, wrong=0.0))
        return f"then(x0, x0.__{bare}__({y}))"
    if bare.startswith("r") and bare[1:] in _REFLECTED:
        y = d.pick(d.scalar("ifb"), d.literal(d.stretched(shape)))
        if bare == "rdivmod":
            return f"divmod({y}, {x})"
        return f"{y} {_SIGNS[bare[1:]]} {x}"
    y = d.other(d.stretched(shape, wrong=0.0))
    return f"divmod(x0, {y})" if bare == "divmod" else f"x0 {_SIGNS[bare]} {y}"


_UNARY = {"neg": "negative", "pos": "positive", "abs": "absolute", "invert": "invert"}
CASES["operator"] = (_operator, False)

METHODS: dict[str, Callable[[Draw], str]] = {}
"""For each method of NumPy's arrays that split ones have what draws a call of it."""


def _method(d: Draw, rule: str) -> str:
    return METHODS[d.pick(*sorted(METHODS))](d)


CASES["method"] = (_method, False)


def _by_function(method: str) -> None:
    """Register a method that takes what the function of its name takes."""

    def family(d: Draw) -> str:
        made, _ = CASES[f"np.{method}"]
        text = made(d, f"np.{method}")
        start = f"np.{method}(x0"
        if not text.startswith(start) or "out=" in text:
            return f"x0.{method}()" if method not in ("repeat", "take", "reshape") else text
        rest = text[len(start) :].removeprefix(", ").replace("correction=", "ddof=")
        return f"x0.{method}({rest}"

    METHODS[method] = family


for _one in (
    *("sum", "prod", "mean", "std", "var", "min", "max", "argmin", "argmax", "any", "all"),
    *("trace", "cumsum", "cumprod", "argsort", "take", "repeat", "diagonal", "nonzero"),
    *("reshape", "ravel", "transpose", "swapaxes", "squeeze", "round", "clip"),
):
    _by_function(_one)


def _simply(method: str, *calls: str, **how: Any) -> None:
    """Register a method with its calls, where X is the array."""

    def family(d: Draw) -> str:
        x = d.array(**how)
        return str(d.pick(*calls)).replace("X", x).replace("AXIS", str(d.axis(x)))

    METHODS[method] = family


_simply("conj", "X.conj()")
_simply("conjugate", "X.conjugate()")
_simply("real", "X.real")
_simply("imag", "X.imag")
_simply("T", "X.T")
_simply("mT", "X.mT")
_simply("flatten", "X.flatten()", "X.flatten('F')")
_simply("copy", "X.copy()")
_simply("tolist", "X.tolist()", flavour="")
_simply("fill", "then(X, X.fill(3))", "then(X, X.fill(1.5))", flavour="")
_simply("sort", "then(X, X.sort(AXIS))", "then(X, X.sort())", kinds="iufc", flavour="")
_simply("item", "X.item()", "X.item(0)", "X.item(3)", "X.item(-1)", "X.item(0, 0)", flavour="")
_simply("astype", *[f"X.astype({name})" for name in DTYPE_TEXTS], flavour="")
_simply("dot", "X.dot(X)", "X.dot(2)", "X.dot(X.T)", flavour="", ndim=(1, 2))
_simply("compress", "X.compress([True, False], AXIS)", "X.compress([0, 1, 1])")
_simply("shape", "X.shape")
_simply("dtype", "X.dtype")
_simply("ndim", "X.ndim")
_simply("size", "X.size")
_simply("itemsize", "X.itemsize")
_simply("nbytes", "X.nbytes")

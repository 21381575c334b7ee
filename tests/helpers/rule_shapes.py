"""Random calls of what changes shapes, and of what picks and writes elements by indices."""

from __future__ import annotations

import numpy as np

from tests.helpers.rule_draw import (
    Draw,
    cases,
)
from tests.helpers.rule_fuzz import Case, expected_of

__all__: list[str] = []


# -- shapes --------------------------------------------------------------------------------------


@cases("reshape", exact=True)
def _reshape(d: Draw, rule: str) -> str:
    x = d.array()
    size = int(np.prod(d.shape_of(x)))
    ways = [(size,), (-1,), (1, size), (size, 1), (-1, 1), (size + 1,), (2, -1), (3, -1), ()]
    ways += [(first, size // first) for first in range(2, size) if size % first == 0]
    return f"{rule}({x}, {d.pick(*ways)}{d.options(order='F C A')})"


@cases("ravel", "transpose", "squeeze", "expand_dims", "matrix_transpose", exact=True)
def _shapes(d: Draw, rule: str) -> str:
    x = d.array()
    ndim = d.ndim(x)
    more = ""
    if "ravel" in rule:
        more = d.pick("", ", 'F'", ", 'C'")
    elif rule == "np.transpose" and d.chance(0.6):
        more = f", {tuple(d.rng.sample(range(ndim), ndim))}"
        more = d.pick(more, more, ", (0, 0)", ", (5,)")
    elif "squeeze" in rule:
        more = f", {d.axes(x)}"
    elif "expand" in rule:
        more = f", {d.pick(0, -1, ndim, (0, 1), (0, -1), ndim + 3, (0, 0))}"
    return f"{rule}({x}{more})"


@cases("swapaxes", "moveaxis", "rollaxis", exact=True)
def _turned(d: Draw, rule: str) -> str:
    x = d.array(ndim=(1, 3))
    return f"{rule}({x}, {d.axis(x)}, {d.axis(x)})"


@cases("atleast_1d", "atleast_2d", "atleast_3d", "broadcast_arrays", exact=True)
def _several(d: Draw, rule: str) -> str:
    shape = d.shape()
    rows = [d.array(d.stretched(shape)) for _ in range(d.pick(1, 2, 2))]
    return f"{rule}({', '.join(rows)})"


@cases("broadcast_to", "resize", exact=True)
def _grown(d: Draw, rule: str) -> str:
    shape = d.shape()
    x = d.array(d.stretched(shape))
    return f"{rule}({x}, {d.pick(shape, (2, *shape), shape, d.shape(), 3)})"


@cases("flip", "fliplr", "flipud", "rot90", "roll", exact=True)
def _rolled(d: Draw, rule: str) -> str:
    x = d.array()
    more = ""
    if rule == "np.flip":
        more = f", {d.axes(x)}"
    elif "rot90" in rule:
        more = f", {d.number(-2, 5)}{d.options(axes=[(0, 1), (1, 0), (0, 0), (-1, 0)])}"
    elif "roll" in rule:
        more = d.pick(
            f", {d.number(-9, 9)}", f", {d.number(-3, 3)}, {d.axis(x)}", ", (1, 2), (0, 0)"
        )
    return f"{rule}({x}{more})"


@cases("tril", "triu", "diag", "diagflat", exact=True)
def _triangles(d: Draw, rule: str) -> str:
    x = d.array(ndim=(0, 3) if "diag" in rule else (1, 3))  # NumPy's own error of tri() is none
    return f"{rule}({x}{d.pick('', ', 1', ', -2', ', 9')})"


@cases("concatenate", "stack", "vstack", "hstack", "dstack", "column_stack", exact=True)
def _joined(d: Draw, rule: str) -> str:
    shape = d.shape(0, 3)
    rows = [d.array(shape, flavour="")]
    axis = d.axis(rows[0])
    for _ in range(d.pick(1, 2)):
        other = list(shape)
        if rule == "np.concatenate" and other and -len(other) <= axis < len(other):
            other[axis] = d.pick(0, 1, 3)
        other = list(d.shape()) if d.chance(0.05) else other
        rows.append(d.array(tuple(other), flavour=""))
    more = f", axis={d.pick(axis, axis, 'None')}" if "concatenate" in rule else ""
    more = f", axis={axis}" if rule == "np.stack" else more
    text = f"{rule}([{', '.join(rows)}]{more})"
    return d.with_out(text) if rule in ("np.concatenate", "np.stack") else text


@cases("append", "block", exact=True)
def _appended(d: Draw, rule: str) -> str:
    shape = d.shape(1, 2)
    x, y = d.array(shape, flavour=""), d.other(shape, flavour="")
    if "block" in rule:
        return f"{rule}({d.pick(f'[{x}, {y}]', f'[[{x}], [{x}]]', f'[[{x}, {x}]]')})"
    return f"{rule}({x}, {y}{d.pick('', ', 0', f', {d.axis(x)}')})"


@cases("unstack", "split", "array_split", "hsplit", "vsplit", "dsplit", exact=True)
def _parted(d: Draw, rule: str) -> str:
    x = d.array()
    if "unstack" in rule:
        return f"{rule}({x}, axis={d.axis(x)})"
    where = d.pick(1, 2, 3, [1], [1, 2], [2, 1], [-1], [9], 0 if "array" in rule else 1, -1)
    axis = f", {d.axis(x)}" if rule in ("np.split", "np.array_split") else ""
    return f"{rule}({x}, {where}{axis})"


@cases("repeat", exact=True)
def _repeated(d: Draw, rule: str) -> str:
    x = d.array()
    axis = d.pick("None", d.axis(x))
    shape = d.shape_of(x)
    times = d.pick(0, 1, 2, -1, "[1, 2]", "[2]", 1.5)
    if axis == "None" or not -len(shape) <= int(axis) < len(shape):
        length = int(np.prod(shape))
    else:
        length = shape[int(axis)]
    if d.chance(0.4):
        times = d.indices(3, (length,), wrong=0.0)
        times = f"np.abs({times})" if "x" not in times else times
    return f"{rule}({x}, {times}, axis={axis})"


@cases("tile", exact=True)
def _tiled(d: Draw, rule: str) -> str:
    return f"{rule}({d.array()}, {d.pick(0, 1, 2, (2, 1), (1, 2, 2), (), -1)})"


@cases("pad", exact=True)
def _padded(d: Draw, rule: str) -> str:
    x = d.array(flavour="")
    width = d.pick(0, 1, (1, 2), ((0, 1),), -1, ((1, 1), (0, 2)), 1.5)
    mode = d.pick("constant", "constant", "edge", "wrap", "reflect", "symmetric", "bad")
    more = d.options(constant_values=[5, (1, 2)]) if mode == "constant" else ""
    return f"{rule}({x}, {width}, {mode!r}{more})"


@cases("delete", exact=True)
def _deleted(d: Draw, rule: str) -> str:
    x = d.array(flavour="")
    shape = d.shape_of(x)
    axis = d.axis(x) if d.chance(0.6) else None
    known = axis is not None and -len(shape) <= axis < len(shape)
    length = shape[axis] if known else int(np.prod(shape))  # type: ignore[index]
    where = d.pick(0, "[0]", "slice(0, 2)", "slice(None, None, 2)", -1, "[]", 9, "[1, 1]")
    if d.chance(0.3):
        where = d.array((length,), "b")
    elif d.chance(0.4):
        where = d.indices(length, (2,))
    return f"{rule}({x}, {where}, axis={axis})"


@cases("insert", exact=True)
def _inserted(d: Draw, rule: str) -> str:
    x = d.array(flavour="")
    where = d.pick(0, 1, -1, "[0, 1]", "slice(0, 1)", 9, "[]", d.array((1,), "i", "index:2"))
    return f"{rule}({x}, {where}, {d.pick(7, 1.5, [3])}, axis={d.pick('None', d.axis(x))})"


@cases("trim_zeros", exact=True)
def _trimmed(d: Draw, rule: str) -> str:
    return f"{rule}({d.array(ndim=(1, 2), flavour='')}{d.options(trim='f b x')})"


# -- elements by indices -------------------------------------------------------------------------


def _key(d: Draw, shape: tuple[int, ...], *, write: bool = False) -> str:
    """Return a key of any form as text."""
    if d.chance(0.15) and shape:
        mask = shape[: d.number(1, len(shape))]
        mask = (mask[0] + 1, *mask[1:]) if d.chance(0.05) else mask
        return str(d.pick(d.array(mask, "b"), d.literal(mask, "b")))
    if d.chance(0.03):
        return str(d.pick("'a'", "1.5", "True", "None", "(None, ...)", "False"))
    parts, together = [], d.number(1, 3)
    for length in shape:
        form = d.number(0, 9)
        if form < 2:
            edges = [d.pick("", str(d.number(-length - 1, length + 1))) for _ in range(2)]
            steps = [d.pick("", "", "1", "2", "-1", "-2", "0" if d.chance(0.05) else "")]
            part = ", ".join(one or "None" for one in edges + steps)
            parts.append(f"slice({part})")
        elif form < 4 and length:
            parts.append(str(d.number(-length, length - 1)))
        elif form < 6:
            parts.append(d.indices(length, d.pick((together,), (together,), (1,), (2, together))))
        elif form == 6:
            parts.append("...")
            break
        elif form == 7:
            parts.append("None, slice(None)")
        elif d.chance(0.2):
            break
        else:
            parts.append("slice(None)")
    if d.chance(0.03):
        parts.append("0")
    return f"({', '.join(parts)},)" if parts else "()"


@cases("operator.getitem", exact=True)
def _get(d: Draw, rule: str) -> str:
    x = d.array()
    return f"{x}[{_key(d, d.shape_of(x))}]"


@cases("operator.setitem", exact=True)
def _put_item(d: Draw, rule: str) -> str:
    x = d.array(flavour="")
    shape = d.shape_of(x)
    key = _key(d, shape, write=True)
    value = d.scalar("iifb")
    if d.chance(0.5):
        text = f"{x}[{key}]"
        expected = expected_of(Case(d.dims, text, tuple(d.operands)))
        if isinstance(expected.found, np.ndarray):
            # NumPy's error for masks is of another kind.
            wrong = 0.0 if "bool" in key or key.startswith("x") else 0.04
            value = d.other(d.stretched(expected.found.shape, wrong=wrong), "bif", flavour="")
    return f"set({x}, {key}, {value})"


@cases("take", exact=True)
def _taken(d: Draw, rule: str) -> str:
    x = d.array()
    shape = d.shape_of(x)
    axis = d.axis(x) if d.chance(0.7) else None
    known = axis is not None and -len(shape) <= axis < len(shape)
    length = shape[axis] if known else int(np.prod(shape))  # type: ignore[index]
    where = d.indices(length, d.pick((), (2,), (3,), (1, 2), (0,)))
    mode = d.options(mode="wrap clip raise")
    return f"{rule}({x}, {where}, axis={axis}{mode})"


@cases("take_along_axis", "put_along_axis", exact=True)
def _along(d: Draw, rule: str) -> str:
    x = d.array(flavour="", ndim=(1, 3))
    shape = list(d.shape_of(x))
    axis = d.axis(x)
    if -len(shape) <= axis < len(shape):
        length, shape[axis] = shape[axis], d.pick(1, 1, 2)
    else:
        length = 1
    where = d.indices(length, tuple(shape))
    where = f"np.array({where})" if where.startswith("[") else where
    if "take" in rule:
        return f"{rule}({x}, {where}, {axis})"
    return f"then({x}, {rule}({x}, {where}, 3, {axis}))"


@cases("put", "putmask", "copyto", "fill_diagonal", exact=True)
def _written(d: Draw, rule: str) -> str:
    x = d.array(flavour="")
    shape = d.shape_of(x)
    size = int(np.prod(shape))
    if rule == "np.put":
        call = f"{d.indices(size, (2,))}, {d.pick(3, '[1, 2]', '[4]')}{d.options(mode='wrap')}"
    elif rule == "np.putmask":
        call = f"{d.array(shape, 'b')}, {d.pick(3, '[1, 2]')}"
    elif rule == "np.copyto":
        where = f", where={d.array(d.stretched(shape), 'b')}" if d.chance(0.4) else ""
        where += d.options(casting="unsafe")
        call = f"{d.other(d.stretched(shape, wrong=0.0), flavour='')}{where}"
    else:
        call = f"{d.pick(3, '[1, 2]', 1.5)}{d.options(wrap=[True])}"
    return f"then({x}, {rule}({x}, {call}))"


@cases("compress", "extract", exact=True)
def _chosen(d: Draw, rule: str) -> str:
    x = d.array()
    shape = d.shape_of(x)
    if "extract" in rule:
        return f"{rule}({d.pick(d.array(shape, 'b'), d.literal(shape, 'b'))}, {x})"
    length = d.pick(0, 1, 2, 3)
    mask = d.pick(d.array((length,), "b"), d.literal((length,), "b"))
    return f"{rule}({mask}, {x}, axis={d.pick('None', d.axis(x))})"


@cases("diagonal", "linalg.diagonal", "trace", "linalg.trace")
def _diagonals(d: Draw, rule: str) -> str:
    x = d.array(ndim=(1, 3))
    more = d.options(offset=[0, 1, -1, 9])
    if "linalg" not in rule and d.chance(0.5):
        more += f", axis1={d.axis(x)}, axis2={d.axis(x)}"
    return f"{rule}({x}{more})"


@cases("nonzero", "flatnonzero", "argwhere", exact=True)
def _found(d: Draw, rule: str) -> str:
    return f"{rule}({d.array()})"


@cases("tril_indices_from", "triu_indices_from", "diag_indices_from", exact=True)
def _index_makers(d: Draw, rule: str) -> str:
    n = d.pick(0, 1, 2, 3)
    x = d.array(d.pick((n, n), (n, n + 1), (n,), (n, n, n)))
    return f"{rule}({x}{'' if 'diag' in rule else d.pick('', ', 1')})"


@cases("ravel_multi_index", "unravel_index", exact=True)
def _unravelled(d: Draw, rule: str) -> str:
    dims, shape = (3, 4), d.shape(0, 2)
    if rule == "np.unravel_index":
        x = d.array(shape, dtype=d.dtype("i"), flavour=f"index:{d.pick(12, 12, 14)}")
        return f"{rule}({x}, {dims}{d.options(order='F')})"
    x = d.array(shape, dtype="int64", flavour=f"index:{d.pick(3, 3, 5)}")
    y = d.array(shape, dtype="int64", flavour="index:4")
    return f"{rule}(({x}, {y}), {dims}{d.options(mode='wrap clip', order='F')})"

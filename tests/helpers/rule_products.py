"""Random calls of products, matrices, transforms, and of what works with neighbours."""

from __future__ import annotations

import numpy as np

from tests.helpers.rule_draw import (
    Draw,
    cases,
)

__all__: list[str] = []


# -- products ------------------------------------------------------------------------------------


def _row(d: Draw, shape: tuple[int, ...], kinds: str = "biufc") -> str:
    return d.array(shape, kinds, flavour="")


@cases("dot", "inner", "matmul", "linalg.matmul", "kron", "outer", "linalg.outer", "vdot")
def _products(d: Draw, rule: str) -> str:
    n, m, k = (d.pick(0, 1, 2, 3, 4) for _ in range(3))
    first = d.pick((n,), (m, n), (2, m, n), (1, m, n), ())
    second = d.pick((n,), (n, k), (2, n, k), first, first[::-1], ())
    x, y = _row(d, first), d.other(second, flavour="")
    if d.chance(0.3):
        x, y = y, x
    more = ""
    if rule == "np.matmul" and d.chance(0.15):
        more = d.pick(", axes=[(-2, -1), (-1, -2), (-2, -1)]", ", axes=[(0, 1), (0, 1), (0, 1)]")
    if rule == "np.matmul":
        more += d.options(dtype="c16") if d.chance(0.3) and first and second else ""
    text = f"{rule}({x}, {y}{more})"
    return d.with_out(text) if rule in ("np.dot", "np.matmul") else text


@cases("vecdot", "matvec", "vecmat", "linalg.vecdot")
def _vectors(d: Draw, rule: str) -> str:
    n, m = d.pick(0, 1, 2, 3), d.pick(0, 1, 2, 3)
    lead = d.shape(0, 1)
    ways = {"matvec": ((m, n), (n,)), "vecmat": ((n,), (n, m))}
    first, second = ways.get(rule.rpartition(".")[2], ((n,), (n,)))
    x, y = _row(d, (*lead, *first)), d.other((*lead, *second), flavour="")
    more = d.options(axis=[0, -1, 3]) if "vecdot" in rule else ""
    if "linalg" not in rule and d.chance(0.15):
        core = {"vecdot": ["0, -1"], "matvec": ["(0, 1), -1, 0"], "vecmat": ["0, (-2, -1), -1"]}
        more = f", axes=[{core[rule.rpartition('.')[2]][0]}]"
    if "linalg" not in rule and d.chance(0.3):
        more += d.options(dtype="c16")
    return f"{rule}({x}, {y}{more})"


@cases("tensordot", "linalg.tensordot")
def _tensordot(d: Draw, rule: str) -> str:
    shape = d.shape(1, 3)
    x, y = _row(d, shape), _row(d, d.pick(shape, shape[::-1], shape))
    key = "axes="
    count = d.number(0, min(len(d.shape_of(x)), len(d.shape_of(y))))
    axes = d.pick(count, count, count, ([0], [0]), ([0], [-1]), ([0], [0, 1]))
    return f"{rule}({x}, {y}, {key}{axes})"


@cases("einsum", "einsum_path")
def _einsum(d: Draw, rule: str) -> str:
    n, m, k = (d.pick(0, 1, 2, 3) for _ in range(3))
    text, first, second = d.pick(
        ("ij,jk->ik", (n, m), (m, k)),
        ("ij,ij->", (n, m), (n, m)),
        ("ij,jk", (n, m), (m, k)),
        ("...i,...i->...", (n, m), (n, m)),
        ("ii,i->i", (n, n), (n,)),
        ("i,j->ij", (n,), (m,)),
        ("ij,jk->ik", (n, m), (m + 2, k)),
        ("ij,jk->q", (n, m), (m, k)),
        ("ij,j->ji", (n, m), (m,)),
    )
    call = f"{rule}({text!r}, {_row(d, first)}, {_row(d, second)})"
    return f"({call}, 0)[1]" if "path" in rule else call


@cases("cross", "linalg.cross")
def _crossed(d: Draw, rule: str) -> str:
    lead = d.shape(0, 1)
    length = d.pick(3, 3, 2, 4)
    x, y = _row(d, (*lead, length), "iuf"), _row(d, (*lead, d.pick(length, 3)), "iuf")
    return f"{rule}({x}, {y}{d.options(axis=[-1, 0])})"


@cases("linalg.multi_dot")
def _chain(d: Draw, rule: str) -> str:
    n, m, k = (d.pick(1, 2, 3) for _ in range(3))
    rows = [_row(d, (n, m), "if"), _row(d, (m, k), "if"), _row(d, (k, d.pick(n, 2)), "if")]
    return f"{rule}([{', '.join(rows[: d.pick(1, 2, 3, 3)])}])"


@cases("cov", "corrcoef")
def _covariances(d: Draw, rule: str) -> str:
    x = d.array(kinds="iuf", flavour="", ndim=(1, 2))
    more = d.options(rowvar=[False])
    if d.chance(0.3):
        more = f", {d.array(d.shape_of(x), 'if', flavour='')}{more}"
    more += d.options(ddof=[0, 1], bias=[True], fweights=["[1, 2, 1]"]) if "cov" in rule else ""
    return f"{rule}({x}{more})"


# -- matrices ------------------------------------------------------------------------------------

_LINALG: tuple[str, ...] = (
    "cholesky",
    "cond",
    "det",
    "eig",
    "eigh",
    "eigvals",
    "eigvalsh",
    "inv",
    "matrix_power",
)
_LINALG += ("matrix_rank", "pinv", "qr", "slogdet", "svd", "svdvals", "solve")


@cases(*(f"linalg.{name}" for name in _LINALG))
def _matrices(d: Draw, rule: str) -> str:
    n = d.pick(0, 1, 2, 3)
    lead = d.pick((), (1,), (3,), (5,), (0,), (2, 2), (7,))
    name = rule.rpartition(".")[2]
    wide = name in ("cond", "matrix_rank", "pinv", "qr", "svd", "svdvals")
    core: tuple[int, ...] = (n, d.pick(n, n + 1)) if wide or d.chance(0.06) else (n, n)
    core = core[:1] if d.chance(0.03) else core
    flavour = d.pick("matrix", "matrix", "matrix", "")
    x = d.array((*lead, *core), d.pick("f", "f", "c", "i"), flavour)
    if name == "matrix_power":
        return f"{rule}({x}, {d.pick(0, 1, 2, 3, -1, 1.5)})"
    if name == "solve":
        y = d.array((*lead, n, d.pick(1, 2)) if d.chance(0.8) else (n,), "f", flavour="")
        return f"{rule}({x}, {y})"
    tolerance = d.array(lead, "f", flavour="positive") if d.chance(0.2) else "0.5"
    if name in ("pinv", "matrix_rank"):
        text = f"{rule}({x}{d.options(rtol=[tolerance, '1e-3'])})"
        return text if name == "pinv" or d.chance(0.6) else f"{rule}({x}, tol={tolerance})"
    if name == "svd":
        options = d.options(compute_uv=[False])
        values = "" if options else "[1]"  # vectors have any sign
        return f"np.linalg.svd({x}, full_matrices=False{options}){values}"
    if name == "eigh":
        return f"{rule}({x})[0]"
    if name == "eig":
        return f"{rule}({x})[0]"
    if name == "qr":
        return f"np.abs(np.linalg.qr({x}{d.options(mode='r complete reduced')})[-1])"
    return f"{rule}({x}{d.options(p=['None', 1, repr('fro')]) if name == 'cond' else ''})"


@cases("linalg.lstsq")
def _least_squares(d: Draw, rule: str) -> str:
    rows = d.pick(0, 1, 3, 5)
    x = d.array((rows, d.pick(0, 1, 3)), "f", flavour="")
    y = d.array((d.pick(rows, rows, rows, 2), *d.pick((), (2,))), "f", flavour="")
    return f"{rule}({x}, {y}{d.options(rcond=[0.1])})"


@cases("linalg.norm", "linalg.vector_norm", "linalg.matrix_norm")
def _norms(d: Draw, rule: str) -> str:
    x = d.array()
    orders = ["None", 1, 2, "inf", "-inf", 0, 3, "'fro'", "'nuc'", -1, -2, "'bad'"]
    text = f"{rule}({x}{d.options(ord=orders, keepdims=[True])}"
    return text + (f", axis={d.axes(x)})" if "matrix" not in rule else ")")


@cases("linalg.matrix_transpose", exact=True)
def _matrix_transpose(d: Draw, rule: str) -> str:
    return f"{rule}({d.array()})"


_FFTS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
_FFTS_OF_TWO = ("fft2", "ifft2", "rfft2", "irfft2", "fftn", "ifftn", "rfftn", "irfftn")


@cases(*(f"fft.{name}" for name in _FFTS))
def _transform(d: Draw, rule: str) -> str:
    x = d.array(flavour="", kinds="iuffcc", ndim=(1, 3))
    points = [1, 3, 4, 0, -1] if 0 not in d.shape_of(x) else [0, -1]  # NumPy's are then any numbers
    options = d.options(n=points, norm="ortho forward backward")
    if d.chance(0.05) and np.dtype(d.of(x).dtype).kind == "f":
        options = ", norm='bad'"
    return f"{rule}({x}, axis={d.axis(x)}{options})"


@cases(*(f"fft.{name}" for name in _FFTS_OF_TWO))
def _transforms(d: Draw, rule: str) -> str:
    x = d.array(flavour="", kinds="iuffcc", ndim=(2, 3))
    lengths = [(2, 3), (3, 4), (0, 1)] if 0 not in d.shape_of(x) else [(0, 1)]
    more = d.options(s=lengths, norm="ortho", axes=[(0, 1), (-1, 0)])
    more += ", axes=(1, 1)" if "axes" not in more and "s=" not in more and d.chance(0.1) else ""
    return f"{rule}({x}{more})"


@cases("fft.fftshift", "fft.ifftshift", exact=True)
def _shifted(d: Draw, rule: str) -> str:
    x = d.array(ndim=(1, 3))  # of no axes NumPy's fails by accident
    return f"{rule}({x}, {d.axes(x)})"


# -- neighbours, lines and bits ------------------------------------------------------------------


@cases("gradient")
def _gradient(d: Draw, rule: str) -> str:
    x = d.array(kinds="iuf", flavour="", ndim=(1, 3))
    axis = d.axis(x)
    shape = d.shape_of(x)
    length = shape[axis] if -len(shape) <= axis < len(shape) else 1
    step = d.pick("", ", 2.0", f", np.arange({length}) ** 2 + 1.0" if length > 1 else "")
    return f"{rule}({x}{step}, axis={axis}{d.options(edge_order=[1, 2, 3])})"


@cases("convolve", "correlate")
def _convolved(d: Draw, rule: str) -> str:
    x, y = (d.array(d.shape(1, 1), flavour="", kinds="biufc") for _ in range(2))
    return f"{rule}({x}, {y}{d.options(mode='same valid full bad')})"


@cases("ediff1d")
def _ediff(d: Draw, rule: str) -> str:
    return f"{rule}({d.array(flavour='')}{d.options(to_end=[1, [1, 2]], to_begin=[0, 1.5])})"


@cases("trapezoid")
def _trapezoid(d: Draw, rule: str) -> str:
    x = d.array(kinds="iufc", flavour="", ndim=(1, 3))
    return f"{rule}({x}, axis={d.axis(x)}{d.options(dx=[2.0])})"


@cases("unwrap")
def _unwrapped(d: Draw, rule: str) -> str:
    x = d.array(kinds="if", flavour="")
    return f"{rule}({x}, axis={d.axis(x)}{d.options(period=[3, 6.5])})"


@cases("packbits", "unpackbits", exact=True)
def _bits(d: Draw, rule: str) -> str:
    x = d.array(kinds=d.pick("b", "u", "i"), dtype="uint8" if "unpack" in rule else "", flavour="")
    axis = d.pick("None", d.axis(x))
    return f"{rule}({x}, axis={axis}{d.options(bitorder='little')})"

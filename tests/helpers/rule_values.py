"""Random calls of reductions, of what works element by element, and of orders, sets and counts."""

from __future__ import annotations

from tests.helpers.rule_draw import (
    DTYPE_TEXTS,
    Draw,
    cases,
    mask,
)

__all__: list[str] = []


# -- reductions ----------------------------------------------------------------------------------


@cases("sum", "prod", "nansum", "nanprod")
def _sums(d: Draw, rule: str) -> str:
    x = d.array(flavour=d.pick("unit", None) if "sum" in rule else "unit")
    text = f"{rule}({x}, axis={d.axes(x)}"
    text += d.options(dtype=["'f8'", "'f4'", "'i4'", "'c16'", "bool"], keepdims=[True, False])
    text += d.options(initial=[0, 2, "None"]) if d.chance(0.4) else ""
    text += f", where={mask(d, x)}" if d.chance(0.25) else ""
    return d.with_out(text + ")")


@cases("min", "max", "amin", "amax", "nanmin", "nanmax", exact=True)
def _extremes(d: Draw, rule: str) -> str:
    x = d.array()
    text = f"{rule}({x}, axis={d.axes(x)}{d.options(keepdims=[True, False])}"
    if d.chance(0.3):
        text += d.options(initial=[0, 2, "None"])
        text += f", where={mask(d, x)}"
    return d.with_out(text + ")", kinds="")


@cases("all", "any", exact=True)
def _tests(d: Draw, rule: str) -> str:
    x = d.array()
    where = f", where={mask(d, x)}" if d.chance(0.3) else ""
    return d.with_out(f"{rule}({x}, axis={d.axes(x)}{d.options(keepdims=[True])}{where})")


@cases("mean", "std", "var", "nanmean", "nanstd", "nanvar")
def _means(d: Draw, rule: str) -> str:
    x = d.array()
    text = f"{rule}({x}, axis={d.axes(x)}"
    text += d.options(dtype="f8 f4 c16 i8", keepdims=[True, False])
    if "mean" not in rule:
        text += d.options(**{d.pick("ddof", "correction"): [0, 1, 5]})
    text += f", where={mask(d, x)}" if d.chance(0.25) else ""
    return d.with_out(text + ")", kinds="fc")  # NumPy divides into whole numbers, too


@cases("ptp", "argmin", "argmax", "nanargmin", "nanargmax", exact=True)
def _places(d: Draw, rule: str) -> str:
    x = d.array()
    axis = d.axes(x) if "ptp" in rule else d.pick("None", d.axis(x))
    # The helper gives `out` its own dtype: places are written into whole numbers only.
    return d.with_out(f"{rule}({x}, axis={axis}{d.options(keepdims=[True])})", kinds="")


@cases("count_nonzero", exact=True)
def _counts(d: Draw, rule: str) -> str:
    x = d.array()
    return f"{rule}({x}, axis={d.axes(x)}{d.options(keepdims=[True])})"


@cases("median", "nanmedian")
def _median(d: Draw, rule: str) -> str:
    x = d.array()
    return d.with_out(f"{rule}({x}, axis={d.axes(x)}{d.options(keepdims=[True])})", kinds="")


@cases("quantile", "percentile", "nanquantile", "nanpercentile")
def _quantiles(d: Draw, rule: str) -> str:
    x = d.array()
    q = d.pick("0.5", "[0.25, 0.5]", "[[0.0], [1.0]]", "0", "1.5", "[]", "-1", "'x'")
    q = "0.5" if q == "[]" and 0 in d.shape_of(x) else q
    q = d.array((2,), dtype="float64", flavour="unit") if d.chance(0.1) else q
    axes = d.axes(x) if d.ndim(x) else "None"
    text = f"{rule}({x}, {q}, axis={axes}{d.options(keepdims=[True])}"
    if d.chance(0.4):
        methods = ["lower", "nearest", "midpoint", "median_unbiased", "inverted_cdf", "bad"]
        text += f", method={d.pick(*methods)!r}"
    if d.chance(0.15) and q != "[]":
        weights = d.other(d.shape_of(x), "f", flavour="positive")
        text += f", weights={weights}, method='inverted_cdf'" if "method" not in text else ""
    # With this method NumPy takes no `out` of another dtype.
    return d.with_out(text + ")", kinds="" if "inverted_cdf" in text else "biufc")


@cases("average")
def _average(d: Draw, rule: str) -> str:
    x = d.array()
    axis = d.axes(x)
    text = f"{rule}({x}, axis={axis}"
    if d.chance(0.6):
        shape = d.shape_of(x)
        if axis.lstrip("-").isdigit() and d.chance(0.6) and -len(shape) <= int(axis) < len(shape):
            shape = (shape[int(axis)],)
        elif axis.startswith(("(-", "(0", "(1")):
            named = [one for one in eval(axis) if -len(shape) <= one < len(shape)]
            shape = tuple(shape[one] for one in named) if d.chance(0.6) else shape
        weights = d.pick(
            d.array(shape, "if", flavour=d.pick("positive", "")), d.literal(shape, "if")
        )
        text += f", weights={weights}"
    return text + d.options(returned=[True], keepdims=[True]) + ")"


@cases("cumsum", "cumprod", "nancumsum", "nancumprod")
def _scans(d: Draw, rule: str) -> str:
    x = d.array(flavour="unit" if "prod" in rule else None)
    text = f"{rule}({x}, axis={d.pick('None', d.axis(x))}{d.options(dtype='f8 i4')})"
    return d.with_out(text)


@cases("ufunc.accumulate")
def _accumulated(d: Draw, rule: str) -> str:
    name = d.pick("add", "multiply", "maximum", "subtract", "logaddexp", "logical_or", "hypot")
    x = d.array(flavour="unit" if name == "multiply" else None)
    text = f"np.{name}.accumulate({x}, axis={d.pick(d.axis(x), d.axis(x), 'None')}"
    return d.with_out(f"{text}{d.options(dtype='f8')})")


@cases("cumulative_sum", "cumulative_prod")
def _cumulative(d: Draw, rule: str) -> str:
    x = d.array(flavour="unit" if "prod" in rule else None)
    axis = f", axis={d.axis(x)}" if d.chance(0.7) else ""
    return f"{rule}({x}{axis}{d.options(include_initial=[True], dtype='f8')})"


@cases("diff")
def _diff(d: Draw, rule: str) -> str:
    x = d.array(flavour="")
    text = f"{rule}({x}, {d.pick(0, 1, 1, 2, 3, -1)}, axis={d.axis(x)}"
    return text + (d.options(prepend=[0], append=[0, 1.5]) if d.chance(0.3) else "") + ")"


@cases("apply_over_axes")
def _over_axes(d: Draw, rule: str) -> str:
    x = d.array(flavour="")
    return f"{rule}(np.{d.pick('sum', 'max')}, {x}, {d.pick(0, [0], [0, 1], -1)})"


# -- element by element --------------------------------------------------------------------------


@cases("angle", "real", "imag", "around", "round", "fix", "i0", "sinc", "isneginf", "isposinf")
def _plainly(d: Draw, rule: str) -> str:
    x = d.array()
    more = d.pick("", ", 1", ", -1", ", 0") if "round" in rule or "around" in rule else ""
    return f"{rule}({x}{more})"


@cases("iscomplex", "isreal", "iscomplexobj", "isrealobj", "shape", "size", "ndim", exact=True)
def _facts(d: Draw, rule: str) -> str:
    x = d.array()
    more = f", {d.pick(d.axis(x), 0)}" if rule == "np.size" and d.chance(0.5) else ""
    return f"{rule}({x}{more})"


@cases("can_cast", "common_type", "result_type", "min_scalar_type", exact=True)
def _types(d: Draw, rule: str) -> str:
    x = d.array(flavour="")
    if rule == "np.can_cast":
        return f"{rule}({x}.dtype if True else {x}, {d.pick(*DTYPE_TEXTS)})"
    if rule == "np.min_scalar_type":
        return f"{rule}({x})"
    return f"{rule}({x}, {d.array(flavour='')})"


@cases("nan_to_num", "real_if_close")
def _cleaned(d: Draw, rule: str) -> str:
    more = d.options(nan=[1, 2.5], posinf=[9], neginf=[-9]) if "nan" in rule else ""
    return f"{rule}({d.array()}{more})"


@cases("clip")
def _clip(d: Draw, rule: str) -> str:
    x = d.array(kinds="iuf")
    bound = d.pick("None", d.scalar(), d.other(d.stretched(d.shape_of(x)), "if", flavour=""))
    return d.with_out(f"{rule}({x}, {bound}, {d.pick('None', d.scalar(), d.scalar())})")


@cases("isclose", "allclose", "array_equal", "array_equiv", exact=True)
def _compared(d: Draw, rule: str) -> str:
    x = d.array()
    y = d.other(d.stretched(d.shape_of(x)) if d.chance(0.8) else d.shape())
    y = x if d.chance(0.2) else y
    more = d.options(equal_nan=[True]) if rule != "np.array_equiv" else ""
    return f"{rule}({x}, {y}{more})"


@cases("operator.eq", "operator.ne", exact=True)
def _equal(d: Draw, rule: str) -> str:
    x = d.array()
    y = d.pick(x, d.array(d.stretched(d.shape_of(x), wrong=0.0)), d.other(d.shape_of(x)))
    return f"{x} {'==' if rule.endswith('eq') else '!='} {y}"


@cases("where", exact=True)
def _where(d: Draw, rule: str) -> str:
    shape = d.shape()
    mask = d.array(d.stretched(shape), d.pick("b", "b", "i"))
    if d.chance(0.1):
        return f"{rule}({mask})"
    return f"{rule}({mask}, {d.other(d.stretched(shape))}, {d.other(d.stretched(shape))})"


@cases("choose", exact=True)
def _choose(d: Draw, rule: str) -> str:
    shape = d.shape()
    x = d.array(shape, dtype=d.dtype("i"), flavour="index:3")
    rows = ", ".join(d.other(d.stretched(shape), "i") for _ in range(d.pick(2, 3, 3)))
    return f"{rule}({x}, [{rows}]{d.options(mode='wrap clip')})"


@cases("select", exact=True)
def _select(d: Draw, rule: str) -> str:
    shape = d.shape()
    masks = [d.array(shape, "b") for _ in range(2)]
    rows = [d.other(d.stretched(shape), "if", flavour="") for _ in range(d.pick(2, 2, 2, 1))]
    return f"{rule}([{', '.join(masks)}], [{', '.join(rows)}]{d.options(default=[0, 1.5])})"


@cases("piecewise", exact=True)
def _piecewise(d: Draw, rule: str) -> str:
    x = d.array(kinds="if", flavour="")
    return f"{rule}({x}, [{x} < 0, {x} > 1], {d.pick('[1, 2]', '[1, 2, 3]', '[5]', '[1]')})"


@cases("polyval")
def _polyval(d: Draw, rule: str) -> str:
    return f"{rule}({d.pick('[1, 2]', '[]', '[2.0, 0, 1]')}, {d.array(flavour='')})"


@cases("interp")
def _interp(d: Draw, rule: str) -> str:
    x = d.array(kinds="if", flavour="")
    y = d.array((4,), "f", flavour="")
    return f"{rule}({x}, [0, 1, 2, 4], {d.pick('[1, 3, 2, 0]', y, '[1, 2]')}{d.options(left=[0])})"


@cases("digitize", exact=True)
def _digitize(d: Draw, rule: str) -> str:
    x = d.array(kinds="iuf", flavour="")
    bins = d.pick("[0, 1, 3]", "[3, 1, 0]", "[]", "[0, 2, 1]", d.array((4,), "f", flavour="sorted"))
    return f"{rule}({x}, {bins}{d.options(right=[True])})"


@cases("searchsorted", exact=True)
def _searchsorted(d: Draw, rule: str) -> str:
    x = d.array(kinds="iuf", flavour="sorted", ndim=(1, 1))
    return f"{rule}({x}, {d.other(d.shape(), 'iuf', flavour='')}{d.options(side='right')})"


@cases("astype", "copy", exact=True)
def _copies(d: Draw, rule: str) -> str:
    x = d.array(flavour="")
    more = f", {d.pick(*DTYPE_TEXTS)}{d.options(copy=[False])}" if "astype" in rule else ""
    return f"{rule}({x}{more})"


# -- made ----------------------------------------------------------------------------------------


@cases("zeros_like", "ones_like", "full_like", "empty_like", exact=True)
def _likes(d: Draw, rule: str) -> str:
    x = d.array(flavour="")
    value = f", {d.scalar('if')}" if "full" in rule else ""
    shape = repr(d.shape(0, 2))
    text = f"{rule}({x}{value}{d.options(dtype=DTYPE_TEXTS, shape=[shape])})"
    return f"({text}.shape, {text}.dtype)" if "empty" in rule else text


@cases("linspace", "logspace", "geomspace")
def _spaces(d: Draw, rule: str) -> str:
    flavour = d.pick("positive", "positive", "") if "geom" in rule else "positive"
    x = d.array(kinds="if", flavour=flavour, ndim=(0, 2))
    stop = d.pick("3", "5.0", d.array(d.shape_of(x), "f", flavour="positive"))
    num = d.pick(0, 1, 2, 5, -1)
    more = d.options(endpoint=[False], axis=[0, -1, 1], retstep=[True])
    more = more if "linspace" in rule else more.replace(", retstep=True", "")
    return f"{rule}({x}, {stop}, {num}{more})"


@cases("meshgrid", "ix_", "vander")
def _grids(d: Draw, rule: str) -> str:
    x = d.array(kinds="iuf", ndim=(1, 1), flavour="")
    if "vander" in rule:
        return f"{rule}({x}, {d.pick('None', 0, 2, 3)}{d.options(increasing=[True])})"
    y = d.array(kinds="iuf", ndim=(1, 1), flavour="")
    return f"{rule}({x}, {y})"


# -- orders and sets -----------------------------------------------------------------------------


@cases("sort", "argsort", "sort_complex", exact=True)
def _sorted(d: Draw, rule: str) -> str:
    x = d.array()
    if "complex" in rule:
        return f"{rule}({x})"
    kind = ", kind='stable'" if "arg" in rule else d.options(kind="stable heapsort")
    return f"{rule}({x}, axis={d.pick(d.axis(x), d.axis(x), 'None')}{kind})"


@cases("partition", "argpartition", exact=True)
def _partitioned(d: Draw, rule: str) -> str:
    x = d.array(tuple(max(1, n) for n in d.shape(1, 3)), flavour="")
    axis = d.axis(x)
    where = d.pick(0, 1, -1, 2)
    text = f"{rule}({x}, {where}, axis={axis})"
    if "arg" in rule:
        text = f"np.take_along_axis({x}, {text}, {axis})"
    return f"np.take({text}, [{where}], axis={axis})"


@cases("lexsort", exact=True)
def _lexsort(d: Draw, rule: str) -> str:
    shape = d.shape(1, 2)
    first, second = d.array(shape, "iu"), d.array(shape, "if", flavour="")
    return f"{rule}(({first}, {second}){d.options(axis=[0, -1, 4])})"


@cases("unique", "unique_all", "unique_counts", "unique_inverse", "unique_values", exact=True)
def _uniques(d: Draw, rule: str) -> str:
    text = d.array(kinds="biuf")
    if rule == "np.unique_values":
        return f"np.sort({rule}({text}))"
    if rule == "np.unique_inverse":  # which of several NaN each is, is open
        return f"np.take(*{rule}({text}))"
    more = ""
    if rule == "np.unique":
        flags = {"return_index": [True], "return_inverse": [True], "return_counts": [True]}
        more = d.options(**flags, axis=[0])
        more += ", equal_nan=False" if "inverse" not in more and d.chance(0.3) else ""
    return f"{rule}({text}{more})"


@cases("isin", "intersect1d", "union1d", "setdiff1d", "setxor1d", exact=True)
def _sets(d: Draw, rule: str) -> str:
    x = d.array(kinds="biuf")
    y = d.other(d.shape(0, 2), "biuf")
    more = d.options(invert=[True]) if "isin" in rule else ""
    more = d.options(return_indices=[True]) if "intersect" in rule else more
    return f"{rule}({x}, {y}{more})"


# -- counts --------------------------------------------------------------------------------------


@cases("histogram", "histogram_bin_edges")
def _histogram(d: Draw, rule: str) -> str:
    x = d.array(kinds="biuf", flavour="")
    bins = d.pick(
        "3", "[0, 1, 2]", "[2, 1]", "0", "1", "'auto'", "2.5", d.array((3,), "f", "sorted")
    )
    more = d.options(range=[(0, 4), (1, 1), (2, 0)])
    if d.chance(0.3):
        more += f", weights={d.other(d.shape_of(x), 'if', flavour='')}"
    if rule == "np.histogram":
        more += d.options(density=[True])
    return f"{rule}({x}, {bins}{more})"


@cases("histogramdd", "histogram2d")
def _histograms(d: Draw, rule: str) -> str:
    n = d.pick(0, 1, 3, 5)
    more = d.options(density=[True], range=["[(0, 3), (0, 3)]", "[(0, 3), None]"])
    bins = d.pick(2, [2, 3], "[[0, 1, 2], 2]", [2, 2, 2], 0)
    if "2d" in rule:
        x, y = (d.array((n,), "if", flavour="") for _ in range(2))
        return f"{rule}({x}, {y}, {bins}{more})"
    x = d.array((n, 2), "if", flavour="")
    if d.chance(0.3):
        more += f", weights={d.array((n,), 'if', flavour='')}"
    return f"{rule}({x}, {bins}{more})"


@cases("bincount")
def _bincount(d: Draw, rule: str) -> str:
    x = d.array(
        d.shape(1, 1) if d.chance(0.9) else d.shape(), d.pick("iu", "iu", "f", "b"), "index:5"
    )
    weights = d.array(d.shape_of(x), "if", flavour="") if d.chance(0.4) else "None"
    return f"{rule}({x}, {weights}, {d.pick(0, 3, 9, -1)})"

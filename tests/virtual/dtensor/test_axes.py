"""Axes that an array lacks, or that are no axes: NumPy's kinds of errors, on all ranks."""

from __future__ import annotations

from tests.helpers.depth import is_deep
from tests.helpers.rule_fuzz import Case, Operand, problems

AXES = ["99", "-99", "-1", "1.5", "'a'", "None", "np.int64(1)", "np.array(1)", "()", "[]", "[0]"]
AXES += ["(0,)", "(0, 0)", "(0, 99)", "(0, 'a')", "np.array([0, 1])"]

CUBE = Operand("S0", (4, 3, 2), "float64", 1)

REDUCED = ["sum", "prod", "min", "max", "amin", "amax", "all", "any", "mean", "std", "var", "ptp"]
REDUCED += ["argmin", "argmax", "nansum", "nanprod", "nanmin", "nanmax", "nanmean", "nanstd"]
REDUCED += ["nanvar", "nanargmin", "nanargmax", "median", "nanmedian", "count_nonzero", "average"]
ALONG = ["cumsum", "cumprod", "nancumsum", "nancumprod", "cumulative_sum", "cumulative_prod"]
ALONG += ["diff", "sort", "flip", "expand_dims", "squeeze", "unstack", "unwrap", "trapezoid"]
ALONG += ["gradient"]
METHODS = ["sum", "prod", "min", "max", "mean", "std", "var", "all", "any", "argmin", "argmax"]
METHODS += ["cumsum", "cumprod", "squeeze"]
FFTS = ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"]
FFTS_OF_TWO = ["fft2", "ifft2", "fftn", "ifftn", "rfft2", "rfftn", "irfftn"]

CALLS = [
    *(f"np.{name}(x0, axis=%s)" for name in REDUCED),
    *(f"np.{name}(x0, axis=%s)" for name in ALONG),
    *(f"x0.{name}(axis=%s)" for name in METHODS),
    *(f"np.fft.{name}(x0, axis=%s)" for name in FFTS),
    *(f"np.fft.{name}(x0, axes=%s)" for name in FFTS_OF_TWO),
    "np.argsort(x0, axis=%s, kind='stable')",
    "x0.argsort(axis=%s, kind='stable')",
    "np.packbits(x0 > 0, axis=%s)",
    "np.unpackbits(x0.astype(np.uint8), axis=%s)",
    "np.fft.fftshift(x0, axes=%s)",
    "np.fft.ifftshift(x0, axes=%s)",
    "np.quantile(x0, 0.5, axis=%s)",
    "np.percentile(x0, [25, 50], axis=%s)",
    "np.nanquantile(x0, 0.5, axis=%s)",
    "np.nanpercentile(x0, 50, axis=%s)",
    "np.add.reduce(x0, axis=%s)",
    "np.hypot.reduce(x0, axis=%s)",
    "np.roll(x0, 1, axis=%s)",
    "np.rot90(x0, 1, axes=%s)",
    "np.rollaxis(x0, %s)",
    "np.rollaxis(x0, 1, %s)",
    "np.moveaxis(x0, %s, 0)",
    "np.moveaxis(x0, 0, %s)",
    "np.swapaxes(x0, %s, 1)",
    "np.swapaxes(x0, 0, %s)",
    "np.transpose(x0, %s)",
    "np.permute_dims(x0, %s)",
    "x0.transpose(%s)",
    "x0.swapaxes(0, %s)",
    "x0.repeat(2, axis=%s)",
    "x0.take([0], axis=%s)",
    "x0.diagonal(0, %s, 1)",
    "x0.trace(0, 0, %s)",
    "x0.compress([True], axis=%s)",
    "then(x0, x0.sort(axis=%s))",
    "np.take(x0, [0], axis=%s)",
    "np.take_along_axis(x0, np.zeros((4, 3, 2), int), axis=%s)",
    "then(x0, np.put_along_axis(x0, np.zeros((4, 3, 2), int), 1, axis=%s))",
    "np.compress([True], x0, axis=%s)",
    "np.delete(x0, 1, axis=%s)",
    "np.insert(x0, 1, 7, axis=%s)",
    "np.append(x0, x0, axis=%s)",
    "np.concatenate([x0, x0], axis=%s)",
    "np.concat([x0, x0], axis=%s)",
    "np.stack([x0, x0], axis=%s)",
    "np.repeat(x0, 2, axis=%s)",
    "np.split(x0, 1, axis=%s)",
    "np.array_split(x0, 2, axis=%s)",
    "np.diagonal(x0, 0, %s, 1)",
    "np.trace(x0, 0, 0, %s)",
    "np.partition(x0, 1, axis=%s)[:0]",
    "np.argpartition(x0, 1, axis=%s)[:0]",
    "np.lexsort((x0, x0), axis=%s)",
    "np.apply_over_axes(np.sum, x0, %s)",
    "np.tensordot(x0, x0, axes=%s)",
    "np.tensordot(x0, x0, axes=(%s, 0))",
    "np.linalg.norm(x0, axis=%s)",
    "np.linalg.vector_norm(x0, axis=%s)",
    "np.linalg.vecdot(x0, x0, axis=%s)",
    "np.linalg.cross(x0[:3], x0[:3], axis=%s)",
    "np.cross(x0[:3], x0[:3], axis=%s)",
    "np.cross(x0[:3], x0[:3], %s, 0)",
    "np.cross(x0[:3], x0[:3], 0, 0, %s)",
    "np.vecdot(x0, x0, axis=%s)",
    "np.linspace(x0, x0, 3, axis=%s)",
    "np.logspace(x0, x0, 3, axis=%s)",
    "np.geomspace(x0 + 9, x0 + 9, 3, axis=%s)",
    "np.size(x0, %s)",
]


ACCIDENTS = {
    "np.fft.": ("99", "-99", "np.array(1)"),  # looked up in the shape; shifted
    "np.tensordot(x0, x0, axes": ("-99", "-1", "np.array(1)"),  # -1 axes are taken for none
    "np.cumulative_": ("(0,)", "(0, 99)"),
    "np.unstack": ("(0,)", "(0, 99)", "[0]"),
    "np.linalg.norm": ("1.5",),  # taken for 1
    "np.linalg.vector_norm": ("1.5",),
}
"""What NumPy does with these, no one means."""


def by_accident(call: str, axis: str) -> bool:
    if call.startswith("np.fft.") and "axes=" not in call:
        return False
    return any(call.startswith(begin) and axis in axes for begin, axes in ACCIDENTS.items())


def test_wrong_axes_raise_what_numpy_raises():
    calls = [(call, axis) for call in CALLS for axis in AXES if not by_accident(call, axis)]
    calls = calls if is_deep() else calls[::7]
    found = problems([Case("a=2", call % axis, (CUBE,), exact=False) for call, axis in calls])
    assert not found, f"{len(found)} of {len(calls)}:\n" + "\n".join(found)


TRUTHS = ("True", "(True,)")
TAKE_TRUTHS = ["sort", "flip", "roll", "diff", "stack", "moveaxis", "swapaxes", "expand_dims"]
REFUSE_TRUTHS = ["sum", "prod", "min", "max", "all", "any", "mean", "std", "var", "nansum"]


def test_a_truth_value_is_an_axis_where_numpy_takes_it_for_one():
    calls = [call for call in CALLS if call.split("(")[0].removeprefix("np.") in TAKE_TRUTHS]
    cases = [Case("a=2", call % "True", (CUBE,), exact=False) for call in calls]
    refused = [f"np.{name}(x0, axis={axis})" for name in REFUSE_TRUTHS for axis in TRUTHS]
    cases += [Case("a=2", call, (CUBE,), exact=False) for call in refused]
    found = problems(cases)
    assert len(calls) >= len(TAKE_TRUTHS)
    assert not found, "\n".join(found)

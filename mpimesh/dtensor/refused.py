"""Functions of NumPy that have no rule for split arrays on purpose, and what to do instead."""

from __future__ import annotations

__all__ = ["ADVICE", "REFUSED"]

ADVICE = (
    "call it on x.full(), on blocks with local_map, or within `with mm.allow_gather():`, where "
    "every rank gets the whole arrays"
)

_SAVED = (
    'mm.save_array("x.npy", x) writes it, each rank its part; or let one rank save x.full(root=0)'
)
_SHOWN = "print(x) shows this rank's block; x.full() is the whole array, on all ranks"
_YOURS = "it calls your function on lines: mm.local_map(f, layout)(x) calls one on blocks"
_SMALL = f"it is for a few coefficients: {ADVICE}"
_MEMORY = "ask that of two blocks, x.local and y.local: it may differ from rank to rank"
_ORDER = "what an element becomes depends on all that come before it: write by x[mask] = value"
_DAYS = f"it is done element by element: {ADVICE}"

REFUSED: dict[str, str] = {
    "numpy.apply_along_axis": _YOURS,
    "numpy.array2string": _SHOWN,
    "numpy.array_repr": _SHOWN,
    "numpy.array_str": _SHOWN,
    "numpy.busday_count": _DAYS,
    "numpy.busday_offset": _DAYS,
    "numpy.datetime_as_string": _DAYS,
    "numpy.is_busday": _DAYS,
    "numpy.linalg.lstsq": ADVICE,
    "numpy.linalg.tensorinv": ADVICE,
    "numpy.linalg.tensorsolve": ADVICE,
    "numpy.may_share_memory": _MEMORY,
    "numpy.place": _ORDER,
    "numpy.poly": _SMALL,
    "numpy.polyadd": _SMALL,
    "numpy.polyder": _SMALL,
    "numpy.polydiv": _SMALL,
    "numpy.polyfit": _SMALL,
    "numpy.polyint": _SMALL,
    "numpy.polymul": _SMALL,
    "numpy.polysub": _SMALL,
    "numpy.roots": _SMALL,
    "numpy.save": _SAVED,
    "numpy.savetxt": _SAVED,
    "numpy.savez": _SAVED,
    "numpy.savez_compressed": _SAVED,
    "numpy.shares_memory": _MEMORY,
}
"""For each its name, and what its error says."""

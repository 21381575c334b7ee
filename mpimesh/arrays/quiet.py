"""Calls of NumPy that overflow and make NaN in silence, as MPI's reductions do.

`np.errstate` says the same for a block of code. To enter and leave it takes 2 us, more than a small
sum takes. NumPy keeps what it says in a context variable, so a context in which that is set once,
for good, serves all later calls.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from typing import Any

import numpy as np

__all__ = ["quiet_calls"]


def quiet_calls() -> Callable[..., Any]:
    """Return what calls a function, ``quietly(function, *arguments)``, without NumPy's warnings.

    Not for two threads at a time, and for nothing that runs Python: a signal handler that came in
    between could not use it again.
    """
    context = Context()
    context.run(np.seterr, all="ignore")
    return context.run

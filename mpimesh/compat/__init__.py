"""Words of other systems, for programs that come from there: kapsl, shrew, burn, TVM, TensorFlow.

Each module is built on what mpimesh offers anyway, and nothing else in mpimesh knows it.
"""

from __future__ import annotations

from mpimesh.compat import burn, kapsl, shrew, tensorflow, tvm

__all__ = ["burn", "kapsl", "shrew", "tensorflow", "tvm"]

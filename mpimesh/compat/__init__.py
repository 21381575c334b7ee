"""Words of other systems, for programs that come from there: kapsl, burn, TVM, TensorFlow.

Each module is built on what mpimesh offers anyway, and nothing else in mpimesh knows it.
"""

from __future__ import annotations

from mpimesh.compat import burn, kapsl, tensorflow, tvm

__all__ = ["burn", "kapsl", "tensorflow", "tvm"]

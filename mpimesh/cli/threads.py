"""The number of NumPy's threads for a rank: its share of its node's cores."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mpimesh.cli.facts_rank import THREAD_VARIABLES, cpu_quota, node_name
from mpimesh.runtime import DeviceMesh, Launch
from mpimesh.runtime.agreement import agree

__all__ = ["fair_threads", "share_cores"]


def share_cores(
    mesh: DeviceMesh, environment: Mapping[str, str] | None = None
) -> AbstractContextManager[object]:
    """Return a context in which this rank takes its share of its node's cores. Collective.

    Left to itself each rank takes a thread for each core that it sees, and they all are slow. What
    the environment says, OMP_NUM_THREADS for one, is left as it is.
    """
    environment = os.environ if environment is None else environment
    group = mesh.group()
    cores = sorted(os.sched_getaffinity(0))
    here = [node_name(Launch.detect(environment)), cores, cpu_quota()]
    ranks = agree(group._core, "the cores of the ranks", here)
    threads = fair_threads(ranks, group.rank or 0)
    if any(name in environment for name in THREAD_VARIABLES):
        return nullcontext()
    try:
        # NumPy has started its threads already, when it was imported: now only this library can
        # tell them.
        control: Any = importlib.import_module("threadpoolctl")
    except ImportError:
        return nullcontext()
    limits: AbstractContextManager[object] = control.threadpool_limits(threads)
    return limits


def fair_threads(ranks: Sequence[tuple[str, Sequence[int], float]], rank: int) -> int:
    """Return how many threads `rank` should take.

    Args:
        ranks: Of each rank the node, the cores that it may run on, and how many cores' time its
            control group may use, 0 if all.
        rank: Which of them.
    """
    node, cores, quota = ranks[rank]
    neighbours = [other for other in ranks if other[0] == node]
    rivals = sum(not set(cores).isdisjoint(other[1]) for other in neighbours)
    fair = len(cores) / rivals
    if quota:
        fair = min(fair, quota / len(neighbours))
    return max(1, int(fair))

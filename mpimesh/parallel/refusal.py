"""A refusal of one rank, raised on all ranks that do something together."""

from __future__ import annotations

from typing import NoReturn

from mpimesh import errors
from mpimesh.arguments import rank_names
from mpimesh.errors import ModuleError, MpimeshError, on_all_ranks
from mpimesh.runtime import ProcessGroup
from mpimesh.runtime.agreement import exchange

__all__ = ["raise_refusal"]


def raise_refusal(group: ProcessGroup, problem: MpimeshError | None, *, what: str) -> NoReturn:
    """Raise what any rank of `group` found. Collective, once all know that one of them refuses.

    Args:
        group: The ranks.
        problem: What this rank found; None if it found nothing.
        what: Names the wait in reports.

    Raises:
        MpimeshError: On every rank: of the class of the first, with the text of each.

    Cost:
        Two all-gathers of small texts.
    """
    mine = None if problem is None else (type(problem).__name__, str(problem))
    told = exchange(group._core.progress, group.communicator, mine, what=what)
    kinds = [one[0] for one in told if one]
    by_text: dict[str, list[int]] = {}
    for rank, one in zip(group.ranks, told, strict=True):
        if one:
            by_text.setdefault(one[1], []).append(rank)
    error: MpimeshError = getattr(errors, kinds[0], ModuleError)(
        "; ".join(f"{rank_names(ranks)}: {text}" for text, ranks in by_text.items())
    )
    raise on_all_ranks(error)

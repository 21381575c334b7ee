"""Do all replicas hold the same parameters? Collective questions with readable answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

import numpy as np

from mpimesh.arguments import digest_text
from mpimesh.arrays import Array, to_numpy
from mpimesh.errors import MismatchError, on_all_ranks
from mpimesh.nn import Parameter
from mpimesh.runtime import ProcessGroup
from mpimesh.runtime.agreement import agree
from mpimesh.runtime.call import Call

__all__ = [
    "agree_parameters",
    "agree_together",
    "agree_touched",
    "agree_values",
    "describe",
    "difference",
    "digest",
]


def describe(parameter: Parameter, name: str) -> str:
    """Return the text by which two ranks compare a parameter: name, shape, dtype."""
    return f"{name} {parameter.shape} {parameter.dtype}"


def agree_parameters(
    named: Sequence[tuple[str, Parameter]], group: ProcessGroup, rule: str
) -> None:
    """Return if all ranks of `group` have parameters of the same names, shapes and dtypes.

    Collective.

    Args:
        named: This rank's parameters, in its order.
        group: The replicas.
        rule: What else must agree.

    Raises:
        MismatchError: On every rank, naming the first parameter that differs.

    Cost:
        One all-reduce of 40 bytes.
    """
    _agree([describe(parameter, name) for name, parameter in named], group, rule)


def agree_values(
    named: Sequence[tuple[str, Parameter]], group: ProcessGroup, *, cure: str = ""
) -> None:
    """Return if all ranks of `group` hold the same values, bit for bit. Collective.

    Args:
        named: This rank's parameters, in its order.
        group: The replicas.
        cure: What to do where they do not.

    Raises:
        MismatchError: On every rank, naming the first parameter that differs.

    Cost:
        One all-reduce of 40 bytes, and reading all parameters once.
    """
    texts = [f"{name} with values {digest(p)}" for name, p in named]
    _agree(texts, group, "same values", cure)


def agree_together(scope: ProcessGroup, questions: Sequence[Callable[[], None]]) -> None:
    """Ask several collective questions, and return if no rank of `scope` got a no. Collective.

    Each question goes among ranks of its own, which alone hear the answer. If it raised there at
    once, the other ranks would go on, and wait for them.

    Args:
        scope: The ranks of all groups together.
        questions: Raise a MismatchError on all ranks that they are asked of.

    Raises:
        MismatchError: On every rank, with what the ranks have heard.

    Cost:
        Beside the questions, an all-reduce of 40 bytes.
    """
    problem: MismatchError | None = None
    for question in questions:
        try:
            question()
        except MismatchError as error:
            problem = problem or error
    agree(scope._core, "comparison of replicas", problem=problem)


def agree_touched(untouched: Sequence[str], group: ProcessGroup) -> None:
    """Return if the same parameters got a gradient on all ranks of `group`. Collective.

    Args:
        untouched: The names of those that got none on this rank.
        group: The replicas.

    Raises:
        MismatchError: On every rank, naming parameters and ranks.
    """
    everyone: list[list[str]] = agree(group._core, "parameters without a gradient", list(untouched))
    everywhere = set(everyone[0]).intersection(*everyone)
    uneven = {name for names in everyone for name in names} - everywhere
    if not uneven:
        return
    rows = "\n".join(
        f"  {name}: not on ranks {[r for r, names in enumerate(everyone) if name in names]}"
        for name in sorted(uneven)
    )
    raise on_all_ranks(
        MismatchError(
            f"these parameters got a gradient on some ranks of group {group.name!r} only:\n{rows}"
        )
    )


def difference(
    texts: Sequence[str], group: ProcessGroup, what: Call | str
) -> tuple[int, str] | None:
    """Return the first of these texts that is not alike on all ranks of `group`. Collective.

    Args:
        texts: This rank's.
        group: The ranks.
        what: What they compare.

    Returns:
        On every rank the text's number and a row for each rank; None if all are alike.

    Cost:
        One all-reduce of 40 bytes; where texts differ, an all-gather of them.
    """
    if group.size == 1:
        return None
    everyone = agree(group._core, what, list(texts))
    for place, row in enumerate(zip_longest(*everyone, fillvalue="none")):
        if len(set(row)) > 1:
            ranks = zip(group.ranks, row, strict=True)
            return place, "\n".join(f"  rank {rank}: {text}" for rank, text in ranks)
    return None


def _agree(texts: list[str], group: ProcessGroup, rule: str, cure: str = "") -> None:
    differs = difference(texts, group, Call("parameters", group.name, rule=rule))
    if differs is not None:
        place, rows = differs
        advice = f"\n{cure}" if cure else ""
        raise on_all_ranks(
            MismatchError(
                f"the ranks of group {group.name!r} must have the same parameters, but "
                f"parameter {place} is\n{rows}{advice}"
            )
        )


def digest(x: Parameter | Array) -> str:
    """Return a text by which two ranks compare the values of a parameter or an array."""
    values = to_numpy(x.value() if isinstance(x, Parameter) else x)
    return digest_text(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)

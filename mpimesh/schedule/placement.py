"""Placement of stages on ranks, where a rank holds several."""

from __future__ import annotations

from mpimesh.arguments import as_int
from mpimesh.errors import ScheduleError

__all__ = [
    "MOST_FORWARDS",
    "check_ranks",
    "check_sizes",
    "looped_ranks",
    "one_stage_each",
    "vee_placement",
    "vee_ranks",
]


MOST_FORWARDS = 1 << 20
"""Most forwards of a schedule, which lists every action of every microbatch."""


def check_sizes(name: str, num_stages: int, num_microbatches: int) -> None:
    """Refuse a pipeline without stages or without microbatches, or one too large to be listed.

    Raises:
        ScheduleError: If a number is no whole number of at least 1, or there are more than 2^20
            forwards.
    """
    schedule = f"schedule {name}: "
    stages = as_int(num_stages, f"{schedule}num_stages", ScheduleError, least=1)
    microbatches = as_int(num_microbatches, f"{schedule}num_microbatches", ScheduleError, least=1)
    if stages * microbatches > MOST_FORWARDS:
        raise ScheduleError(
            f"schedule {name} lists every action, at most {MOST_FORWARDS} forwards: num_stages * "
            f"num_microbatches is {stages} * {microbatches}"
        )


def check_ranks(name: str, num_ranks: int | None) -> None:
    """Refuse a number of ranks that is none.

    Raises:
        ScheduleError: If `num_ranks` is given and no whole number of at least 1.
    """
    if num_ranks is not None:
        as_int(num_ranks, f"schedule {name}: num_ranks", ScheduleError, least=1)


def one_stage_each(name: str, num_stages: int, num_ranks: int | None) -> None:
    """Refuse a number of ranks other than that of the stages.

    Raises:
        ScheduleError: If `num_ranks` is given and not `num_stages`.
    """
    check_ranks(name, num_ranks)
    if num_ranks not in (None, num_stages):
        raise ScheduleError(
            f"schedule {name} puts one stage on each rank, got num_stages {num_stages} and "
            f"num_ranks {num_ranks}; make as many stages as ranks, or take a schedule that puts "
            "several on a rank, such as interleaved"
        )


def looped_ranks(name: str, num_stages: int, num_ranks: int | None) -> int:
    """Return the ranks to which stages are dealt in turn; two stages for each if not given.

    Raises:
        ScheduleError: If the ranks do not get as many stages each.
    """
    check_ranks(name, num_ranks)
    if num_ranks is None:
        num_ranks, rest = divmod(num_stages, 2)
        if rest:
            raise ScheduleError(
                f"schedule {name} puts two stages on each rank where num_ranks is not given, got "
                f"num_stages {num_stages}; give num_ranks, or make the stages even in number"
            )
    elif num_stages % num_ranks:
        raise ScheduleError(
            f"schedule {name} puts as many stages on each rank, got num_stages {num_stages} "
            f"and num_ranks {num_ranks}; make the number of stages a multiple of that of the ranks"
        )
    return num_ranks


def vee_ranks(name: str, num_stages: int, num_microbatches: int, num_ranks: int | None) -> int:
    """Return the ranks of a V, each of which holds two stages.

    Raises:
        ScheduleError: If a number is less than 1, or there are not two stages for each.
    """
    check_sizes(name, num_stages, num_microbatches)
    check_ranks(name, num_ranks)
    if num_stages % 2 or (num_ranks is not None and num_stages != 2 * num_ranks):
        ranks = "" if num_ranks is None else f" and num_ranks {num_ranks}"
        raise ScheduleError(
            f"schedule {name} puts two stages on each rank, got num_stages {num_stages}{ranks}; "
            "make twice as many stages as ranks"
        )
    return num_stages // 2


def vee_placement(num_ranks: int) -> tuple[int, ...]:
    """Place stages down the ranks and up again: stage s and its mirror lie on one rank.

    The first rank holds the first stage and the last, and the last rank the two in the middle,
    which hand over without a message.
    """
    return (*range(num_ranks), *reversed(range(num_ranks)))

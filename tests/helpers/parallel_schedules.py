"""Schedules of other shapes than one stage on each rank: for an executor that runs any."""

from __future__ import annotations

from mpimesh.schedule import Action, ActionKind, Schedule, make_schedule


def looped(num_stages: int, num_microbatches: int) -> Schedule:
    """Breadth first: stage s on rank s % 2, all forwards stage by stage, then all backwards."""
    ranks = tuple(
        tuple(
            Action(stage, kind, microbatch)
            for kind, order in (
                (ActionKind.F, range(rank, num_stages, 2)),
                (ActionKind.B, reversed(range(rank, num_stages, 2))),
            )
            for stage in order
            for microbatch in range(num_microbatches)
        )
        for rank in range(2)
    )
    return Schedule("looped", num_stages, num_microbatches, ranks)


def all_on_one(num_stages: int, num_microbatches: int) -> Schedule:
    """Every stage on one rank: handed over without a message."""
    actions = [
        Action(stage, ActionKind.F, microbatch)
        for microbatch in range(num_microbatches)
        for stage in range(num_stages)
    ]
    actions += [
        Action(stage, ActionKind.B, microbatch)
        for microbatch in range(num_microbatches)
        for stage in reversed(range(num_stages))
    ]
    return Schedule("all_on_one", num_stages, num_microbatches, (tuple(actions),))


def halves(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B whose backwards are cut in two, with all weight gradients at the end."""
    whole = make_schedule("1f1b", num_stages, num_microbatches)
    ranks = []
    for stage, actions in enumerate(whole.ranks):
        first = [
            Action(a.stage, ActionKind.I, a.microbatch) if a.kind is ActionKind.B else a
            for a in actions
        ]
        last = [Action(stage, ActionKind.W, number) for number in range(num_microbatches)]
        ranks.append((*first, *last))
    return Schedule("halves", num_stages, num_microbatches, tuple(ranks))

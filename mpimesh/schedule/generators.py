"""The schedules of the literature that follow from a formula."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import pairwise

from mpimesh.errors import ScheduleError
from mpimesh.schedule.schedule import Action, ActionKind, Schedule, check_sizes

__all__ = [
    "dualpipev",
    "forward_only",
    "forward_schedule",
    "gpipe",
    "interleaved",
    "looped_bfs",
    "one_f_one_b",
    "vee_placement",
    "vee_ranks",
    "zb1p",
    "zb2p",
    "zbv",
]


def _one_stage_each(
    name: str, num_stages: int, num_microbatches: int, num_ranks: int | None
) -> None:
    """Refuse a number of ranks other than that of the stages.

    Raises:
        ScheduleError: If a number is less than 1, or `num_ranks` is another than `num_stages`.
    """
    check_sizes(name, num_stages, num_microbatches, num_ranks)
    if num_ranks not in (None, num_stages):
        raise ScheduleError(
            f"schedule {name} puts one stage on each rank, got num_stages {num_stages} and "
            f"num_ranks {num_ranks}; make as many stages as ranks, or take a schedule that puts "
            "several on a rank, such as interleaved"
        )


def _looped_ranks(name: str, num_stages: int, num_microbatches: int, num_ranks: int | None) -> int:
    """Return the number of ranks that take the stages in turn; half the stages by default.

    Raises:
        ScheduleError: If a number is less than 1, or the ranks do not get as many stages each.
    """
    check_sizes(name, num_stages, num_microbatches, num_ranks)
    if num_ranks is None:
        num_ranks, rest = divmod(num_stages, 2)
        if rest:
            raise ScheduleError(
                f"schedule {name} puts two stages on each rank where num_ranks is not given, got "
                f"num_stages {num_stages}; give num_ranks, or make the stages even in number"
            )
    elif num_stages % num_ranks:
        raise ScheduleError(
            f"schedule {name} puts the same number of stages on each rank, got num_stages "
            f"{num_stages} and num_ranks {num_ranks}; make the number of stages a multiple of that "
            "of the ranks"
        )
    return num_ranks


def vee_ranks(name: str, num_stages: int, num_microbatches: int, num_ranks: int | None) -> int:
    """Return the number of ranks of a V, each of which has two stages.

    Raises:
        ScheduleError: If a number is less than 1, or there are not two stages for each.
    """
    check_sizes(name, num_stages, num_microbatches, num_ranks)
    if num_stages % 2 or (num_ranks is not None and num_stages != 2 * num_ranks):
        ranks = "" if num_ranks is None else f" and num_ranks {num_ranks}"
        raise ScheduleError(
            f"schedule {name} puts two stages on each rank, got num_stages {num_stages}{ranks}; "
            "make twice as many stages as ranks"
        )
    return num_stages // 2


def vee_placement(num_ranks: int) -> tuple[int, ...]:
    """Place stages down the ranks and up again: stage s and its mirror share a rank.

    The first rank has the first stage and the last, and the last rank the two in the middle,
    which hand over without a message.
    """
    return (*range(num_ranks), *reversed(range(num_ranks)))


class _RankList:
    """The list of one rank in the making.

    Each stage takes the microbatches in order, so stage and kind identify the next action. A
    schedule that takes its shape from a fixed number of microbatches is written for that many, and
    those from `num_microbatches` on are left out: a correct schedule without some of its
    microbatches is correct, and takes no longer.

    Args:
        num_microbatches: Number of microbatches of the schedule.
    """

    def __init__(self, num_microbatches: int) -> None:
        self._num_microbatches = num_microbatches
        self._actions: list[Action] = []
        self._done: Counter[tuple[ActionKind, int]] = Counter()
        self._weights: deque[Action] = deque()

    def forward(self, stage: int) -> None:
        """Add the next F of `stage`."""
        self._add(ActionKind.F, stage)

    def backward(self, stage: int) -> None:
        """Add the next B of `stage`."""
        self._add(ActionKind.B, stage)

    def backward_input(self, stage: int) -> None:
        """Add the next I of `stage`; its W is then the last open one."""
        microbatch = self._add(ActionKind.I, stage)
        self._weights.append(Action(stage, ActionKind.W, microbatch))

    def backward_weight(self) -> None:
        """Add the oldest W that is open."""
        action = self._weights.popleft()
        if action.microbatch < self._num_microbatches:
            self._actions.append(action)

    def finish(self) -> tuple[Action, ...]:
        """Add every W that is open; return the list."""
        while self._weights:
            self.backward_weight()
        return tuple(self._actions)

    def _add(self, kind: ActionKind, stage: int) -> int:
        """Add the next `kind` of `stage`, counting B and I together; return its microbatch."""
        counted = ActionKind.F if kind is ActionKind.F else ActionKind.B
        microbatch = self._done[counted, stage]
        self._done[counted, stage] += 1
        if microbatch < self._num_microbatches:
            self._actions.append(Action(stage, kind, microbatch))
        return microbatch


def _written(
    name: str,
    placement: Sequence[int],
    num_microbatches: int,
    write: Callable[[int, _RankList], None],
) -> Schedule:
    """Make a schedule of the lists that `write` fills, one rank after another."""
    ranks = []
    for rank in range(max(placement) + 1):
        actions = _RankList(num_microbatches)
        write(rank, actions)
        ranks.append(actions.finish())
    return Schedule(name, len(placement), num_microbatches, tuple(ranks), tuple(placement))


def forward_schedule(placement: Sequence[int], num_microbatches: int) -> Schedule:
    """Make a forward-only schedule for stages that lie on ranks as `placement` says.

    A rank with several stages runs, among the actions that could be next, those of the oldest
    wave first: stage s works on microbatch m in wave s + m.
    """
    num_stages = len(placement)
    ranks = tuple(
        tuple(
            Action(stage, ActionKind.F, wave - stage)
            for wave in range(num_stages + num_microbatches - 1)
            for stage in range(num_stages)
            if placement[stage] == rank and 0 <= wave - stage < num_microbatches
        )
        for rank in range(max(placement) + 1)
    )
    return Schedule("forward", num_stages, num_microbatches, ranks, tuple(placement))


def forward_only(
    num_stages: int, num_microbatches: int, *, num_ranks: int | None = None
) -> Schedule:
    """Make the forward-only schedule, one stage on each rank.

    For equal stages a rank is idle for ``(num_stages - 1) * F``. It stores no activations.

    Raises:
        ScheduleError: If `num_stages` or `num_microbatches` is less than 1, or `num_ranks` is
            another number than `num_stages`.
    """
    _one_stage_each("forward", num_stages, num_microbatches, num_ranks)
    return forward_schedule(range(num_stages), num_microbatches)


def gpipe(num_stages: int, num_microbatches: int, *, num_ranks: int | None = None) -> Schedule:
    """Make the GPipe schedule, one stage on each rank (Huang et al., 2019, arXiv 1811.06965).

    For equal stages a rank is idle for ``(num_stages - 1) * (F + B)`` and stores the
    activations of all microbatches. Backwards run in the order of the forwards, as those
    of :func:`~mpimesh.schedule.one_f_one_b` do, so both add up gradients in one order.

    Raises:
        ScheduleError: If `num_stages` or `num_microbatches` is less than 1, or `num_ranks` is
            another number than `num_stages`.
    """
    _one_stage_each("gpipe", num_stages, num_microbatches, num_ranks)
    return _breadth_first("gpipe", num_stages, num_microbatches, num_stages)


def one_f_one_b(
    num_stages: int, num_microbatches: int, *, num_ranks: int | None = None
) -> Schedule:
    """Make the 1F1B schedule, one stage on each rank (PipeDream-Flush, arXiv 2006.09503).

    Stage s runs ``num_stages - s - 1`` forwards to fill the pipeline (fewer where there are
    fewer microbatches), then one forward and one backward in turn, then the backwards that
    are left. For equal stages a rank is idle for ``(num_stages - 1) * (F + B)``, as with
    GPipe, but stores the activations of ``min(num_stages - s, num_microbatches)`` microbatches.

    Raises:
        ScheduleError: If `num_stages` or `num_microbatches` is less than 1, or `num_ranks` is
            another number than `num_stages`.
    """
    _one_stage_each("1f1b", num_stages, num_microbatches, num_ranks)

    def write(stage: int, actions: _RankList) -> None:
        for _ in range(num_stages - stage - 1):
            actions.forward(stage)
        for _ in range(num_microbatches):
            actions.forward(stage)
            actions.backward(stage)

    return _written("1f1b", range(num_stages), num_microbatches, write)


def _zero_bubble(name: str, num_stages: int, num_microbatches: int, *, depth: int) -> Schedule:
    """Make a schedule of one forward, one I and one W in turn, on one stage for each rank.

    Stage s of p begins with ``depth * (p - 1 - s)`` forwards, and lets its W stay behind its I by
    ``depth * s`` microbatches: what the late stages save in activations by starting later they
    spend on weight gradients, which then fill the time in which the gradients of the last
    microbatches pass.
    """

    def write(stage: int, actions: _RankList) -> None:
        for _ in range(depth * (num_stages - 1 - stage)):
            actions.forward(stage)
        for microbatch in range(num_microbatches):
            actions.forward(stage)
            actions.backward_input(stage)
            if microbatch >= depth * stage:
                actions.backward_weight()

    return _written(name, range(num_stages), num_microbatches, write)


def zb1p(num_stages: int, num_microbatches: int, *, num_ranks: int | None = None) -> Schedule:
    """Make the schedule ZB-H1: 1F1B in its memory, with W put where ranks would wait.

    For equal stages, with W no longer than F and than I, and as many microbatches as stages, a
    rank is idle for ``(num_stages - 1) * (F + I - W)``, a third of what it is under 1F1B
    if all three take as long. Every rank stores the activations of ``num_stages`` microbatches.
    (Qi et al., 2023, arXiv 2401.10241.)

    Raises:
        ScheduleError: If `num_stages` or `num_microbatches` is less than 1, or `num_ranks` is
            another number than `num_stages`.
    """
    _one_stage_each("zb1p", num_stages, num_microbatches, num_ranks)
    return _zero_bubble("zb1p", num_stages, num_microbatches, depth=1)


def zb2p(num_stages: int, num_microbatches: int, *, num_ranks: int | None = None) -> Schedule:
    """Make the schedule ZB-H2: no bubble, for about twice the activations of 1F1B.

    For equal stages, with W no longer than F and than I, and ``2 * num_stages - 1`` microbatches,
    a rank is idle between its first action and its last for
    ``(num_stages - 1) * (F + I - 2 * W)``, which is nothing if all three take as long. Ranks start
    one F after another, and end so. Every rank stores the activations of
    ``2 * num_stages - 1`` microbatches.
    (Qi et al., 2023, arXiv 2401.10241.)

    Raises:
        ScheduleError: If `num_stages` or `num_microbatches` is less than 1, or `num_ranks` is
            another number than `num_stages`.
    """
    _one_stage_each("zb2p", num_stages, num_microbatches, num_ranks)
    return _zero_bubble("zb2p", num_stages, num_microbatches, depth=2)


def interleaved(
    num_stages: int, num_microbatches: int, *, num_ranks: int | None = None
) -> Schedule:
    """Make the interleaved 1F1B schedule; stage s is on rank ``s % num_ranks``.

    Microbatches go round the ranks in groups of p or a few more: each stage of a rank takes a
    whole group before the next stage does, so that the first of the group is back when its
    last has left. Any number of microbatches is divided into groups as evenly as possible.

    With v equal stages on each of p ranks, of which all of a rank together take F and B, and
    at least p microbatches, a rank is idle for ``(p - 1) * (F + B) / v``. The first rank
    stores most: for groups of g microbatches ``(v - 1) * g + 2 * p - 1`` activations
    of one stage, which for g = p is ``1 + (p - 1) / (p * v)`` times what 1F1B stores.
    (Narayanan et al., 2021, arXiv 2104.04473.)

    Args:
        num_stages: Number of stages, a multiple of the ranks.
        num_microbatches: Number of microbatches; fewer than ranks are one group.
        num_ranks: Number of ranks; half the stages by default.

    Raises:
        ScheduleError: If a number is less than 1, or the ranks do not get as many stages each.
    """
    num_ranks = _looped_ranks("interleaved", num_stages, num_microbatches, num_ranks)
    groups = _groups(num_microbatches, max(1, num_microbatches // num_ranks))
    ranks = tuple(
        _interleaved_actions(rank, range(rank, num_stages, num_ranks), groups, num_ranks)
        for rank in range(num_ranks)
    )
    return Schedule("interleaved", num_stages, num_microbatches, ranks)


def _groups(count: int, num_groups: int) -> list[range]:
    """Divide microbatches into groups in order, whose sizes differ by one at most.

    The larger come first: the forwards stay ahead of the backwards by as much as the
    first group took, which is then enough for every later one.
    """
    ends = [-(-count * number // num_groups) for number in range(num_groups + 1)]
    return [range(first, last) for first, last in pairwise(ends)]


def _interleaved_actions(
    rank: int, stages: range, groups: list[range], num_ranks: int
) -> tuple[Action, ...]:
    forwards = [Action(s, ActionKind.F, m) for group in groups for s in stages for m in group]
    backwards = [
        Action(s, ActionKind.B, m) for group in groups for s in reversed(stages) for m in group
    ]
    # The first backward is that of the last stage here. Before it the rank takes the first group
    # through its other stages, and what comes while the way to the end and back is under way.
    warm_up = min((len(stages) - 1) * len(groups[0]) + 2 * (num_ranks - rank - 1), len(forwards))
    actions = forwards[:warm_up]
    for number, backward in enumerate(backwards):
        actions += forwards[warm_up + number : warm_up + number + 1]
        actions.append(backward)
    return tuple(actions)


def looped_bfs(num_stages: int, num_microbatches: int, *, num_ranks: int | None = None) -> Schedule:
    """Make the looped schedule that takes each stage through all microbatches before the next.

    Stage s is on rank ``s % num_ranks``. With v equal stages on each of p ranks, of which all of
    a rank together take F and B, and at least p microbatches, a rank is idle for
    ``(p - 1) * (F + B) / v``. It stores the activations of all microbatches, and the gradients of
    a stage are ready, and can be reduced, while the others still compute.
    (Lamy-Poirier, arXiv 2211.05953.)

    Args:
        num_stages: Number of stages, a multiple of the ranks.
        num_microbatches: Number of microbatches.
        num_ranks: Number of ranks; half the stages by default.

    Raises:
        ScheduleError: If a number is less than 1, or the ranks do not get as many stages each.
    """
    num_ranks = _looped_ranks("looped_bfs", num_stages, num_microbatches, num_ranks)
    return _breadth_first("looped_bfs", num_stages, num_microbatches, num_ranks)


def _breadth_first(name: str, num_stages: int, num_microbatches: int, num_ranks: int) -> Schedule:
    """Make a schedule whose ranks take each of their stages through all microbatches in turn."""
    microbatches = range(num_microbatches)
    ranks = tuple(
        (
            *(Action(s, ActionKind.F, m) for s in stages for m in microbatches),
            *(Action(s, ActionKind.B, m) for s in reversed(stages) for m in microbatches),
        )
        for stages in (range(rank, num_stages, num_ranks) for rank in range(num_ranks))
    )
    return Schedule(name, num_stages, num_microbatches, ranks)


def zbv(num_stages: int, num_microbatches: int, *, num_ranks: int | None = None) -> Schedule:
    """Make the schedule ZB-V: rank r has stage r and its mirror.

    On p ranks with equal stages and at least ``2 * p - 1`` microbatches, no rank is idle between
    its first action and its last if F, I and W take as long. Ranks start one F after
    another, and end so. Every rank stores ``2 * p`` activations of one stage: those of p
    microbatches on all of the rank, as the first rank under 1F1B.
    (Qi et al., 2024, arXiv 2405.15362.)

    Args:
        num_stages: Number of stages, twice that of the ranks.
        num_microbatches: Number of microbatches.
        num_ranks: Number of ranks, if it is to be checked.

    Raises:
        ScheduleError: If a number is less than 1, or there are not two stages for each rank.
    """
    num_ranks = vee_ranks("zbv", num_stages, num_microbatches, num_ranks)
    placement = vee_placement(num_ranks)
    # The shape needs as many microbatches; those that there are not are left out.
    count = max(num_microbatches, 2 * num_ranks - 1)

    def write(rank: int, actions: _RankList) -> None:
        down, up = rank, 2 * num_ranks - 1 - rank
        after = num_ranks - rank  # this rank and those further down

        def backward(stage: int) -> None:
            actions.backward_input(stage)
            actions.backward_weight()

        # Fill, until the first microbatch is back on its way up.
        for _ in range(2 * after - 1):
            actions.forward(down)
        for _ in range(rank):
            actions.forward(up)
            actions.forward(down)
        # It has been at the end and is back: backward begins, on the way up first.
        for _ in range(after):
            actions.forward(up)
            backward(up)
        # Both ways in turn. The way down runs out of forwards before the way up does.
        for microbatch in range(num_ranks, count):
            if microbatch < count - after + 1:
                actions.forward(down)
            backward(down)
            actions.forward(up)
            backward(up)
        # Gradients of the last microbatches pass; weights wait for the time in which none comes.
        for _ in range(rank):
            actions.backward_input(down)
            actions.backward_input(up)
        for _ in range(after):
            actions.backward_input(down)
            actions.backward_weight()

    return _written("zbv", placement, num_microbatches, write)


def dualpipev(num_stages: int, num_microbatches: int, *, num_ranks: int | None = None) -> Schedule:
    """Make the schedule DualPipeV: rank r has stage r and its mirror.

    In the steady state a rank takes a forward and the backward of another microbatch together, so
    that the messages of one pass while it computes the other. Only the backwards at either
    end are cut in two.

    On p ranks with equal stages and at least ``2 * p`` microbatches every rank stores ``2 * p + 1``
    activations of one stage, and is idle for at most ``(p - 1) * (X + B - 3 * W)``, by DeepSeek's
    formula, where X is a forward and a backward taken together. Here they take turns,
    X = F + B. If F, I and W take as long, it is idle for ``(p - 1) * F``.
    (DeepSeek's DualPipe.)

    Args:
        num_stages: Number of stages, twice that of the ranks.
        num_microbatches: Number of microbatches.
        num_ranks: Number of ranks, if it is to be checked.

    Raises:
        ScheduleError: If a number is less than 1, or there are not two stages for each rank.
    """
    num_ranks = vee_ranks("dualpipev", num_stages, num_microbatches, num_ranks)
    placement = vee_placement(num_ranks)
    # The shape needs as many microbatches; those that there are not are left out.
    count = max(num_microbatches, 2 * num_ranks)

    def write(rank: int, actions: _RankList) -> None:
        down, up = rank, 2 * num_ranks - 1 - rank
        below = num_ranks - 1 - rank

        def pair(forward: int, backward: int) -> None:
            actions.forward(forward)
            actions.backward(backward)

        # Fill the way down, then both ways.
        for _ in range(2 * below):
            actions.forward(down)
        for _ in range(rank + 1):
            actions.forward(down)
            actions.forward(up)
        # The first gradients come up; ranks above wait for them, so weights come second.
        for _ in range(below):
            actions.backward_input(up)
            actions.backward_weight()
            actions.forward(up)
        # Pairs, of one microbatch down and one up.
        for _ in range(count - num_ranks - below):
            pair(down, up)
            pair(up, down)
        # No forward is left on the way down, and then none at all.
        for _ in range(below):
            actions.backward(up)
            pair(up, down)
        for number in range(2 * (rank + 1)):
            stage = down if number % 2 else up
            if number <= rank:
                actions.backward(stage)
            else:
                actions.backward_input(stage)
        # Gradients of the last microbatches pass; weights fill the time in which none comes.
        for _ in range(below):
            actions.backward_weight()
            actions.backward_input(down)

    return _written("dualpipev", placement, num_microbatches, write)

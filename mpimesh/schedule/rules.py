"""Conditions on a rank's earlier actions before it may do an action."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mpimesh.schedule.action import Action, ActionKind
from mpimesh.schedule.edges import Edges
from mpimesh.schedule.schedule import Schedule

__all__ = ["Rules"]

# B is I and W in one, so B excludes them.
_TWINS = {
    ActionKind.B: (ActionKind.I, ActionKind.W),
    ActionKind.I: (ActionKind.B,),
    ActionKind.W: (ActionKind.B,),
}
# What has a bit of its own: a kind, or a message of a skip with the stage at the other end.
_Key = ActionKind | tuple[ActionKind, int]
_BIT: dict[_Key, int] = {kind: 1 << number for number, kind in enumerate(ActionKind)}


def _key(action: Action) -> _Key:
    return action.kind if action.other is None else (action.kind, action.other)


@dataclass(frozen=True, slots=True)
class _Check:
    """The rules for one kind on one stage and edge, the same for each microbatch.

    Attributes:
        bit: What is noted when it is done.
        excluded: Bits of which none may be noted.
        needs: Stages, each with bits of which one must be noted.
    """

    bit: int
    excluded: int
    needs: tuple[tuple[int, int], ...]


class Rules:
    """The rules of one schedule, applied to its actions in the order of each rank's list.

    Only the rank's own list counts here. What comes from another rank is stood for by its
    receive in a lowered schedule, and is not looked at in one that is not lowered.

    A schedule has a million actions, and nearly all are right. So the rules of a kind on a stage
    are put into bits when it first comes, and words are only looked for when bits say no.

    Args:
        schedule: Whose rules.
        skips: Its skips; None for those that have messages in it.
    """

    def __init__(self, schedule: Schedule, skips: Iterable[tuple[int, int]] | None = None) -> None:
        self._schedule = schedule
        self._edges = (
            Edges.of(schedule) if skips is None else Edges(schedule.num_stages, tuple(skips))
        )
        self._placement = schedule.placement
        self._num_microbatches = schedule.num_microbatches
        self._lowered = schedule.is_lowered
        # For each stage: by microbatch the bits of what is done, and by kind the rules.
        self._done: list[dict[int, int]] = [{} for _ in schedule.placement]
        self._checks: list[dict[_Key, _Check]] = [{} for _ in schedule.placement]
        self._bits: dict[_Key, int] = dict(_BIT)

    def why_wrong(self, rank: int, action: Action) -> str | None:
        """Return why `rank` may not do `action` now; None, and note it as done, if it may."""
        stage, microbatch = action.stage, action.microbatch
        key: _Key = action.kind if action.other is None else (action.kind, action.other)
        check = None
        if stage < len(self._placement) and self._placement[stage] == rank:
            check = self._checks[stage].get(key)
        if check is None or microbatch >= self._num_microbatches:
            reason = self.in_words(rank, action)
            if reason is not None:
                return reason
            check = self._check(action)
            if not action.kind.is_whole:  # what a whole stage needs is not of one microbatch
                self._checks[stage][key] = check
        done = self._done[stage]
        bits = done.get(microbatch, 0)
        if bits & check.excluded:
            return self.in_words(rank, action)
        for needed, any_of in check.needs:
            if not self._done[needed].get(microbatch, 0) & any_of:
                return self.in_words(rank, action)
        done[microbatch] = bits | check.bit
        return None

    def in_words(self, rank: int, action: Action) -> str | None:
        """Return what :meth:`why_wrong` would, without the bits, and note nothing."""
        return (
            self._why_no_action(rank, action)
            or self._why_again(action)
            or self._why_too_early(action)
        )

    def missing(self) -> Action | None:
        """Return the first computation that no rank has done, by stage and microbatch."""
        trains = self._schedule.trains
        both = _BIT[ActionKind.I] | _BIT[ActionKind.W]
        for stage, done in enumerate(self._done):
            for microbatch in range(self._num_microbatches):
                bits = done.get(microbatch, 0)
                if not bits & _BIT[ActionKind.F]:
                    return Action(stage, ActionKind.F, microbatch)
                if trains and not bits & _BIT[ActionKind.B] and bits & both != both:
                    kind = ActionKind.W if bits & _BIT[ActionKind.I] else ActionKind.B
                    return Action(stage, kind, microbatch)
        return None

    def _check(self, action: Action) -> _Check:
        bit = self._bit(action)
        needs = () if action.kind.is_whole else self._needs(action)
        return _Check(
            bit=bit,
            excluded=bit | sum(_BIT[twin] for twin in _TWINS.get(action.kind, ())),
            needs=tuple((any_of[0].stage, sum(map(self._bit, any_of))) for any_of in needs),
        )

    def _is_done(self, action: Action) -> bool:
        return bool(self._done[action.stage].get(action.microbatch, 0) & self._bit(action))

    def _bit(self, action: Action) -> int:
        return self._bits.setdefault(_key(action), 1 << len(self._bits))

    # -- in words -----------------------------------------------------------------------------

    def _why_no_action(self, rank: int, action: Action) -> str | None:
        schedule = self._schedule
        if action.stage >= schedule.num_stages:
            return f"{action} is for a stage that does not exist; there are {schedule.num_stages}"
        if action.microbatch >= schedule.num_microbatches:
            return (
                f"{action} is for a microbatch that does not exist; "
                f"there are {schedule.num_microbatches}"
            )
        holder = schedule.placement[action.stage]
        if holder != rank:
            return f"{action} is for a stage that lies on rank {holder}"
        if not action.kind.is_message:
            return None
        other = action.far_stage
        if not 0 <= other < schedule.num_stages:
            return f"{action} has no other end: there is no stage {other}"
        if schedule.placement[other] == rank:
            return f"{action} is no message: stage {other} lies on the same rank"
        skip = min(action.stage, other), max(action.stage, other)
        if action.other is not None and skip not in self._edges.skips:
            return f"{action} is of no skip; there are {list(self._edges.skips)}"
        return None

    def _why_again(self, action: Action) -> str | None:
        if self._is_done(action):
            return f"{action} is done a second time"
        for kind in _TWINS.get(action.kind, ()):
            twin = Action(action.stage, kind, action.microbatch)
            if self._is_done(twin):
                return f"{action} does again what {twin} did"
        return None

    def _why_too_early(self, action: Action) -> str | None:
        for needed in self._needs(action):
            if not any(map(self._is_done, needed)):
                return f"{action} comes before {' or '.join(map(str, needed))}, which it needs"
        return None

    def _needs(self, action: Action) -> Iterator[tuple[Action, ...]]:
        """Give what `action` needs on its own rank, each as the actions of which one will do."""
        stage, microbatch = action.stage, action.microbatch

        def one_of(stage: int, *kinds: ActionKind) -> tuple[Action, ...]:
            return tuple(Action(stage, kind, microbatch) for kind in kinds)

        if action.kind is ActionKind.F and stage > 0:
            if self._is_local(stage, stage - 1):
                yield one_of(stage - 1, ActionKind.F)
            elif self._lowered:
                yield one_of(stage, ActionKind.RECV_F)
            for source in self._edges.sources(stage):
                if self._is_local(stage, source):
                    yield one_of(source, ActionKind.F)
                elif self._lowered:
                    yield (Action(stage, ActionKind.RECV_F, microbatch, source),)
        elif action.kind in (ActionKind.B, ActionKind.I):
            yield one_of(stage, ActionKind.F)
            if stage < self._schedule.num_stages - 1:
                if self._is_local(stage, stage + 1):
                    yield one_of(stage + 1, ActionKind.B, ActionKind.I)
                elif self._lowered:
                    yield one_of(stage, ActionKind.RECV_B)
            for user in self._edges.destinations(stage):
                if self._is_local(stage, user):
                    yield one_of(user, ActionKind.B, ActionKind.I)
                elif self._lowered:
                    yield (Action(stage, ActionKind.RECV_B, microbatch, user),)
        elif action.kind is ActionKind.W:
            yield one_of(stage, ActionKind.I)
        elif action.kind is ActionKind.SEND_F:
            yield one_of(stage, ActionKind.F)
        elif action.kind is ActionKind.SEND_B:
            yield one_of(stage, ActionKind.B, ActionKind.I)
        elif action.kind is ActionKind.REDUCE_GRAD:
            for number in range(self._num_microbatches):
                yield Action(stage, ActionKind.B, number), Action(stage, ActionKind.W, number)
        elif action.kind is ActionKind.STEP:
            yield one_of(stage, ActionKind.REDUCE_GRAD)

    def _is_local(self, stage: int, other: int) -> bool:
        return self._schedule.placement[stage] == self._schedule.placement[other]

"""Any schedule that can be: for tests of what must hold for all of them."""

from __future__ import annotations

from hypothesis import strategies as st

from mpimesh.schedule import Action, ActionKind, Schedule


@st.composite
def random_schedules(draw) -> Schedule:
    """Any stages on any ranks, backward whole or in halves, in any order that is possible."""
    num_stages, num_microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    kinds = "FB" if draw(st.booleans()) else "FIW"
    num_ranks = draw(st.integers(1, num_stages))
    placement = [*range(num_ranks)]
    placement += [draw(st.integers(0, num_ranks - 1)) for _ in range(num_stages - num_ranks)]
    placement = draw(st.permutations(placement))
    left = {
        f"{s}{kind}{m}"
        for s in range(num_stages)
        for m in range(num_microbatches)
        for kind in kinds
    }
    ranks: list[list[str]] = [[] for _ in range(num_ranks)]
    while left:
        ready = [name for name in sorted(left) if not left & {*needs(Action.from_string(name))}]
        name = draw(st.sampled_from(ready))
        left.remove(name)
        ranks[placement[Action.from_string(name).stage]].append(name)
    header = f"# random stages={num_stages} microbatches={num_microbatches} placement="
    lines = [header + ",".join(map(str, placement)), *map(",".join, ranks)]
    return Schedule.from_string("\n".join(lines))


def skips_of(num_stages: int) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    """Any skips between stages, in any order."""
    every = [(a, b) for a in range(num_stages) for b in range(a + 2, num_stages)]
    if not every:
        return st.just(())
    return st.lists(st.sampled_from(every), unique=True, max_size=6).map(tuple)


def needs(action: Action) -> list[str]:
    """The actions before `action`; of the names of a backward one or the other exists."""
    s, m = action.stage, action.microbatch
    if action.kind is ActionKind.F:
        return [f"{s - 1}F{m}"]
    if action.kind is ActionKind.W:
        return [f"{s}I{m}"]
    return [f"{s}F{m}", f"{s + 1}B{m}", f"{s + 1}I{m}"]

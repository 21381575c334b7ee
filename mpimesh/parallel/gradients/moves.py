"""State that moves when buckets are cut anew: each rank receives what its new parts need, no more.

Before and after, every element of a parameter has one rank that holds its state, or all of them
where the parameter is in no divided bucket any more. Both cuts follow from sizes that every rank
knows, so each knows what it sends to whom and what it gets, without asking.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpimesh.arrays import Array, namespace
from mpimesh.nn import Parameter
from mpimesh.optim.optimizer import state_dtype
from mpimesh.parallel.gradients.bucket import Bucket
from mpimesh.parallel.gradients.held import Held, HeldState, Owned
from mpimesh.parallel.gradients.spans import Span, overlap
from mpimesh.runtime import ProcessGroup

__all__ = ["Spread", "moved_states", "spread_of"]


@dataclass(frozen=True, slots=True)
class Spread:
    """The layout of a parameter on the ranks that divide its bucket.

    Attributes:
        parameter: The parameter.
        group: The ranks.
        spans: What each of them holds, counted in the parameter.
    """

    parameter: Parameter
    group: ProcessGroup
    spans: tuple[Span, ...]


def spread_of(buckets: Sequence[Bucket]) -> dict[int, Spread]:
    """Return how the parameters of divided buckets lie on their ranks, by their ids. Local.

    Those of one group stand in the same order on all its ranks.
    """
    found: dict[int, Spread] = {}
    for bucket in buckets:
        if bucket.shard is None:
            continue
        end = 0
        for parameter in bucket.parameters:
            begin, end = end, end + parameter.size
            spans, stop = [], 0
            for size in bucket.shard.sizes:
                start, stop = stop, stop + size
                first, last = overlap((begin, end), (start, stop))
                spans.append((first - begin, last - begin))
            found[id(parameter)] = Spread(parameter, bucket.group, tuple(spans))
    return found


def moved_states(
    owned: Sequence[Owned],
    states: Sequence[HeldState],
    before: Mapping[int, Spread],
    after: Mapping[int, Spread],
) -> list[HeldState]:
    """Return what this rank is to hold of states after buckets were cut anew.

    Collective over the groups of the buckets before.

    Args:
        owned: The optimizers.
        states: What this rank holds of their states.
        before: How parameters lay on the ranks.
        after: How they lie now; one that is not here, such as one that was frozen, is wanted by
            all ranks of its group before.

    Cost:
        One all-to-all for each group, dtype and array of the state: what changes its rank moves.
    """
    places = {
        id(parameter): (number, place)
        for number, one in enumerate(owned)
        for place, parameter in enumerate(one.parameters)
    }
    params = [list(state.params) for state in states]
    groups = {id(one.group): one.group for one in before.values()}
    for key, group in groups.items():
        mine = [one for at, one in before.items() if id(one.group) == key and at in places]
        held = [params[number][place] for number, place in (places[id(s.parameter)] for s in mine)]
        wanted = [
            after[id(one.parameter)].spans
            if id(one.parameter) in after
            else ((0, one.parameter.size),) * group.size
            for one in mine
        ]
        for spread, new in zip(mine, _moved(group, mine, held, wanted), strict=True):
            number, place = places[id(spread.parameter)]
            params[number][place] = new
    return [HeldState(state.numbers, own) for state, own in zip(states, params, strict=True)]


def _moved(
    group: ProcessGroup,
    spreads: Sequence[Spread],
    held: Sequence[Held],
    wanted: Sequence[Sequence[Span]],
) -> list[Held]:
    """Return what is wanted here of each parameter. Collective over `group`."""
    rank = group.rank or 0
    kinds: dict[tuple[str, str], list[int]] = {}
    for number, one in enumerate(held):
        for name in one.arrays:
            dtype = str(state_dtype(spreads[number].parameter.value().dtype))
            kinds.setdefault((name, dtype), []).append(number)
    arrays: list[dict[str, Array]] = [{} for _ in held]
    for (name, dtype), numbers in sorted(kinds.items()):
        xp = namespace(held[numbers[0]].arrays[name])
        sends: list[Array] = []
        sizes = [0] * group.size
        for to in range(group.size):
            for number in numbers:
                start, stop = overlap(spreads[number].spans[rank], wanted[number][to])
                first = held[number].start
                sends.append(held[number].arrays[name][start - first : stop - first])
                sizes[to] += stop - start
        comes = [
            [overlap(spreads[number].spans[source], wanted[number][rank]) for number in numbers]
            for source in range(group.size)
        ]
        got = group.all_to_all(
            xp.concatenate([xp.empty(0, dtype), *sends]),
            sizes=sizes,
            recv_sizes=[sum(stop - start for start, stop in spans) for spans in comes],
            label=f"{name} of buckets cut anew",
        ).resolve()
        for number in numbers:
            start, stop = wanted[number][rank]
            arrays[number][name] = xp.empty(stop - start, dtype)
        at = 0
        for spans in comes:
            for number, (start, stop) in zip(numbers, spans, strict=True):
                first = wanted[number][rank][0]
                arrays[number][name][start - first : stop - first] = got[at : at + stop - start]
                at += stop - start
    return [
        Held(one.steps, spans[rank][0], own)
        for one, spans, own in zip(held, wanted, arrays, strict=True)
    ]

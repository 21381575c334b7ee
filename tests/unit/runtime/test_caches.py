"""A dict of limited size."""

from hypothesis import given, strategies as st

from mpimesh.caches import Cache


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 9), st.integers())))
def test_the_newest_keys_stay_with_their_last_values(limit, pairs):
    cache = Cache[int, int](limit)
    order: list[int] = []
    last: dict[int, int] = {}
    for key, value in pairs:
        cache[key] = last[key] = value
        if key not in order:
            order = [*order, key][-limit:]
        assert cache == {one: last[one] for one in order}

"""send, recv, shift and the neighbours."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from mpimesh.errors import DTypeError, GroupError, RankError, ShapeError
from mpimesh.runtime import MAX_TAG
from tests.contract.cases import ALL, LAYOUTS, WRITABLE, output, same, values
from tests.contract.flight import Flight
from tests.contract.meshes import groups_of, mesh_of
from tests.helpers.depth import is_deep
from tests.helpers.raises import raises

SMALL, LARGE = (3, 2), (40, 31)
"""Shapes whose data travels inside the envelope, and after it."""


def _ring(group):
    return (group.rank + 1) % group.size, (group.rank - 1) % group.size


def check_messages_of_every_dtype(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        if group.size == 1:
            return
        flight = Flight(mesh.rank)
        after, before = _ring(group)
        for place, dtype in enumerate(ALL):
            some = ((), (0,), (0, 4), (1024,), (4096,))
            for shape in (SMALL, LARGE, some[place % len(some)]):
                x = values(group.ranks[group.rank], shape, dtype)
                expected = values(group.ranks[before], shape, dtype)
                flight.add(group.send(x, after), None, ("send", dtype, shape))
                flight.add(group.recv(before), expected, ("recv", dtype, shape))
        flight.land()


def check_messages_of_every_memory_order(comm):
    with groups_of(comm) as groups:
        for group in groups:
            if group.size == 1:
                continue
            flight = Flight(group.world_rank)
            after, before = _ring(group)
            for shape in (SMALL, LARGE):
                for name, make in LAYOUTS.items():
                    flight.add(group.send(make(values(group.rank, shape, "f8")), after), None, 0)
                    expected = np.array(make(values(before, shape, "f8")))
                    flight.add(group.recv(before, shape=shape, dtype=float), expected, name)
                for layout in WRITABLE:
                    flight.add(group.send(values(group.rank, shape, ">i4"), after), None, 0)
                    out = output(layout, shape, ">i4")
                    expected = values(before, shape, ">i4")
                    flight.add(group.recv(before, out=out), expected, layout, into=out)
            flight.land()


def check_messages_keep_their_order_and_tags(comm):
    """Sent under several tags in one order, received in another; receives resolved backwards."""
    with mesh_of(comm) as mesh:
        group = mesh.group()
        if group.size == 1:
            return
        after, before = _ring(group)
        plan = [(tag, number) for number in range(4) for tag in (0, 7, MAX_TAG)]
        random.Random(1).shuffle(plan)
        sends, receives = [], []
        for tag, number in plan:
            shape = LARGE if (tag + number) % 2 else SMALL
            sends.append(group.send(np.full(shape, group.rank * 100 + number), after, tag=tag))
        for tag in (MAX_TAG, 0, 7):
            for number in [number for its_tag, number in plan if its_tag == tag]:
                shape = LARGE if (tag + number) % 2 else SMALL
                receives.append((group.recv(before, tag=tag), shape, number))
        for handle, shape, number in reversed(receives):
            same(handle.resolve(), np.full(shape, before * 100 + number))
        for handle in sends:
            assert handle.resolve() is None


def check_a_message_that_does_not_fit_disturbs_no_other(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        if group.size == 1:
            return
        after, before = _ring(group)
        for shape in (SMALL, LARGE):
            x = values(group.rank, shape, "f8")
            sends = [group.send(x, after) for _ in range(8)]
            out = np.zeros((5, 5))
            receives = [
                (group.recv(before, shape=(9, 9)), ShapeError, ((9, 9), shape)),
                (group.recv(before, shape=9), ShapeError, ((9,), shape)),
                (group.recv(before, dtype="f4"), DTypeError, ("float32", "float64")),
                (group.recv(before, out=out), ShapeError, ((5, 5), shape)),
                (group.recv(before, out=np.zeros(shape, ">f8")), DTypeError, (">f8", "float64")),
                (group.recv(before, shape=shape[::-1]), ShapeError, (shape[::-1], shape)),
                (group.recv(before, dtype=[("a", "f8")]), DTypeError, ([("a", "<f8")], "float64")),
            ]
            good = group.recv(before, shape=shape, dtype="f8")
            same(good.resolve(), values(before, shape, "f8"))
            for handle, error, told in reversed(receives):
                for _ in range(2):
                    with raises(error, f"rank {group.rank}", f"rank {before}", *told):
                        handle.resolve()
            same(out, np.zeros((5, 5)))
            for handle in sends:
                handle.resolve()


def check_messages_never_meet_collectives(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        if group.size == 1:
            return
        flight = Flight(mesh.rank)
        after, before = _ring(group)
        for number in range(6):
            flight.add(group.send(np.full(900, number), after), None, "send")
            flight.add(group.all_gather(group.rank + number), np.arange(group.size) + number, "")
            wrapped = np.array([before])
            flight.add(group.shift(np.array([group.rank]), wrap=True), wrapped, "shift")
        for number in range(6):
            flight.add(group.recv(before), np.full(900, number), ("recv", number))
        flight.land()


def check_wrong_peers_and_tags(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        x = np.ones(2)
        for call in (lambda peer, **o: group.send(x, peer, **o), group.recv):
            with raises(RankError, group.rank, "group 'world'"):
                call(group.rank)
            for peer in (-1, group.size, 0.0, "1", None, True):
                with raises(RankError, "group 'world'", f"0 to {group.size - 1}", repr(peer)):
                    call(peer)
            if group.size > 1:
                other = (group.rank + 1) % group.size
                for tag in (-1, MAX_TAG + 1, 1.0, "a", None):
                    with raises(RankError, "tag", f"0 to {MAX_TAG}", repr(tag)):
                        call(other, tag=tag)
        if group.size > 1:
            other = (group.rank + 1) % group.size
            with raises(DTypeError, "object", "Python objects"):
                group.send([object()], other)
            blocked = np.zeros(2)
            blocked.flags.writeable = False
            with raises(ShapeError, "out", "read-only"):
                group.recv(other, out=blocked)
            with raises(DTypeError, "dtype", "'no such type'"):
                group.recv(other, dtype="no such type")
            with raises(DTypeError, "object", "Python objects"):
                group.recv(other, dtype=object)
            with raises(DTypeError, "out", "list"):
                group.recv(other, out=[1, 2])
            for shape in (3.5, -1, (2, -1), "ab", (2, None)):
                with raises(ShapeError, "shape", repr(shape)):
                    group.recv(other, shape=shape)


def check_shift(comm):
    with groups_of(comm) as groups:
        for group in groups:
            flight = Flight(group.world_rank)
            me, n = group.rank, group.size
            for offset in sorted({-n - 1, -n, -1, 0, 1, 2, n, n + 1}):
                for shape in (SMALL, LARGE):
                    sizes = [(shape[0] + r, shape[1]) for r in range(n)]
                    x = values(me, sizes[me], "f4", seed=50)
                    source = (me - offset) % n
                    expected = values(source, sizes[source], "f4", seed=50)
                    handle = group.shift(x, offset, wrap=True)
                    flight.add(handle, expected, (offset, "wrap"))
                    inside = 0 <= me - offset < n
                    handle = group.shift(x, offset)
                    flight.add(handle, expected if inside else None, (offset, "row"))
            flight.land()
            with raises(RankError, "offset", 0.5):
                group.shift(np.ones(1), 0.5)


def check_shifts_again(comm):
    """As before, then with another array on some ranks, in the same array, and one not resolved."""
    with mesh_of(comm) as mesh:
        group = mesh.group()
        flight = Flight(mesh.rank)
        me, n = group.rank, group.size
        for number in range(12):
            for wrap in (True, False):
                shapes = [SMALL if number % 4 or r % 2 else LARGE for r in range(n)]
                dtypes = ["f8" if number % 3 or r % 2 else "i8" for r in range(n)]
                source = (me - 1) % n
                x = values(me, shapes[me], dtypes[me], seed=number)
                handle = group.shift(x, 1, wrap=wrap)
                expected = values(source, shapes[source], dtypes[source], seed=number)
                flight.add(handle, expected if wrap or me else None, (number, wrap))
        flight.land()
        received = mesh.traffic().by_operation()["shift"]
        assert received.calls == 24
        assert received.received_messages == (12 * (1 + (me > 0)) if n > 1 else 0)


def check_receives_of_any_shape_again(comm):
    """What comes is guessed from what came before."""
    with mesh_of(comm) as mesh:
        group = mesh.group()
        if group.size == 1:
            return
        after, before = _ring(group)
        shapes = [SMALL] * 5 + [LARGE] * 5 + [SMALL, LARGE] * 4 + [()] * 4
        total = 0
        for number, shape in enumerate(shapes):
            dtype = "f4" if 7 < number < 12 else "f8"
            sent = group.send(values(group.rank, shape, dtype, seed=number), after)
            expected = values(before, shape, dtype, seed=number)
            same(group.recv(before).resolve(), expected)
            sent.resolve()
            total += expected.nbytes
        received = mesh.traffic().by_operation()["recv"]
        assert (received.received_bytes, received.received_messages) == (total, len(shapes))
        assert received.calls == len(shapes)


def check_neighbours(comm):
    with groups_of(comm, many=True) as groups:
        for group in groups:
            flight = Flight(group.world_rank)
            me, n = group.rank, group.size
            for shape in (SMALL, LARGE):
                x = values(me, shape, "f8")
                if me + 1 < n:
                    flight.add(group.send_next(x), None, "send_next")
                    flight.add(group.recv_next(tag=3), values(me + 1, shape, "f8"), "recv_next")
                if me > 0:
                    out = np.zeros(shape)
                    handle = group.recv_prev(out=out)
                    flight.add(handle, values(me - 1, shape, "f8"), "recv_prev", into=out)
                    flight.add(group.send_prev(x, tag=3), None, "send_prev")
            flight.land()
            if me == n - 1:
                with raises(RankError, f"rank {me}", "send_next", f"{n} ranks"):
                    group.send_next(np.ones(1))
                with raises(RankError, f"rank {me}", "recv_next", f"{n} ranks"):
                    group.recv_next()
            if me == 0:
                with raises(RankError, f"rank {me}", "send_prev", f"{n} ranks"):
                    group.send_prev(np.ones(1))
                with raises(RankError, f"rank {me}", "recv_prev", f"{n} ranks"):
                    group.recv_prev()


def check_all_pairs_at_once(comm):
    """Every rank sends to every other before it receives, larger than any buffer of the MPI."""
    with mesh_of(comm) as mesh:
        group, flight = mesh.group(), Flight(mesh.rank)
        me = group.rank
        for peer in range(group.size):
            if peer != me:
                flight.add(group.send(np.full(50_000, 10 * me + peer), peer), None, "send")
        for peer in range(group.size):
            if peer != me:
                flight.add(group.recv(peer), np.full(50_000, 10 * peer + me), "recv")
        flight.land()


def check_messages_on_two_names_of_the_same_ranks(comm):
    """They share one row of messages, and a message on the wrong one is told, not taken for it."""
    with mesh_of(comm) as mesh:
        n = mesh.world_size
        if n == 1:
            return
        world, again = mesh.group(), mesh.add_group("again", range(n))
        after, before = _ring(world)
        for shape in (SMALL, LARGE):
            sends = [world.send(np.ones(shape), after), again.send(np.zeros(shape), after)]
            sends.append(world.send(np.ones(shape), after))
            wrong, right, good = again.recv(before), again.recv(before), world.recv(before)
            same(good.resolve(), np.ones(shape))
            same(right.resolve(), np.zeros(shape))
            with raises(
                GroupError, f"rank {again.rank} of group 'again'", f"rank {before}", "group 'world'"
            ):
                wrong.resolve()
            for send in sends:
                send.resolve()


def check_dtypes_that_cannot_be_described(comm):
    with mesh_of(comm) as mesh:
        group = mesh.group()
        overlapping = np.dtype({"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 2]})
        x = np.zeros(2 * group.size, overlapping)
        if group.size > 1:
            for call in (
                lambda: group.shift(x, wrap=True).resolve(),
                lambda: group.send(x, (group.rank + 1) % group.size),
            ):
                with raises(DTypeError, overlapping):
                    call()
        # The root alone has it; the others wait for its head, and raise with it.
        many = np.dtype([(f"field_number_{i}", "f4") for i in range(120)])
        root = group.size - 1
        for dtype, told in ((overlapping, overlapping), (many, "shorten its field names")):
            x = np.zeros(2 * group.size, dtype)
            mine = x if group.rank == root else None
            for start in (
                lambda mine=mine: group.scatter(mine, root=root),
                lambda mine=mine: group.broadcast(mine, root=None),
            ):
                with raises(DTypeError, f"rank {root}", told) as caught:
                    start().resolve()
                assert caught.value.agreed
            assert group.all_gather(x).resolve().dtype == dtype


_RECEIVES = "nothing", "shape and dtype", "out", "out in strides", "planned"


def _letters(group, seed):
    """Draw messages, alike on all ranks: sender, receiver, tag, dtype, shape, ways, number."""
    draw, letters = random.Random(seed), []
    for number in range(draw.choice((8, 60))):
        source, dest = draw.sample(range(group.size), 2)
        dtype = np.dtype(draw.choice(("u1", "f8", ">i4", "c16", "f2")))
        size = draw.choice((0, 1, 7, 300, 5000, 5000, 90_000)) // dtype.itemsize
        shape = draw.choice(((size,), (size, 1), (1, size, 1)))
        if number == 3:
            shape = (1 << 21, 2)
        ways = draw.random() < 0.3, draw.choice(_RECEIVES)
        letters.append((source, dest, draw.randrange(3), dtype, shape, ways, number))
    return letters


def _content(letter):
    *_, dtype, shape, _, number = letter
    return ((np.arange(int(np.prod(shape))) * 7 + number) % 121).astype(dtype).reshape(shape)


def _start(group, mesh, letter):
    """Start this rank's end of a message; return what it gives, and where it is to be put."""
    source, dest, tag, dtype, shape, (is_shared, way), _ = letter
    if source == group.rank:
        x = mesh.shared_empty(shape, dtype) if is_shared else np.empty(shape, dtype)
        x[...] = _content(letter)
        if way == "planned":
            return group.send_init(x, dest, tag=tag).start(), None
        return group.send(x, dest, tag=tag), None
    if way == "nothing":
        return group.recv(source, tag=tag), None
    if way == "shape and dtype":
        return group.recv(source, shape=shape, dtype=dtype, tag=tag), None
    out = np.zeros((*shape, 2), dtype)[..., 0]
    if way != "out in strides":
        out = np.zeros(shape, dtype)
    if way == "planned":
        return group.recv_init(out, source, tag=tag).start(), out
    return group.recv(source, out=out, tag=tag), out


def check_random_messages(comm):
    """Each rank starts them in an order of its own; those of one pair and tag keep theirs."""
    with mesh_of(comm) as mesh:
        group = mesh.group()
        if group.size == 1:
            return
        for seed in range(8 if is_deep() else 3):
            own = random.Random(seed * 100 + group.rank)
            rows: dict[Any, list[Any]] = {}
            for letter in _letters(group, seed):
                if group.rank in letter[:2]:
                    rows.setdefault(letter[:3], []).append(letter)
            turns = [key for key, row in rows.items() for _ in row]
            own.shuffle(turns)
            started = []
            for key in turns:
                letter = rows[key].pop(0)
                started.append((letter, *_start(group, mesh, letter)))
                if own.random() < 0.1:
                    started[own.randrange(len(started))][1].done()
            own.shuffle(started)
            for letter, handle, out in started:
                result = handle.resolve()
                if letter[0] == group.rank:
                    assert result is None
                    continue
                assert out is None or result is out
                same(result, _content(letter))


def check_thousands_of_messages_under_way(comm):
    """All sent before the first is received; then in another order of tags."""
    with mesh_of(comm) as mesh:
        group = mesh.group()
        if group.size == 1:
            return
        after, before = _ring(group)
        many = 1000 if is_deep() else 100
        sends = [
            group.send(np.array([group.rank, tag, number]), after, tag=tag)
            for number in range(many)
            for tag in (0, 1, 2)
        ]
        if comm is not None:  # virtual sends may wait for their receives
            for handle in sends:
                handle.resolve()
            group.barrier()
        for tag in (1, 2, 0):
            handles = [group.recv(before, tag=tag) for _ in range(many)]
            for number, handle in enumerate(handles):
                same(handle.resolve(), np.array([before, tag, number]))
        for handle in sends:
            handle.resolve()

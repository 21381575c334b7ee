"""Batches of rows that training reads: each rank its own, in an order that no mesh changes.

A batch is a function of a seed and its number, and a rank's rows of it follow from the rank's place
along a dim. So nothing has to be exchanged or remembered but the number of the next batch, and a
training that goes on with other ranks sees what it would have seen.

The order of an epoch is not an array of all rows, of which there may be as many as a text has
bytes. It is a Feistel network over the bits of a row's place: two halves, of which each is changed
in turn by a hash of the other one and a key of that round, which can be undone and so gives each
number once (Luby and Rackoff 1988). What comes out beyond the last row goes through it again, until
it is a row ("cycle walking", Black and Rogaway 2002): at most twice in the mean, for the bits hold
less than twice as many. With 16 rounds the orders of as few as 4 to 7 rows are even to what a test
of 60,000 of them can tell; with 8 some are five times as frequent as others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any, NoReturn, Self

import numpy as np

from mpimesh.arguments import as_flag, as_int, shown
from mpimesh.arrays import HostArray
from mpimesh.dtensor import DTensor
from mpimesh.errors import ClosedError, MismatchError, ModuleError, ShapeError, on_all_ranks
from mpimesh.layout import Layout
from mpimesh.parallel.microbatch import Structure, Tree, flatten, num_rows, replica_rows, tree_map
from mpimesh.parallel.model import ParallelModel
from mpimesh.parallel.replicas import live_mesh, no_dim
from mpimesh.runtime import DeviceMesh
from mpimesh.runtime.agreement import agree, agree_alike
from mpimesh.runtime.call import Call

__all__ = ["Batches", "UnreadRows", "shuffled"]

_ROUNDS = 16
_BLOCK_ROWS = 1 << 14
"""Places of the order that are worked out at once: for a few rows NumPy's calls cost more."""
_SETTINGS = ("rows", "batch_size", "parts", "seed", "shuffle", "drop_last")


_MOST_ROWS = 1 << 62
_PAIR = ("x", "target")
"""The names of a batch's parts where it is a tuple for a model."""


class Batches:
    """The batches of a training, each as arrays that are split by rows over the replicas.

    A rank reads its own rows only, of the next batch in a thread while the program trains by this
    one; of a pipeline that is given as `model` only ranks whose stages take something read at all.
    The order is the same on any mesh; with `shuffle` another one in each epoch. Making it is
    collective, and so is the first batch that a function reads; reading is local otherwise.

    A ``for`` loop gives the batches that are left of an epoch, and the next loop those of the next
    epoch; :meth:`next` gives one after the other without end. Each is built as the source, of
    :class:`DTensor` for `train_step`, `evaluate` and `forward`; ``x.local`` is this rank's rows.

    A rank that cannot read its rows is given :class:`UnreadRows`, so that the step which takes them
    raises what went wrong on every rank alike. A program that handles this goes on with the next
    batch, or with the same one by :meth:`load_state_dict`.

    Args:
        source: An array, a ``np.memmap`` of a file of any size, or a tuple or a dict of them, all
            with the same rows; or a function that reads: given whole numbers of rows, in any order,
            it returns the array, tuple or dict of those rows. It is called in a thread, one call
            after another, and must not do anything together with other ranks.
        mesh: The mesh of the model.
        batch_size: Rows of a batch over all replicas, which need not be a multiple of these.
        rows: Rows that a function can read; None for arrays, which tell.
        seed: Of the order.
        shuffle: Whether the rows come in a random order.
        drop_last: Whether an epoch leaves out the rows that are too few for a batch; else its last
            batch has fewer.
        parts: In how many parts each batch is given out, one after the other, as evenly as goes:
            for steps that add up their gradients. All that is said of batches here is then said of
            these parts, but for `batch_size`.
        model: The model that the batches are for. They are ``(x, target)`` then, or a dict with
            the keys ``"x"``, ``"target"`` and the names of `inputs` of its `train_step`, or an
            array, that is x; a rank reads those that its stages take, and has None for the others.
        dim: The dim of the replicas. Along the others ranks read the same rows; on a mesh without
            it, all rows; None has every rank read all rows.
        prefetch: Most batches that are read ahead; with 0 each is read when it is asked for.

    Raises:
        ModuleError: On every rank, if an argument is none of these.
        ShapeError: On every rank, if arrays differ in their rows, or there is no whole batch.
        UnknownNameError: On every rank, if `dim` is none of the mesh; one other than ``"dp"``.
        MismatchError: On every rank, if the ranks give different numbers, or rows of different
            shapes or dtypes, or only some give a model.

    Example:
        >>> text = np.memmap("corpus.txt", np.uint8, mode="r")
        >>> def windows(starts):
        ...     both = text[starts[:, None] + np.arange(129)].astype(np.int64)
        ...     return both[:, :-1], both[:, 1:]
        >>> with mm.data.Batches(windows, mesh, 64, rows=len(text) - 128, seed=1) as batches:
        ...     for x, target in batches:
        ...         model.train_step(x, target, optimizer=optimizer)
    """

    def __init__(
        self,
        source: Any,
        mesh: DeviceMesh,
        batch_size: int,
        *,
        rows: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        parts: int = 1,
        model: ParallelModel | None = None,
        dim: str | None = "dp",
        prefetch: int = 1,
    ) -> None:
        self._mesh = live_mesh(mesh)

        def arguments() -> dict[str, Any]:
            self._takes, names = _names_of(model, mesh)
            found, kinds, self._structure, self._read = _reader(source, rows, self._takes, names)
            self._names = names
            self._dim = _dim_of(mesh, dim, model)
            self._prefetch = as_int(prefetch, "prefetch", ModuleError, least=0)
            size = as_int(batch_size, "batch_size", ModuleError, least=1)
            drop = as_flag(drop_last, "drop_last", ModuleError)
            if found < (size if drop else 1):
                raise ShapeError(
                    f"an epoch must have a batch at least: {found} rows are none of batch_size="
                    f"{size} with drop_last={drop}"
                )
            return {
                "rows": found,
                "batch_size": size,
                "parts": as_int(parts, "parts", ModuleError, least=1, most=size),
                "seed": as_int(seed, "seed", ModuleError, least=0),
                "shuffle": as_flag(shuffle, "shuffle", ModuleError),
                "drop_last": drop,
                "kinds": kinds,
                "model": type(model).__name__,
                "dim": self._dim,
            }

        settings = agree_alike(self._mesh.group(), "data.Batches", arguments)
        self.rows: int = settings["rows"]
        self.batch_size: int = settings["batch_size"]
        self.parts: int = settings["parts"]
        self.seed: int = settings["seed"]
        self.shuffle: bool = settings["shuffle"]
        self.drop_last: bool = settings["drop_last"]
        counts = self._mesh.group()._core.progress.counts
        key = f"data.Batches {self._mesh.group()._core.full_name}"
        counts[key] = counts.get(key, 0) + 1
        self._name = f"Batches number {counts[key]}, of {self.rows} rows, seed {self.seed}"
        self._position = 0
        self._order: tuple[tuple[int, int], HostArray] = ((-1, -1), np.empty(0, np.int64))
        self._ahead: deque[Future[Tree | None]] = deque()
        self._thread = _Thread() if prefetch else None
        self._closed = False

    # -- where it stands: local --------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        whole, rest = divmod(self.rows, self.batch_size)
        return (whole + (rest > 0 and not self.drop_last)) * self.parts

    @property
    def position(self) -> int:
        """Number of batches given out, over all epochs."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._position // len(self)

    def state_dict(self) -> dict[str, int]:
        """Return whole numbers that say which batch comes next, and of which order. Local.

        The same on every rank; save them with the model's state.
        """
        return {
            "position": self._position,
            **{name: int(getattr(self, name)) for name in _SETTINGS},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the batch that was next when `state` was taken. Local.

        On any mesh: the batches that follow have the same rows.

        Raises:
            ModuleError: If it is no such state, or one of another order: of other rows, another
                batch size or seed. Nothing has changed then.
        """
        self._check_open()
        names = ("position", *_SETTINGS)
        if not isinstance(state, Mapping) or state.keys() != set(names):
            raise ModuleError(
                f"a state of Batches has the numbers {', '.join(names)}, got {shown(state)}"
            )
        values = {
            name: as_int(_number(state[name]), f"state[{name!r}]", ModuleError, least=0)
            for name in names
        }
        mine = self.state_dict()
        other = [name for name in _SETTINGS if values[name] != mine[name]]
        if other:
            raise ModuleError(
                "a state goes on with the order that it is of, but "
                + ", ".join(f"its {name} is {values[name]} and here {mine[name]}" for name in other)
                + ": make the Batches with the same numbers"
            )
        self._forget()
        self._position = values["position"]

    # -- reading: local ----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Tree]:
        """Give the batches that are left of this epoch."""
        epoch = self.epoch
        while self.epoch == epoch:
            yield self.next()

    def next(self) -> Tree:
        """Return the next batch, of whatever epoch. Local, but the first that a function reads.

        That one is collective: it tells all ranks how batches are built.

        Raises:
            Exception: On every rank, what a function raised for its first batch, or what is wrong
                with the rows that it returned; :attr:`position` is as before. Later the step that
                takes a batch raises it.
            MismatchError: On every rank, if functions return rows that are built differently.
            ClosedError: If it is closed.
        """
        self._check_open()
        blocks: Tree | None = None
        problem: Exception | None = None
        try:
            blocks = self._next_rows()
        except Exception as error:
            problem = error
        if self._structure is None:
            self._structure = self._agreed_structure(blocks, problem)
        elif blocks is not None:
            problem = self._change_in(blocks)
        if problem is not None:
            unread = UnreadRows(problem)
            blocks = self._structure.unflatten([unread] * self._structure.num_leaves)
        self._position += 1
        if self._thread is not None:
            self._look_ahead(self._thread, self._prefetch)
        return self._split(self._position - 1, self._structure, blocks)

    def _next_rows(self) -> Tree | None:
        """Return this rank's rows of the next batch, None if it takes none."""
        if self._thread is None:
            return self._rows_of(self._position)
        self._look_ahead(self._thread, 1)
        try:
            blocks = self._ahead[0].result()
        except BaseException as error:
            if not isinstance(error, Exception) or self._structure is None:
                self._forget()  # the same rows are read again
            else:
                self._ahead.popleft()
            raise
        self._ahead.popleft()
        return blocks

    def _change_in(self, blocks: Tree) -> Exception | None:
        """Return what is wrong with rows that are not built like those of the first batch."""
        if self._structure is None or self._structure.leaves_of(blocks) is not None:
            return None
        return ModuleError(
            "a source returns rows that are built alike for all batches; for batch "
            f"{self._position} it returned a {type(blocks).__name__}, and for the first "
            f"{self._structure}"
        )

    def _agreed_structure(self, blocks: Tree | None, problem: Exception | None) -> Structure:
        """Return how batches of a function are built. Collective.

        Raises:
            Exception: On every rank, if the first could not be read on any, or is for no model.
            MismatchError: On every rank, if they are built differently.
        """
        mine: object = None
        if blocks is not None:
            _, structure = flatten(blocks)
            mine = [structure.to_json()]
            try:
                _check_form(structure, self._names)
            except ModuleError as error:
                problem = error
        call = Call("Batches.next", self._mesh.group().name)
        everyone = agree(self._mesh.group(), call, mine, problem=problem)
        forms = [Structure.from_json(one[0]) for one in everyone if one is not None]
        if any(form != forms[0] for form in forms):
            rows = "\n".join(
                f"  rank {rank}: {Structure.from_json(one[0])}"
                for rank, one in enumerate(everyone)
                if one is not None
            )
            raise on_all_ranks(
                MismatchError(
                    f"functions of Batches return rows that are built differently\n{rows}"
                )
            )
        return forms[0]

    def _look_ahead(self, thread: _Thread, most: int) -> None:
        """Have up to `most` batches read, from the next one on."""
        while len(self._ahead) < most:
            number = self._position + len(self._ahead)
            self._ahead.append(thread.submit(self._rows_of, number))

    def _forget(self) -> None:
        """Drop what was read ahead."""
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()

    def _span(self, number: int) -> tuple[int, slice]:
        """Return the epoch of a batch, and the places in its order that the batch has."""
        epoch, place = divmod(number, len(self))
        batch, part = divmod(place, self.parts)
        first = batch * self.batch_size
        mine = replica_rows(min(self.batch_size, self.rows - first), self.parts, part)
        return epoch, slice(first + mine.start, first + mine.stop)

    def _rows_of(self, number: int) -> Tree | None:
        """Read this rank's rows of a batch; None if it takes none."""
        if self._takes is not None and not self._takes:
            return None
        epoch, batch = self._span(number)
        replicas = 1 if self._dim is None else self._mesh.dim_size(self._dim)
        place = 0 if self._dim is None else self._mesh.coord(self._dim)
        mine = replica_rows(batch.stop - batch.start, replicas, place)
        first, stop = batch.start + mine.start, batch.start + mine.stop
        if first == stop:
            # A function may not know the dtype of no rows: it reads one, which is left out.
            return tree_map(
                lambda leaf, _: None if leaf is None else leaf[:0],
                self._read(np.zeros(1, np.int64)),
            )
        return self._read(self._places(epoch, first, stop))

    def _places(self, epoch: int, first: int, stop: int) -> HostArray:
        """Return the rows that stand at the places from `first` to `stop` in the order."""
        if not self.shuffle:
            return np.arange(first, stop)
        blocks = range(first // _BLOCK_ROWS, -(-stop // _BLOCK_ROWS))
        order = np.concatenate([self._block(epoch, block) for block in blocks])
        start = blocks[0] * _BLOCK_ROWS
        return order[first - start : stop - start]

    def _block(self, epoch: int, block: int) -> HostArray:
        """Return a part of the order; the last one is remembered."""
        if self._order[0] != (epoch, block):
            places = np.arange(block * _BLOCK_ROWS, min((block + 1) * _BLOCK_ROWS, self.rows))
            self._order = (epoch, block), shuffled(places, self.rows, (self.seed, epoch))
        return self._order[1]

    def _split(self, number: int, structure: Structure, blocks: Tree | None) -> Tree:
        """Return this rank's rows as blocks of split arrays; None in place of what it takes not."""
        _, batch = self._span(number)
        rows = batch.stop - batch.start
        layout = Layout(self._mesh, {} if self._dim is None else {self._dim: "S0"})

        def block(leaf: Any, _path: str) -> Any:
            if leaf is None or isinstance(leaf, UnreadRows):
                return leaf
            made = DTensor(self._mesh, layout, (rows, *leaf.shape[1:]), leaf.dtype, leaf)
            made._origin = f"batch {number} of {self._name}"
            return made

        if blocks is None:
            blocks = structure.unflatten([None] * structure.num_leaves)
        return tree_map(block, _taken(blocks, self._takes))

    # -- the end -----------------------------------------------------------------------------------

    def close(self, *, wait: bool = True) -> None:
        """End the thread. Local, and may be called again.

        Args:
            wait: Wait for what it reads now. A ``with`` block that an error ends does not.
        """
        self._closed = True
        self._forget()
        if self._thread is not None:
            self._thread.end(wait=wait)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(wait=kind is None)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(
                "these Batches are closed: make new ones, and load their state_dict()"
            )

    def __repr__(self) -> str:
        order = f"shuffled by seed {self.seed}" if self.shuffle else "in order"
        return (
            f"<Batches of {self.batch_size} of {self.rows} rows {order}, at batch "
            f"{self._position % len(self)} of {len(self)} in epoch {self.epoch}>"
        )


class UnreadRows:
    """The rows that a rank could not read, in the place of arrays of a batch.

    Whatever looks at them as at an array raises what reading raised. A step does so on every rank.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(f"{self!r} has no {name}")
        raise self._error

    def __array__(self, *_args: Any, **_options: Any) -> NoReturn:
        """Raise what reading raised."""
        raise self._error

    def __getitem__(self, key: Any) -> NoReturn:
        raise self._error

    def __len__(self) -> int:
        raise self._error

    def __repr__(self) -> str:
        return f"<rows that could not be read: {type(self._error).__name__}: {self._error}>"


class _Thread:
    """A thread that does one thing after another, and keeps no program from ending."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[int], Any], number: int) -> Future[Any]:
        """Have a function called."""
        future: Future[Any] = Future()
        self._tasks.put((future, partial(function, number)))
        return future

    def end(self, *, wait: bool) -> None:
        """Do no more; wait for what is being done."""
        self._tasks.put(None)
        if wait and self._thread is not current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, function = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            del task, future, function  # and what they hold of the program


def _number(value: object) -> object:
    """Return what np.load gives for a number as that."""
    return value.item() if isinstance(value, np.ndarray) and not value.shape else value


def _dim_of(mesh: DeviceMesh, dim: object, model: ParallelModel | None) -> str | None:
    """Return the dim of the replicas, None for a mesh without "dp", or with stages along it."""
    if model is not None and dim == "dp" == model._engine.pipe.name:
        return None
    if isinstance(dim, str) and mesh.contains_dim(dim):
        return dim
    if dim in ("dp", None):
        return None
    raise no_dim(mesh, dim, "dim")


def _names_of(
    model: ParallelModel | None, mesh: DeviceMesh
) -> tuple[frozenset[str] | None, frozenset[str]]:
    """Return what this rank's stages take of a batch, None for all, and what any stage takes."""
    if model is None:
        return None, frozenset()
    if not isinstance(model, ParallelModel):
        raise ModuleError(f"model must be a DataParallel or a PipelineParallel, got {shown(model)}")
    engine = model._engine
    if engine.mesh is not mesh:
        raise ModuleError(
            f"the model was made on another mesh ({engine.mesh.dims_text}) than the batches "
            f"({mesh.dims_text}): give both the same"
        )
    takes = {name for stage in engine.local.values() for name in stage.inputs}
    takes |= {"x"} if engine.is_first else set()
    takes |= {"target"} if engine.is_last else set()
    return frozenset(takes), frozenset({"x", "target", *engine.input_names})


def _check_form(structure: Structure, names: frozenset[str]) -> None:
    """Refuse a batch that does not say by its form what is for which stages of a model.

    Raises:
        ModuleError: If there is a model and it does not.
    """
    parts, keys = structure.parts or (), structure.keys
    fits = len(parts) <= len(_PAIR) if keys is None else names.issuperset(keys)
    if names and not fits:
        raise ModuleError(
            "the batches of a model are (x, target), or a dict with some of the keys "
            f"{', '.join(map(repr, sorted(names)))}, or an array, got {structure}"
        )


def _taken(tree: Tree, takes: frozenset[str] | None) -> Tree:
    """Return a batch with None in place of what is not taken."""
    if takes is None:
        return tree
    if isinstance(tree, tuple):
        return tuple(one if name in takes else None for name, one in zip(_PAIR, tree, strict=False))
    if isinstance(tree, dict):
        return {name: one if name in takes else None for name, one in tree.items()}
    return tree if "x" in takes else None


def _reader(
    source: Any, rows: int | None, takes: frozenset[str] | None, names: frozenset[str]
) -> tuple[int, str, Structure | None, Callable[[HostArray], Tree]]:
    """Return the number of rows, what a row is in words, how a batch is built, and what reads."""
    if callable(source):
        if rows is None:
            raise ModuleError("a function does not tell how many rows it can read: give rows=")
        what = "rows: those that the function can read"
        count = as_int(rows, what, ModuleError, least=0, most=_MOST_ROWS)
        return count, "of a function", None, partial(_read_by, source)
    if rows is not None:
        raise ModuleError(f"rows= is for a function that reads; arrays have theirs, got {rows!r}")
    leaves, structure = flatten(source, name="source")
    paths = ["source" + path for path in structure.paths()]
    for leaf, path in zip(leaves, paths, strict=True):
        if not isinstance(leaf, np.ndarray):
            raise ModuleError(
                f"{path} must be a NumPy array, an np.memmap, or a function that reads rows, got "
                f"{shown(leaf)}; of a DTensor give x.full(), or a function"
            )
    counts = [num_rows(leaf, name=path) for leaf, path in zip(leaves, paths, strict=True)]
    for count, path in zip(counts, paths, strict=True):
        if count != counts[0]:
            raise ShapeError(
                f"all arrays of source must have the same rows; {paths[0]} has {counts[0]} and "
                f"{path} {count}"
            )
    kinds = ", ".join(f"{leaf.shape[1:]} {leaf.dtype}" for leaf in leaves)
    _check_form(structure, names)
    mine = _taken(source, takes)

    def read(indices: HostArray) -> Tree:
        # By numbers, so that they are copies: writing into a batch must not change the source.
        return tree_map(lambda leaf, _: None if leaf is None else np.asarray(leaf[indices]), mine)

    return counts[0], f"{structure} of {kinds}", structure, read


def _read_by(function: Callable[[HostArray], Tree], indices: HostArray) -> Tree:
    """Return what a function reads, if it is as many rows as it was asked for."""
    leaves, structure = flatten(function(indices), name="rows")
    arrays = []
    for leaf, path in zip(leaves, structure.paths(), strict=True):
        array = np.asarray(leaf)
        if array.shape[:1] != (len(indices),):
            raise ShapeError(
                f"the function of Batches was asked for {len(indices)} rows, and rows{path} that "
                f"it returned has shape {array.shape}"
            )
        arrays.append(array if array.flags.writeable else array.copy())
    return structure.unflatten(arrays)


# -- the order -------------------------------------------------------------------------------------


def shuffled(places: HostArray, rows: int, key: tuple[int, ...]) -> HostArray:
    """Return what stands at some places of a random order of the numbers below `rows`.

    It takes no more memory than `places`, whatever `rows` is.

    Shapes:
        places: any, whole numbers from 0 to rows - 1.
        result: the same.

    Args:
        places: The places.
        rows: How many there are.
        key: Numbers that choose the order.

    Example:
        >>> shuffled(np.arange(6), 6, (0, 1)).tolist()
        [1, 3, 5, 2, 0, 4]
    """
    bits = (rows - 1).bit_length()
    keys = np.random.SeedSequence(list(key)).generate_state(_ROUNDS, np.uint64)
    numbers = _network(np.asarray(places).astype(np.uint64), bits, keys)
    outside = np.flatnonzero(numbers >= rows)
    while len(outside):
        numbers.flat[outside] = _network(numbers.flat[outside], bits, keys)
        outside = outside[numbers.flat[outside] >= rows]
    return numbers.astype(np.int64)


def _network(numbers: HostArray, bits: int, keys: HostArray) -> HostArray:
    """Send numbers of so many bits through the rounds of a Feistel network."""
    low = np.uint64(bits // 2)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high, rest = numbers >> low, numbers & low_mask
    for number, key in enumerate(keys):
        if number % 2:
            rest = rest ^ (_hash(high + key) & low_mask)
        else:
            high = high ^ (_hash(rest + key) & high_mask)
    return (high << low) | rest


def _hash(x: HostArray) -> HostArray:
    """Mix 64 bits so that each depends on all: the end of SplitMix64 (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: HostArray = x ^ (x >> np.uint64(31))
    return mixed

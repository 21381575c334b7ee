"""The agreement of the ranks on a step: its header, and its status.

The header is one all-reduce of a few numbers, started when a step begins, and looked at while
a rank waits and when the step ends. A rank that was given the batch does not wait for it;
one that was not learns from it how many rows there are. Where each replica was given its own rows,
a second all-reduce tells how many each has. The status, in which all ranks meet when the work is
done, is one of two numbers. All are persistent collectives on memory of their own, and a rank that
steps alone starts none.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from mpimesh.arguments import digest_bits
from mpimesh.arrays import HostArray
from mpimesh.errors import MismatchError, MpimeshError, ShapeError
from mpimesh.runtime import CollectiveTensor, ProcessGroup

__all__ = [
    "OWN_ROWS",
    "BatchSpec",
    "Size",
    "StepExchanges",
    "checksum",
    "disagreement",
    "fingerprint",
    "input_title",
    "sample",
]

OWN_ROWS = -1
"""In the place of a number of microbatches: each replica was given its own rows."""
_UNKNOWN = -(1 << 62)
_SAMPLE = 4096
_SAME_START = "make the model with broadcast=True, or its first values from the same seed"
_SAME_CHANGES = (
    "optimizers with their numbers, clip_grad_norm, load_state_dict and what writes to parameters "
    "must be alike on all replicas; full_state_dict() of one of them, loaded on all, repairs it"
)


@lru_cache(maxsize=256)
def fingerprint(text: str) -> int:
    """Return 62 bits that are equal on two ranks only if their texts are."""
    return digest_bits(text.encode(), 62)


def input_title(name: str) -> str:
    """Return how messages call a named input."""
    return f"inputs[{name!r}]"


def checksum(arrays: Iterable[HostArray]) -> str:
    """Return eight hexadecimal digits that tell the values of `arrays` from most others.

    Cost:
        Reads them once, about a second for 2 GB.
    """
    crc = 0
    for x in arrays:
        crc = zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data, crc)
    return f"{crc:08x}"


def sample(x: HostArray) -> HostArray:
    """Return some thousand elements of `x`, spread over it."""
    return x.flat[:: max(1, x.size // _SAMPLE)]


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """A rank's arguments of a step.

    Attributes:
        call: What it calls, in words.
        rows: Rows of its global batch, or those of its replica; None if it was given none.
        count: Its number of microbatches, 0 if it was given whole, `OWN_ROWS` if it was given the
            rows of its replica; None if this rank got none.
        sizes: The rows of its microbatches, in words; None if it was given none.
        goal: What it trains by, in words; None if it does not hold the last stage.
        kinds: Shape and dtype of a row, in words, by the name of each input that it was given.
        sums: What tells the values from others, by the name of each input and the target; empty if
            nothing is to be checked.
        place: Which of the parts of the model it holds. Ranks of one place are replicas.
        optimizer: The optimizer that is to change that part, with its numbers; None if there is
            none.
        parameters: What tells the values of each parameter of that part from others, by name;
            empty if they are not to be compared.
        replica: The replica whose rows it was given; None if the batch is whole.
        counted: What the targets among these rows count; None if that is their number.
    """

    call: str
    rows: int | None = None
    count: int | None = None
    sizes: str | None = None
    goal: str | None = None
    kinds: dict[str, str] = field(default_factory=dict)
    sums: dict[str, str] = field(default_factory=dict)
    place: int = 0
    optimizer: str | None = None
    parameters: dict[str, str] = field(default_factory=dict)
    replica: int | None = None
    counted: float | None = None

    def size(self, names: Sequence[str]) -> Size | None:
        """Return the size of the batch, whose inputs have these names.

        None if this rank cannot tell. The kind of microbatches does not matter.
        """
        if self.rows is None or self.count is None or self.count == OWN_ROWS:
            return None
        if self.count:
            return Size(self.rows, self.count, 0)
        if any(name not in self.kinds for name in names):
            return None
        return Size(self.rows, 0, self.kind(names))

    def kind(self, names: Sequence[str]) -> int:
        """Return what stands for shape and dtype of the rows of these inputs."""
        return _kind([fingerprint(self.kinds.get(name, "")) for name in names])


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a batch.

    Attributes:
        rows: Rows of the global batch.
        count: In how many microbatches it was given; 0 if it was given whole.
        kind: Stands for shape and dtype of the inputs' rows.
        own: Where each replica was given its own rows, how many; None for one that was given none,
            because a rank of it failed. Empty where the batch was given whole.
        counted: What the targets count, where `own` is known and that is not their rows.
    """

    rows: int
    count: int
    kind: int
    own: tuple[int | None, ...] = ()
    counted: float | None = None


class StepExchanges:
    """The exchanges of all steps of a model, planned once. Making it is local.

    Where each replica was given its own rows, reading the header takes a second exchange of as few
    numbers: how many rows each has. All ranks come to that, those that have failed at the end of
    the step, and until then no rank has begun its work, for none knows which rows of the batch its
    own are.

    Args:
        scope: The ranks of the steps.
        names: The names of all inputs, the same on every rank.
        places: In how many parts the model lies on the ranks.
        replicas: How many replicas share the rows.

    Attributes:
        is_alone: Whether the header of this step has failed because other ranks are in none.
    """

    def __init__(
        self, scope: ProcessGroup, names: Sequence[str], places: int, replicas: int
    ) -> None:
        self._scope = scope
        self._names = tuple(names)
        self._places = places
        self._replicas = replicas
        self._numbers = np.zeros(2)
        numbers = self._numbers
        self._is_solo = scope.size == 1
        if not self._is_solo:
            # Rows, count, call, goal, sizes; kinds and sums by name, those of the target; by place.
            self._header = _Comparison(scope, 5 + 2 * len(names) + 1 + 2 * places)
            self._status = scope.all_reduce_init(numbers, out=numbers, label="step status")
        self._own_rows: _Comparison | None = None
        self._spec = BatchSpec("")
        self._size: Size | None = None
        self.is_alone = False

    def begin(self, spec: BatchSpec) -> None:
        """Start the header of a step. Collective, and does not wait."""
        names, places = self._names, self._places
        self._spec = spec
        self._size = None
        self.is_alone = False
        if self._is_solo:
            self._size = spec.size(names)
            if spec.count == OWN_ROWS and spec.rows is not None:
                own = (spec.rows,)
                self._size = Size(spec.rows, 0, spec.kind(names), own=own, counted=spec.counted)
            return
        is_whole = spec.replica is None
        texts = [
            spec.call,
            spec.goal,
            spec.sizes,
            *map(spec.kinds.get, names),
            *(self._sums() if is_whole else [None] * (len(names) + 1)),
            *_at(spec.place, spec.optimizer, places),
            *_at(spec.place, str(spec.parameters) if spec.parameters else None, places),
        ]
        self._header.start([spec.rows if is_whole else None, spec.count], texts)
        if self._own_rows is not None:
            self._own_rows.largest = None

    def test(self) -> bool:
        """Tell whether :meth:`read` would not wait for the header. Never waits."""
        return self._is_solo or self._header.done()

    def read(self) -> Size:
        """Wait for the header and return the size of the global batch.

        Raises:
            MismatchError: If the ranks call different things or were given different batches.
                :func:`disagreement` says it in full.
            ShapeError: If no rank was given a batch.
        """
        if self._size is None and not self._is_solo:
            rows, count, _, _, _, *rest = self._agreed(self._header)
            kind = _kind(rest[: len(self._names)])
            self._size = self._own(kind) if count == OWN_ROWS else Size(rows, count, kind)
        if self._size is None or self._size.rows == _UNKNOWN:
            raise ShapeError("no rank was given a batch: x is needed where the first stage lies")
        return self._size

    def end(self, *, failed: bool, loss: float) -> tuple[bool, float]:
        """Meet all ranks. Collective.

        Returns:
            Whether any has failed, and the sum of the losses.
        """
        if self._is_solo:
            return failed, loss
        self._numbers[:] = failed, loss
        failures, total = self._status.start().resolve().tolist()
        return failures > 0, total

    def _sums(self) -> list[str | None]:
        return [*map(self._spec.sums.get, (*self._names, "target"))]

    def _own(self, kind: int) -> Size:
        """Exchange how many rows each replica was given, and return the size of all together."""
        exchange, spec = self._own_rows, self._spec
        if exchange is None:
            count = self._replicas * (2 + len(self._names) + 1)
            exchange = self._own_rows = _Comparison(self._scope, count)
        if exchange.largest is None:
            numbers: list[int | None] = []
            texts: list[str | None] = []
            for replica in range(self._replicas):
                mine = replica == spec.replica
                numbers += [spec.rows, _bits(spec.counted)] if mine else [None, None]
                texts += self._sums() if mine else [None] * (len(self._names) + 1)
            exchange.start(numbers, texts)
        numbers_of = self._agreed(exchange)[: 2 * self._replicas]
        own = [None if rows == _UNKNOWN else rows for rows in numbers_of[::2]]
        counts = [_number(bits) for bits in numbers_of[1::2] if bits != _UNKNOWN]
        rows = sum(rows or 0 for rows in own)
        return Size(rows, 0, kind, own=tuple(own), counted=sum(counts) if counts else None)

    def _agreed(self, exchange: _Comparison) -> list[int]:
        """Return what the ranks have alike, `_UNKNOWN` where none said anything.

        Raises:
            MismatchError: On every rank, if something differs.
        """
        try:
            largest, opposite = exchange.resolve()
        except MpimeshError:
            self.is_alone = True
            raise
        for high, low in zip(largest, opposite, strict=True):
            if high != -low and high != _UNKNOWN:
                raise MismatchError("the ranks were given different things for this step")
        return largest


class _Comparison:
    """An exchange of numbers and texts, which all ranks that say anything must have alike.

    Attributes:
        largest: What has come, and minus the smallest of it; None before.
    """

    def __init__(self, scope: ProcessGroup, count: int) -> None:
        # After a maximum: the largest of each and minus the smallest, unknown ones left out.
        self._table = table = np.full((2, count), _UNKNOWN)
        self._plan = scope.all_reduce_init(table, "max", out=table, label="step header")
        self._handle: CollectiveTensor | None = None
        self.largest: tuple[list[int], list[int]] | None = None

    def start(self, numbers: Sequence[int | None], texts: Sequence[str | None]) -> None:
        """Start to compare, None where this rank has nothing to say. Collective."""
        values = [
            *(_UNKNOWN if number is None else number for number in numbers),
            *(_UNKNOWN if text is None else fingerprint(text) for text in texts),
        ]
        self._table[0] = values
        self._table[1] = [value if value == _UNKNOWN else -value for value in values]
        self.largest = None
        self._handle = self._plan.start()

    def done(self) -> bool:
        """Tell whether all has come. Never waits."""
        return self._handle is None or self._handle.done()

    def resolve(self) -> tuple[list[int], list[int]]:
        """Wait for all ranks."""
        if self.largest is None and self._handle is not None:
            self._handle.resolve()
            self._handle = None
            largest, opposite = self._table.tolist()
            self.largest = largest, opposite
        if self.largest is None:
            raise MpimeshError("a comparison of the ranks was read before it was started")
        return self.largest


def _bits(number: float | None) -> int | None:
    """Return a whole number for each of at least 0, above `_UNKNOWN`, as minus it is."""
    if number is None:
        return None
    return int(np.array(number, np.float64).view(np.int64)) + (_UNKNOWN + 1)


def _number(bits: int) -> float:
    """Return the number that has these :func:`_bits`."""
    return float(np.array(bits - (_UNKNOWN + 1), np.int64).view(np.float64))


def _at(place: int, text: str | None, places: int) -> list[str | None]:
    """Return a row that only ranks of one place fill in, so that only they are compared."""
    return [text if one == place else None for one in range(places)]


def _kind(numbers: list[int]) -> int:
    return fingerprint(str(numbers))


def _parts(spec: BatchSpec) -> str | None:
    """Return in words how a batch was cut."""
    if spec.count is None:
        return None
    if spec.count == OWN_ROWS:
        return "none, they are the replica's own rows"
    return f"{spec.count}, of {spec.sizes} rows" if spec.count else "none, it is whole"


def disagreement(
    specs: Sequence[BatchSpec], ranks: Sequence[int], *, batch_cure: str = "", first: bool = False
) -> MismatchError | None:
    """Return the error for what `ranks` were given, None if it is not at odds.

    Args:
        specs: What each was given.
        ranks: Their numbers, for messages.
        batch_cure: What to do where their batches differ.
        first: Whether it is the first step.
    """
    batch = "must be given the same global batch in"
    values = "each takes its own rows out of it. The CRC-32 of its values, or of some of them, is"
    kinds = dict.fromkeys(name for one in specs for name in one.kinds)
    sums = dict.fromkeys(name for one in specs for name in one.sums)
    places = sorted({one.place for one in specs})
    whole = [one if one.replica is None else None for one in specs]
    of_kind = batch if any(whole) else "must be given rows of the same shape and dtype in"
    rules: list[tuple[str, Sequence[object]]] = [
        ("must take the same step with the same options", [one.call for one in specs]),
        (f"{batch} x and target, or None; rows are", [one and one.rows for one in whole]),
        (
            "must be given the batch whole, or cut into the same microbatches, or the rows of "
            'their replica by rows="local" or as DTensors; theirs are',
            [_parts(one) for one in specs],
        ),
        *_rules_of_own_rows(specs, sums),
        *(
            (f"{of_kind} {name}, or None; its rows are", [one.kinds.get(name) for one in specs])
            for name in kinds
        ),
        *(
            (f"{batch} {name}, or None; {values}", [one and one.sums.get(name) for one in whole])
            for name in sums
        ),
        (
            "of the last stage must train by the same loss and denominator",
            [one.goal for one in specs],
        ),
        *(
            (
                "that hold the same parameters must change them by the same optimizer",
                [one.optimizer if one.place == place else None for one in specs],
            )
            for place in places
        ),
        *(
            (
                f"that hold parameter {name!r} must hold the same values: "
                f"{_SAME_START if first else _SAME_CHANGES}. Their digests are",
                [one.parameters.get(name) if one.place == place else None for one in specs],
            )
            for place in places
            for name in dict.fromkeys(
                name for one in specs if one.place == place for name in one.parameters
            )
        ),
    ]
    for rule, told in rules:
        by_value: dict[object, list[int]] = {}
        for rank, value in zip(ranks, told, strict=True):
            if value is not None:
                by_value.setdefault(value, []).append(rank)
        if len(by_value) > 1:
            rows = "\n".join(f"  ranks {who}: {value}" for value, who in by_value.items())
            cure = f"\n{batch_cure}" if rule.startswith(batch) and batch_cure else ""
            return MismatchError(f"all ranks {rule}\n{rows}{cure}")
    return None


def _rules_of_own_rows(
    specs: Sequence[BatchSpec], sums: Iterable[str]
) -> Iterator[tuple[str, Sequence[object]]]:
    """Give what the ranks of each replica that was given its own rows must have alike."""
    for replica in sorted({one.replica for one in specs if one.replica is not None}):
        mine = [one if one.replica == replica else None for one in specs]
        who = f"of replica {replica} must be given the same rows of"
        how = "each replica its own, by mesh.coord() along its dim and not by mesh.rank"
        yield f"{who} x and target, or None; theirs are", [one and one.rows for one in mine]
        for name in sums:
            told = [one and one.sums.get(name) for one in mine]
            yield f"{who} {name}, or None; {how}. The CRC-32 of the values is", told
        counts = [one and one.counted for one in mine]
        yield f"{who} the target, or None; what the loss counts in them is", counts

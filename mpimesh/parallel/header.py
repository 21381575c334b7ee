"""The agreement of the ranks on a step: its status, and for some models a header before.

The status, in which all ranks meet when the work is done, is one all-reduce of a few
numbers: failures, loss, and where each rank has the whole model a code of what it was given, by
which they learn whether that is alike.

Where ranks meet within a step, because they hold stages, parts of layers or several buckets, they
compare that before, in the header: one all-reduce of a few numbers, started when a step begins, and
looked at while a rank waits and when the step ends. A rank that was given the batch does not wait
for it; one that was not learns from it how many rows there are. Where each replica has its own
rows, another all-reduce tells how many each has. All are persistent collectives on memory of their
own, and a rank that steps alone starts none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from mpimesh.arguments import digest_bits
from mpimesh.errors import MismatchError, MpimeshError, ShapeError
from mpimesh.runtime import CollectiveTensor, ProcessGroup

__all__ = [
    "CODES",
    "OWN_ROWS",
    "UNKNOWN",
    "Facts",
    "Size",
    "StepExchanges",
    "bits_of",
    "code_of",
    "disagreement",
    "fingerprint",
    "number_of",
]

OWN_ROWS = -1
"""In the place of a number of microbatches: each replica has its own rows."""

UNKNOWN = -(1 << 62)
"""In the place of any number: this rank has nothing to say."""

_BITS = 62
CODES = 1 << _BITS
"""So many codes of what a rank was given there are."""
_CALL = 2
_TEXTS = 5
"""Numbers of a header before those of inputs: rows, microbatches, call, goal, sizes."""

Size: TypeAlias = tuple[int, int, tuple[int, ...], tuple[int | None, ...], float | None]
"""The size of a batch, alike on all ranks: the rows of the global batch; in how many microbatches
it was given, 0 if it was given whole; what stands for shape and dtype of each input's rows, where
it is whole. Where each replica has its own rows: how many each was given, None for one that
was given none because a rank of it failed; and what the targets count, None if it is their rows."""


Facts: TypeAlias = dict[str, Any]
"""A rank's arguments of a step as all ranks compare them, in JSON's types.

| name | what |
|---|---|
| `call` | what it calls |
| `step` | which training step it is; None of other calls |
| `how` | how it is done, in words |
| `rows` | rows of its global batch, or those of its replica |
| `count` | its number of microbatches, 0 if whole, `OWN_ROWS` if it was given its replica's rows |
| `sizes` | the rows of its microbatches, in words; None if it was given none |
| `goal` | what it trains by, in words; None if it does not hold the last stage |
| `kinds` | shape and dtype of a row, in words, by the title of each input that it was given |
| `sums` | what tells the values from others, by the title of each input and the target |
| `place` | which of the parts of the model it holds; ranks of one place are replicas |
| `optimizer` | the optimizer that is to change that part, with its numbers; None if there is none |
| `parameters` | what tells the values of each parameter of that part from others, by name |
| `replica` | the replica whose rows it was given; None if the batch is whole |
| `counted` | what the targets among these rows count; None if that is their number |
| `trained` | with checks on, the optimizer of its parameters, with its numbers |
| `denominator` | with checks on, the denominator that it was given |
| `origin` | with checks on, which of the batches of :class:`~mpimesh.data.Batches` x is |
| `loaded` | with checks on, a digest of the states that it has loaded |

Rows and count are None where it was given no batch; sums and parameters are empty where they are
not to be compared.
"""

_SAME_START = "make the model with broadcast=True, or its first values from the same seed"
_SAME_CHANGES = (
    "optimizers with their numbers, clip_grad_norm, load_state_dict and what writes to parameters "
    "must be alike on all replicas; full_state_dict() of one of them, loaded on all, repairs it"
)


@lru_cache(maxsize=256)
def fingerprint(text: str) -> int:
    """Return 62 bits that are equal on two ranks only if their texts are."""
    return digest_bits(text.encode(), _BITS)


def number_of(text: str | None) -> int:
    """Return the number by which ranks compare a text; `UNKNOWN` for None."""
    return UNKNOWN if text is None else fingerprint(text)


def code_of(numbers: Sequence[int]) -> int:
    """Return a number by which ranks compare all of `numbers`, see :meth:`StepExchanges.begin`."""
    return fingerprint(str(numbers))


class StepExchanges:
    """The exchanges of all steps of a model, planned once. Making it is local.

    Where each replica has its own rows, reading the header takes a second exchange of as few
    numbers: how many rows each has. All ranks come to that, those that have failed at the end of
    the step, and until then no rank has begun its work, for none knows which rows of the batch its
    own are.

    Args:
        scope: The ranks of the steps.
        inputs: Number of inputs, with x, the same on every rank.
        places: Number of parts of the model.
        replicas: How many replicas share the rows.
        more: How many numbers there are with checks on.
        codes: Whether the status may have to compare codes.

    Attributes:
        is_alone: Whether the header or the status of this step has failed because other ranks are
            in none.
    """

    def __init__(
        self,
        scope: ProcessGroup,
        inputs: int,
        places: int,
        replicas: int,
        more: int,
        *,
        codes: bool,
    ) -> None:
        self._scope = scope
        self._inputs = inputs
        self._replicas = replicas
        # In two dims, as no bucket is: ranks of a node can tell it from one.
        self._status_numbers = numbers = np.zeros((1, 6 if codes else 2))
        self._compares = codes
        # Sums of squares of so many bits are exact.
        self._piece_bits = (53 - (scope.size - 1).bit_length()) // 2
        self._is_solo = scope.size == 1
        if not self._is_solo:
            # Checksums are of all inputs and the target.
            self._header = _Comparison(scope, _TEXTS + 2 * inputs + 1 + 2 * places + more)
            self._status = scope.all_reduce_init(numbers, out=numbers, label="step status")
        self._own_rows: _Comparison | None = None
        self._numbers: Sequence[int] = ()
        self._own: Sequence[int] = ()
        self._replica: int | None = None
        self._size: Size | None = None
        self.is_alone = False

    def begin(
        self, numbers: Sequence[int], step: int | None, replica: int | None, own: Sequence[int]
    ) -> None:
        """Start the header of a step. Collective, and does not wait.

        Args:
            numbers: What all ranks that say anything must have alike: rows, microbatches, call,
                goal, sizes; the kind of each input; the checksums of inputs and target; by place
                the optimizer, and the values of parameters; with checks on, what
                :data:`~.checked.CHECKED` names.
            step: Which training step it is, which they must have alike, too; None for other calls.
            replica: The replica whose rows this rank was given; None if the batch is whole.
            own: What the ranks of that replica must have alike: rows, what their targets count
                (see :func:`bits_of`), and the checksums.
        """
        self._numbers = numbers = list(numbers)
        numbers[_CALL] = (numbers[_CALL] + (step or 0)) % CODES
        self._replica, self._own = replica, own
        self._size = None
        self.is_alone = False
        if not self._is_solo:
            self._header.start(numbers)
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
        if self._size is None:
            agreed = self._numbers if self._is_solo else self._agreed(self._header)
            rows, count, kinds = agreed[0], agreed[1], agreed[_TEXTS : _TEXTS + self._inputs]
            if count == OWN_ROWS:
                self._size = self._size_of_own(tuple(kinds), self._replica, self._own)
            else:
                self._size = (rows, count, () if count else tuple(kinds), (), None)
        if self._size[0] == UNKNOWN:
            raise ShapeError("no rank was given a batch: x is needed where the first stage lies")
        return self._size

    def meet(self, *, failed: bool, loss: float, code: int = 0) -> tuple[bool, float, bool]:
        """Meet all ranks. Collective.

        Args:
            failed: Whether this rank has failed.
            loss: Its part of the loss.
            code: What all that have not failed must have alike, a whole number of at least 0.

        Returns:
            Whether any has failed, the sum of the losses, and whether all codes are alike.
        """
        if self._is_solo:
            return failed, loss, True
        bits, self.is_alone = self._piece_bits, False
        low, high = code & (1 << bits) - 1, code >> bits & (1 << bits) - 1
        mine = (failed, loss, low, high, low * low, high * high)
        self._status_numbers[0] = mine if self._compares else mine[:2]
        try:
            ((failures, total, *sums),) = self._status.start().resolve().tolist()
        except MpimeshError:
            self.is_alone = True
            raise
        if not self._compares:
            return failures > 0, total, True
        # By Cauchy and Schwarz: the mean of squares is the square of the mean where all are alike.
        low, high, of_low, of_high = map(int, sums)
        size = self._scope.size
        return failures > 0, total, low * low == size * of_low and high * high == size * of_high

    def size_of_own(self, numbers: Sequence[int], replica: int | None, own: Sequence[int]) -> Size:
        """Return the size of a batch of which each replica has its own rows. Collective.

        All ranks are known to take the same step.

        Args:
            numbers: As of :meth:`begin`; so are the others.
            replica: The replica whose rows this rank was given.
            own: What the ranks of that replica must have alike.
        """
        if self._own_rows is not None:
            self._own_rows.largest = None
        return self._size_of_own(tuple(numbers[_TEXTS : _TEXTS + self._inputs]), replica, own)

    def _size_of_own(self, kinds: tuple[int, ...], replica: int | None, own: Sequence[int]) -> Size:
        """Exchange how many rows each replica was given, and return the size of all together."""
        width = 2 + self._inputs + 1
        exchange = self._own_rows
        if exchange is None:
            exchange = self._own_rows = _Comparison(self._scope, self._replicas * width)
        if exchange.largest is None:
            nothing = [UNKNOWN] * width
            exchange.start(
                [
                    number
                    for place in range(self._replicas)
                    for number in (own if place == replica else nothing)
                ]
            )
        numbers = self._agreed(exchange)
        rows_of = tuple(None if rows == UNKNOWN else rows for rows in numbers[::width])
        counts = [_number(bits) for bits in numbers[1::width] if bits != UNKNOWN]
        rows = sum(rows or 0 for rows in rows_of)
        return rows, 0, kinds, rows_of, sum(counts) if counts else None

    def _agreed(self, exchange: _Comparison) -> list[int]:
        """Return what the ranks have alike, `UNKNOWN` where none said anything.

        Raises:
            MismatchError: On every rank, if something differs.
        """
        try:
            largest, opposite = exchange.resolve()
        except MpimeshError:
            self.is_alone = True
            raise
        for high, low in zip(largest, opposite, strict=True):
            if high != -low and high != UNKNOWN:
                raise MismatchError("the ranks were given different things for this step")
        return largest


class _Comparison:
    """An exchange of numbers, which all ranks that say anything must have alike.

    Attributes:
        largest: What has come, and minus the smallest of it; None before.
    """

    def __init__(self, scope: ProcessGroup, count: int) -> None:
        # After a maximum: the largest of each and minus the smallest, unknown ones left out.
        self._table = table = np.full((2, count), UNKNOWN)
        self._plan = scope.all_reduce_init(table, "max", out=table, label="step header")
        self._handle: CollectiveTensor | None = None
        self.largest: tuple[list[int], list[int]] | None = None

    def start(self, values: Sequence[int]) -> None:
        """Start to compare, `UNKNOWN` where this rank has nothing to say. Collective."""
        self._table[0] = values
        self._table[1] = [value if value == UNKNOWN else -value for value in values]
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


def bits_of(number: float | None) -> int:
    """Return a whole number for each of at least 0, above `UNKNOWN`, as minus it is; or that."""
    if number is None:
        return UNKNOWN
    return int(np.array(number, np.float64).view(np.int64)) + (UNKNOWN + 1)


def _number(bits: int) -> float:
    """Return the number that has these :func:`bits_of`."""
    return float(np.array(bits - (UNKNOWN + 1), np.int64).view(np.float64))


# -- what the ranks compare ------------------------------------------------------------------------


def _call_of(facts: Facts) -> str:
    """Return in words what a rank called."""
    step = "" if facts["step"] is None else f" {facts['step']}"
    return f"{facts['call']}{step} of {facts['how']}"


def _cut_of(facts: Facts) -> str | None:
    """Return in words how a batch was cut."""
    if facts["count"] is None:
        return None
    if facts["count"] == OWN_ROWS:
        return "none, they are the replica's own rows"
    if not facts["count"]:
        return "none, it is whole"
    return f"{facts['count']}, of {facts['sizes']} rows"


def disagreement(
    everyone: Sequence[Facts], ranks: Sequence[int], *, batch_cure: str = "", first: bool = False
) -> MismatchError | None:
    """Return the error for what `ranks` were given, None if it is not at odds.

    Args:
        everyone: What each was given.
        ranks: Their numbers, for messages.
        batch_cure: What to do where their batches differ.
        first: Whether it is the first step.
    """
    batch = "must be given the same global batch in"
    values = "each takes its own rows out of it. The CRC-32 of its values, or of some of them, is"
    kinds = dict.fromkeys(name for one in everyone for name in one["kinds"])
    sums = dict.fromkeys(name for one in everyone for name in one["sums"])
    places = sorted({one["place"] for one in everyone})
    whole = [one if one["replica"] is None else None for one in everyone]
    of_kind = batch if any(whole) else "must be given rows of the same shape and dtype in"
    rules: list[tuple[str, Sequence[object]]] = [
        ("must take the same step with the same options", [_call_of(one) for one in everyone]),
        (f"{batch} x and target, or None; rows are", [one and one["rows"] for one in whole]),
        (
            "must be given the batch whole, or cut into the same microbatches, or the rows of "
            'their replica by rows="local" or as DTensors; theirs are',
            [_cut_of(one) for one in everyone],
        ),
        *_rules_of_own_rows(everyone, sums),
        *(
            (
                f"{of_kind} {name}, or None; its rows are",
                [one["kinds"].get(name) for one in everyone],
            )
            for name in kinds
        ),
        *(
            (f"{batch} {name}, or None; {values}", [one and one["sums"].get(name) for one in whole])
            for name in sums
        ),
        (
            "of the last stage must train by the same loss and denominator",
            [one["goal"] for one in everyone],
        ),
        *(
            (
                "that hold the same parameters must change them by the same optimizer",
                [one["optimizer"] if one["place"] == place else None for one in everyone],
            )
            for place in places
        ),
        (
            "must train their parts of the model alike: call step() as often, with the same "
            "numbers; a stage that is to have others takes two optimizers or more, which are not "
            "compared. Theirs are",
            _told(everyone, "trained"),
        ),
        ("must divide the loss by the same number; theirs are", _told(everyone, "denominator")),
        ("must be given the same batch of the same Batches; theirs are", _told(everyone, "origin")),
        (
            "must have loaded the same states of the whole model; their digests are",
            _told(everyone, "loaded"),
        ),
        *(
            (
                f"that hold parameter {name!r} must hold the same values: "
                f"{_SAME_START if first else _SAME_CHANGES}. Their digests are",
                [
                    one["parameters"].get(name) if one["place"] == place else None
                    for one in everyone
                ],
            )
            for place in places
            for name in dict.fromkeys(
                name for one in everyone if one["place"] == place for name in one["parameters"]
            )
        ),
    ]
    for rule, stated in rules:
        by_value: dict[object, list[int]] = {}
        for rank, value in zip(ranks, stated, strict=True):
            if value is not None:
                by_value.setdefault(value, []).append(rank)
        if len(by_value) > 1:
            rows = "\n".join(f"  ranks {who}: {value}" for value, who in by_value.items())
            cure = f"\n{batch_cure}" if rule.startswith(batch) and batch_cure else ""
            return MismatchError(f"all ranks {rule}\n{rows}{cure}")
    return None


def _told(everyone: Sequence[Facts], name: str) -> list[object]:
    return [one[name] for one in everyone]


def _rules_of_own_rows(
    everyone: Sequence[Facts], sums: Iterable[str]
) -> Iterator[tuple[str, Sequence[object]]]:
    """Give what the ranks of each replica that was given its own rows must have alike."""
    for replica in sorted({one["replica"] for one in everyone if one["replica"] is not None}):
        mine = [one if one["replica"] == replica else None for one in everyone]
        who = f"of replica {replica} must be given the same rows of"
        how = "each replica its own, by mesh.coord() along its dim and not by mesh.rank"
        yield f"{who} x and target, or None; theirs are", [one and one["rows"] for one in mine]
        for name in sums:
            stated = [one and one["sums"].get(name) for one in mine]
            yield f"{who} {name}, or None; {how}. The CRC-32 of the values is", stated
        counts = [one and one["counted"] for one in mine]
        yield f"{who} the target, or None; what the loss counts in them is", counts

"""The agreement of the ranks on a step: its header, and its status.

The header is one all-reduce of a few numbers, started when a step begins, and looked at while
a rank waits and when the step ends. A rank that was given the batch does not wait for it;
one that was not learns from it how many rows there are. The status, in which all ranks meet when
the work is done, is one of two numbers. Both are persistent collectives on memory of their own, and
a rank that steps alone starts neither.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from mpimesh.arguments import digest_bits
from mpimesh.arrays import HostArray
from mpimesh.errors import MismatchError, MpimeshError, ShapeError
from mpimesh.runtime import CollectiveTensor, ProcessGroup

__all__ = [
    "BatchSpec",
    "StepExchanges",
    "checksum",
    "disagreement",
    "fingerprint",
    "input_title",
    "sample",
]

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
        rows: Rows of its global batch; None if it was given none.
        count: Its number of microbatches, 0 if it was given whole; None if this rank got none.
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

    def size(self, names: Sequence[str]) -> Size | None:
        """Return the size of the batch, whose inputs have these names.

        None if this rank cannot tell. The kind of microbatches does not matter.
        """
        if self.rows is None or self.count is None:
            return None
        if self.count:
            return Size(self.rows, self.count, 0)
        if any(name not in self.kinds for name in names):
            return None
        return Size(self.rows, 0, _kind([fingerprint(self.kinds[name]) for name in names]))


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a batch.

    Attributes:
        rows: Rows of the global batch.
        count: In how many microbatches it was given; 0 if it was given whole.
        kind: Stands for shape and dtype of the inputs' rows.
    """

    rows: int
    count: int
    kind: int


class StepExchanges:
    """The two exchanges of all steps of a model, planned once. Making it is local.

    Args:
        scope: The ranks of the steps.
        names: The names of all inputs, the same on every rank.
        places: In how many parts the model lies on the ranks.

    Attributes:
        is_alone: Whether the header of this step has failed because other ranks are in none.
    """

    def __init__(self, scope: ProcessGroup, names: Sequence[str], places: int) -> None:
        self._names = tuple(names)
        self._places = places
        # Rows, count, call, goal, sizes; kinds and sums by name, those of the target; by place.
        count = 5 + 2 * len(names) + 1 + 2 * places
        # After a maximum: the largest of each and minus the smallest, unknown ones left out.
        self._table = np.full((2, count), _UNKNOWN)
        self._numbers = np.zeros(2)
        table, numbers = self._table, self._numbers
        self._is_solo = scope.size == 1
        if not self._is_solo:
            self._header = scope.all_reduce_init(table, "max", out=table, label="step header")
            self._status = scope.all_reduce_init(numbers, out=numbers, label="step status")
        self._handle: CollectiveTensor | None = None
        self._size: Size | None = None
        self.is_alone = False

    def begin(self, spec: BatchSpec) -> None:
        """Start the header of a step. Collective, and does not wait."""
        names, places = self._names, self._places
        self._size = self._handle = None
        self.is_alone = False
        if self._is_solo:
            self._size = spec.size(names)
            return
        texts = [
            spec.call,
            spec.goal,
            spec.sizes,
            *map(spec.kinds.get, names),
            *map(spec.sums.get, (*names, "target")),
            *_at(spec.place, spec.optimizer, places),
            *_at(spec.place, str(spec.parameters) if spec.parameters else None, places),
        ]
        values = [
            *(_UNKNOWN if number is None else number for number in (spec.rows, spec.count)),
            *(_UNKNOWN if text is None else fingerprint(text) for text in texts),
        ]
        self._table[0] = values
        self._table[1] = [value if value == _UNKNOWN else -value for value in values]
        self._handle = self._header.start()

    def test(self) -> bool:
        """Tell whether :meth:`read` would not wait. Never waits."""
        return self._handle is None or self._handle.done()

    def read(self) -> Size:
        """Wait for the header and return the size of the global batch.

        Raises:
            MismatchError: If the ranks call different things or were given different batches.
                :func:`disagreement` says it in full.
            ShapeError: If no rank was given a batch.
        """
        if self._handle is not None:
            try:
                self._handle.resolve()
            except MpimeshError:
                self.is_alone = True
                raise
            self._handle = None
        if self._size is None:
            self._size = self._agreed_size()
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

    def _agreed_size(self) -> Size:
        largest, opposite = self._table.tolist()
        for high, low in zip(largest, opposite, strict=True):
            if high != -low and high != _UNKNOWN:
                raise MismatchError("the ranks were given different things for this step")
        rows, count, _, _, _, *rest = largest
        if rows == _UNKNOWN:
            raise ShapeError("no rank was given a batch: x is needed where the first stage lies")
        return Size(rows, count, _kind(rest[: len(self._names)]))


def _at(place: int, text: str | None, places: int) -> list[str | None]:
    """Return a row that only ranks of one place fill in, so that only they are compared."""
    return [text if one == place else None for one in range(places)]


def _kind(numbers: list[int]) -> int:
    return fingerprint(str(numbers))


def _parts(spec: BatchSpec) -> str | None:
    """Return in words how a batch was cut."""
    if spec.count is None:
        return None
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
    rules: list[tuple[str, Sequence[object]]] = [
        ("must take the same step with the same options", [one.call for one in specs]),
        (f"{batch} x and target, or None; rows are", [one.rows for one in specs]),
        (
            "must be given the batch whole, or cut into the same microbatches; theirs are",
            [_parts(one) for one in specs],
        ),
        *(
            (f"{batch} {name}, or None; its rows are", [one.kinds.get(name) for one in specs])
            for name in kinds
        ),
        *(
            (f"{batch} {name}, or None; {values}", [one.sums.get(name) for one in specs])
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

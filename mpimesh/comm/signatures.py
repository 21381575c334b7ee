"""Comparison of the operations that the ranks of a node start: name, reduction, root, dtype, shape.

Each rank numbers the operations that it starts on a communicator, and posts one *word* for each on
its *board*, in memory that the ranks of its node share, before the transport hears of it. Nobody
waits for a word. Who starts an operation, takes its result, or waits long for it, looks at the
others' words.

A word is 63 bits, written by one store: the operation's number, and 28 bits of a *total* of all
that the rank has started so far::

    total(n) = (3 * total(n - 1) + digest(n)) mod 2**28,     total(0) = 0

with the digest of a text that is equal on two ranks if they start the same. The word of operation
n stands in place ``n % SLOTS``.

Whose words differ starts nothing more, and posts nothing more but from which operation on: what
it has posted stays, for the others to find. MPI would end the job where bytes come that are no
whole number of elements, and would match what comes after a mismatch with what went before.

Proof that it says what is so
1. *An old word is never taken for a new one*: it shows its number, which has 35 bits and so does
   not come again in forty hours. A word with another number, because its rank is behind, or is
   ahead by `SLOTS` and more, is left alone: no false alarm.
2. *Ranks that start the same never differ*: their totals are one function of the same digests.
3. *What differs once differs from there on.* If digests differ at n, the totals do. From there on
   the difference of the totals d goes on as ``d(k) = 3 * d(k - 1) + (difference of the digests at
   k)``; 3 is a unit mod 2**28, so it does not vanish as long as the ranks start the same, and if
   they do not, by chance only, once in 2**28. Who found the word of n overwritten, or not there
   yet, finds the mismatch in the first later word that it can compare, or in that the other starts
   nothing more. If a rank has more than `SLOTS` operations under way that another has not begun,
   some may meet others in MPI before that.
4. *A finished all-reduce was compared with all*: each rank posts before it starts, and none ends
   before all have started. Nor does a wait have to end: who waits compares the last operation of
   each other rank that both have started, so two ranks in different operations find out.
5. *Of two ranks that start different things at once, one or both see it at the start*: each posts
   before it looks, and a store becomes visible long before the interpreter gets to the look. If
   neither does, both see it at the end, as long as MPI lets them.
6. *Who has seen the same word of all others need not look again*: they have started the same up to
   there, and nothing keeps them from ending it.

So that a mismatch can be told in words, each rank keeps the texts of its last digests beside its
words; they are written only when a signature is new. The order of two stores does not matter: a
word that is not seen yet is not compared, and a text is taken only if its digest stands before and
after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from mpimesh.arguments import digest_bits, rank_names
from mpimesh.arrays.namespace import HostArray
from mpimesh.core.call import Board
from mpimesh.core.node import Door
from mpimesh.errors import MismatchError

__all__ = [
    "BOARD_BYTES",
    "LAST_SLOT",
    "Signature",
    "Signatures",
    "signature_text",
]

Signature: TypeAlias = tuple[str, object, object, object]
"""Operation; what must agree beside shape and dtype, as reduction, root, axis; what must agree of
the shape; dtype."""

SLOTS = 1024
_TOTAL_BITS = 28
_TOTALS = (1 << _TOTAL_BITS) - 1
LAST_SLOT = SLOTS - 1
"""As a mask, the place of an operation's word among those of its rank."""

_TEXTS = 64
_TEXT_BYTES = 248
_ENTRY_BYTES = 8 + _TEXT_BYTES
_REFUSED = SLOTS
"""The place behind the words: the operation from which on a rank starts nothing; 0 for none."""
_TEXTS_AT = 8 * (SLOTS + 8)
BOARD_BYTES = _TEXTS_AT + _TEXTS * _ENTRY_BYTES

_MOST_KNOWN = 4096
_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
_UNKNOWN = "what is not known any more"


class Signatures(Board):
    """The boards of the ranks of one communicator that share a node, of which one is this rank's.

    Args:
        place: Which board is this rank's.
        ranks: The ranks of the communicator that the boards belong to.
        boards: `BOARD_BYTES` of each, zero at first.
        doors: The doors of all of them: nothing comes any more for who sleeps after a mismatch.
    """

    def __init__(
        self,
        place: int,
        ranks: Sequence[int],
        boards: Sequence[HostArray],
        doors: Sequence[Door],
    ) -> None:
        super().__init__(place, boards, SLOTS)
        self._ranks = ranks
        self._place = place
        self._boards = boards
        self._doors = doors
        # Through memoryviews a number is read in 40 ns, a third of what NumPy takes.
        self._words: list[memoryview[int]] = [
            memoryview(board[:_TEXTS_AT].view(np.int64))  # type: ignore[arg-type]
            for board in boards
        ]
        self._mine = self._words[place]
        self._others = [one for one in range(len(boards)) if one != place]
        self._digests: dict[Signature, int] = {}
        self._texts: dict[int, str] = {}
        self._written = 0

    def digest(self, signature: Signature) -> int:
        """Return the digest of a signature, which the other ranks can look up from now on."""
        return self._digests.get(signature) or self._learn(signature)

    def describe(self, digest: int, text: str) -> None:
        """Let messages show `text` for what this rank starts by a digest from now on.

        For what is one signature in several calls, which compare themselves by other means. What
        was found to differ keeps its text.
        """
        if not self.apart and self._texts.get(digest) != text:
            self._texts[digest] = text
            self._write(digest, text)

    def compare(self, number: int, word: int, group: str) -> None:
        """Look at the others' words of operation `number`. Never waits.

        Args:
            number: The operation.
            word: What this rank has posted for it.
            group: Names the ranks in the message.

        Raises:
            MismatchError: If one of them is known to have started something else, be it before.
        """
        if self.agrees(number, word):
            return
        at = number & LAST_SLOT
        for place in self._others:
            theirs = self._words[place][at]
            if theirs != word and theirs >> _TOTAL_BITS == number:
                self.found(place, number)
                raise self.error(group)

    def look(self, number: int, group: str) -> None:
        """Compare the last operation up to `number` that each other rank has started. Never waits.

        For a rank that waits in `number`: one that it waits for may have gone wrong before, where
        this one did not need it.

        Raises:
            MismatchError: As :meth:`compare`.
        """
        for words in [self._words[place] for place in self._others if self.open]:
            if 0 < words[_REFUSED] <= number:
                self._refuse(words[_REFUSED])
                raise self.error(group)
            for last in range(number, max(0, number - SLOTS), -1):
                theirs, mine = words[last & LAST_SLOT], self._mine[last & LAST_SLOT]
                if theirs >> _TOTAL_BITS == last:
                    if mine >> _TOTAL_BITS == last:
                        self.compare(last, mine, group)
                    break

    def last_started(self) -> dict[int, tuple[int, str]]:
        """Return the number and text of each rank's last operation; 0 for none. Never waits."""
        numbers = [max(words[:SLOTS]) >> _TOTAL_BITS for words in self._words]
        return {
            rank: (number, (self._text(place, number) or "") if number else "")
            for place, (rank, number) in enumerate(zip(self._ranks, numbers, strict=True))
        }

    def error(self, group: str) -> MismatchError:
        """Return the error that names what each rank has started where they first differ."""
        number = self.apart
        ranks: dict[str, list[int]] = {}
        for place, rank in enumerate(self._ranks):
            text = self._text(place, number)
            if text is not None:
                ranks.setdefault(text, []).append(rank)
        rows = "; ".join(f"{rank_names(who)}: {text}" for text, who in ranks.items())
        return MismatchError(
            f"the ranks of group {group!r} started different collectives, or with different "
            f"arrays, as its operation {number}: {rows}; the group starts nothing more"
        )

    def refused(self, group: str) -> bool:
        """Raise :meth:`error`, in place of the test of an operation that was not started."""
        raise self.error(group)

    def close(self) -> None:
        """Compare nothing any more: the boards are given back."""
        self.open = False

    # -- what is new -----------------------------------------------------------------

    def _learn(self, signature: Signature) -> int:
        text = signature_text(signature)
        encoded = text.encode(errors="backslashreplace")
        digest = digest_bits(encoded, _TOTAL_BITS) or 1  # 0 stands where there is no text
        if len(self._digests) >= _MOST_KNOWN:
            self._digests.clear()
            self._texts.clear()
        self._digests[signature] = digest
        if digest not in self._texts:
            self._texts[digest] = text
            self._write(digest, text)
        return digest

    def _write(self, digest: int, text: str) -> None:
        entries = self._boards[self._place][_TEXTS_AT:].reshape(_TEXTS, _ENTRY_BYTES)
        written = np.flatnonzero(entries[:, :8].copy().view(np.int64) == digest)
        if written.size:
            entry = entries[written[0]]
        else:
            entry = entries[self._written % _TEXTS]
            self._written += 1
        head = entry[:8].view(np.int64)
        head[0] = 0
        entry[8:] = np.frombuffer(_shortened(text).ljust(_TEXT_BYTES, b"\0"), np.uint8)
        head[0] = digest

    # -- when words differ -------------------------------------------------------------

    def found(self, place: int, number: int) -> None:
        """Take note that the rank at `place` has started something else up to `number`."""
        self._refuse(self._first(self._words[place], number))

    def _refuse(self, number: int) -> None:
        """Start nothing from operation `number` on, and let the others know."""
        if not self.apart:
            self.apart = self._mine[_REFUSED] = number
            for door in self._doors:
                door.ring()

    def _first(self, theirs: memoryview[int], number: int) -> int:
        """Return the first operation up to `number` that a rank has started otherwise."""
        while number > 1:
            at = (number - 1) & LAST_SLOT
            word, other = self._mine[at], theirs[at]
            if word == other or not word >> _TOTAL_BITS == other >> _TOTAL_BITS == number - 1:
                break
            number -= 1
        return number

    def _total_of(self, place: int, number: int) -> int | None:
        """Return a rank's total at operation `number`; None if its word is not there."""
        word = self._words[place][number & LAST_SLOT]
        return word & _TOTALS if word >> _TOTAL_BITS == number else None

    def _digest_of(self, place: int, number: int) -> int | None:
        """Return the digest of what a rank started as operation `number`, if it can be told."""
        total, before = self._total_of(place, number), self._total_of(place, number - 1)
        return None if total is None or before is None else (total - 3 * before) & _TOTALS

    def _text(self, place: int, number: int) -> str | None:
        """Return what a rank has started as operation `number`; None if it has not got there."""
        if self._words[place][number & LAST_SLOT] >> _TOTAL_BITS < number:
            return None
        digest = self._digest_of(place, number)
        if digest is None:
            return _UNKNOWN
        if place == self._place and digest in self._texts:
            return self._texts[digest]
        entries = self._boards[place][_TEXTS_AT:].reshape(_TEXTS, _ENTRY_BYTES)
        for entry in entries:
            head = entry[:8].view(np.int64)
            if head[0] == digest:
                text = bytes(entry[8:]).rstrip(b"\0").decode(errors="replace")
                if head[0] == digest:
                    return text
        return _UNKNOWN


def signature_text(signature: Signature) -> str:
    """Return a signature in words, which are equal on two ranks only if they start the same."""
    name, rule, compared, dtype = signature
    shape = f"shape {compared}" if isinstance(compared, tuple) else ""
    dims = f"{compared}-d" if isinstance(compared, int) else ""
    if name in _REDUCTIONS and isinstance(dtype, np.dtype):
        dtype = dtype.newbyteorder("=")  # they convert it; the others move bytes
    parts = (shape, dims, str(dtype), str(rule))
    return f"{name}({', '.join(part for part in parts if part)})"


def _shortened(text: str) -> bytes:
    encoded = text.encode(errors="backslashreplace")
    return encoded if len(encoded) <= _TEXT_BYTES else encoded[: _TEXT_BYTES - 4] + b" ..."

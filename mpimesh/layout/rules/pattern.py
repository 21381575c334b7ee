"""An operation, said by letters: which axes of its operands and of its result go together.

As in ``einsum("ik,kj->ij")``, axes of one letter are of one length and run together. A mesh dim
may split any letter: the operands that have it are split along that axis, those that do not have
it are whole along the dim. If the result has the letter, it is split there; if not, the result
waits for a reduction over the dim.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KEEP", "Linear", "Pattern"]

KEEP = -1
"""In place of a letter: this axis is never split, such as one of length 1 that is broadcast."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Operands that may be summands, and the result then is.

    Attributes:
        operands: Their numbers. All of them are `Partial` together, and all others whole.
        ops: The reductions for which that is so.
    """

    operands: tuple[int, ...]
    ops: tuple[str, ...] = ("sum", "mean")


@dataclass(frozen=True, slots=True)
class Pattern:
    """An operation.

    Attributes:
        inputs: For each operand the letter of each of its axes, or :data:`KEEP`.
        output: The letter of each axis of the result, or :data:`KEEP`.
        op: The reduction over letters that the result lacks; empty if they must not be split.
        linear: Which operands may be `Partial`.
        counts_output: Whether the bytes count that a reduction of the result will move. Else a
            result that waits is free.
    """

    inputs: tuple[tuple[int, ...], ...]
    output: tuple[int, ...]
    op: str = ""
    linear: tuple[Linear, ...] = ()
    counts_output: bool = False

    @property
    def letters(self) -> tuple[int, ...]:
        """The letters that may be split, those of the result first.

        One that stands twice in an operand, as in a diagonal, is none of them.
        """
        rows = (self.output, *self.inputs) if self.op else (self.output,)
        twice = {
            letter for row in (*self.inputs, self.output) for letter in row if row.count(letter) > 1
        }
        found = dict.fromkeys(letter for row in rows for letter in row)
        return tuple(letter for letter in found if letter != KEEP and letter not in twice)

    @property
    def is_elementwise(self) -> bool:
        """Whether the result has all letters."""
        return all(letter in self.output for row in self.inputs for letter in row if letter != KEEP)

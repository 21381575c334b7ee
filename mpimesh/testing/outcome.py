"""Outcomes of a phase of a test on each rank, and the one that they make together.

The rules: one rank failed, so the test failed. A test that is skipped, or fails
as expected, does so on all ranks or on none; otherwise it failed too, because
the ranks that went on would wait for those that did not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pytest

from mpimesh.arguments import rank_names, ranks_by_value

__all__ = ["Outcome", "RanksFailure", "agree"]

_MOST_CHARACTERS = 20_000
_MOST_TEXTS = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """One rank's side of a report.

    Attributes:
        kind: ``"passed"``, ``"failed"``, ``"skipped"``, ``"xfailed"`` or ``"xpassed"``.
        headline: The line that says what went wrong; empty if nothing did.
        text: Traceback and captured output; empty unless the test failed.
    """

    kind: str
    headline: str = ""
    text: str = ""

    @classmethod
    def of(cls, report: pytest.TestReport) -> Outcome:
        """Read this rank's outcome off its report."""
        if report.failed:
            captured = "".join(
                f"\n{title:-^70}\n{content}" for title, content in report.sections if content
            )
            text = (report.longreprtext + captured)[-_MOST_CHARACTERS:]
            return cls("failed", _headline(report), text)
        if hasattr(report, "wasxfail"):
            return cls("xfailed" if report.skipped else "xpassed")
        return cls(report.outcome)

    def to_json(self) -> dict[str, str]:
        """Return the fields as values that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, str]) -> Outcome:
        """Undo :meth:`to_json`."""
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class _Headline:
    """The line for a failure in pytest's short summary: one line, wherever it runs.

    The summary cuts a text to the terminal's width, but not where it thinks it is in
    CI (the variable `CI`): the whole of every rank's traceback would stand there again.
    """

    message: str


@dataclass(frozen=True, slots=True)
class RanksFailure:
    """The failure of a test on some of the ranks, as pytest shows it.

    Attributes:
        text: All that is to be shown; its first line tells the first failure.
    """

    text: str

    @property
    def reprcrash(self) -> _Headline:
        """The first line, by the name under which pytest's summary looks for it."""
        return _Headline(self.text.partition("\n")[0])

    def toterminal(self, tw: Any) -> None:
        """Write the text to pytest's terminal writer."""
        tw.line(self.text)

    def __str__(self) -> str:
        return self.text


def agree(report: pytest.TestReport, outcomes: Sequence[Outcome]) -> None:
    """Write into `report` what `outcomes`, one per rank, make together.

    The result is the same on every rank that was given the same `outcomes`.
    """
    kinds = [outcome.kind for outcome in outcomes]
    if "failed" in kinds:
        _fail(report, _failure_text(outcomes))
    elif len(set(kinds)) > 1:
        each = ", ".join(f"rank {rank} {kind}" for rank, kind in enumerate(kinds))
        _fail(report, f"the ranks disagree on this test, it must end alike on all: {each}")


def _fail(report: pytest.TestReport, text: str) -> None:
    report.outcome = "failed"
    # pytest asks a longrepr for these two methods and this attribute, whatever its class.
    report.longrepr = RanksFailure(text)  # type: ignore[assignment]
    # The outputs are in the text, each under its rank.
    report.sections = []
    if hasattr(report, "wasxfail"):
        del report.wasxfail


def _failure_text(outcomes: Sequence[Outcome]) -> str:
    """Join the failing ranks' texts, equal ones once, after a line that tells the first."""
    failed = [rank for rank, outcome in enumerate(outcomes) if outcome.kind == "failed"]
    ranks_of = ranks_by_value((rank, outcomes[rank].text) for rank in failed)
    where = f"{rank_names(failed)} of {len(outcomes)}"
    parts = [f"on {where}: {outcomes[failed[0]].headline}"]
    for place, (text, ranks) in enumerate(ranks_of.items()):
        parts.append(f"{f' {rank_names(ranks)} ':=^70}")
        parts.append(text if place < _MOST_TEXTS else outcomes[ranks[0]].headline)
    return "\n".join(parts)


def _headline(report: pytest.TestReport) -> str:
    crash: Any = getattr(report.longrepr, "reprcrash", None)
    message = str(crash.message) if crash is not None else report.longreprtext
    return message.strip().partition("\n")[0]

"""Filters of warnings in tests with several threads: those of Python are for one."""

from __future__ import annotations

import threading
import warnings
from types import TracebackType


class WarningsAre:
    """A context in which all warnings of the process are handled by one action.

    Threads may enter and leave it in any order: the first to come in sets the filter, and the last
    to go out takes it back.

    Attributes:
        seen: The warnings that came, if `record` was asked for.
    """

    def __init__(self, action: str, *, record: bool = False) -> None:
        self._action = action
        self._record = record
        self._lock = threading.Lock()
        self._inside = 0
        self.seen: list[warnings.WarningMessage] = []

    def __enter__(self) -> list[warnings.WarningMessage]:
        with self._lock:
            if not self._inside:
                self._context = warnings.catch_warnings(record=self._record)
                seen = self._context.__enter__()
                self.seen = [] if seen is None else seen
                warnings.simplefilter(self._action)  # type: ignore[arg-type]
            self._inside += 1
            return self.seen

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._context.__exit__(kind, error, traceback)


ignored = WarningsAre("ignore")
errors = WarningsAre("error")
recorded = WarningsAre("always", record=True)

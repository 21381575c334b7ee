"""Where a test that takes too long is: its own frames, and which call of mpimesh it is in."""

from __future__ import annotations

import re
import sys
import threading
from typing import Any

import numpy as np

from mpimesh import nn
from mpimesh.testing import pytest_plugin


class Asks(nn.Module):
    """A layer of a user's, which asks where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []

    def forward(self, x: Any, ctx: nn.Context | None = None) -> Any:
        self.stack = pytest_plugin._stack(sys._getframe())
        return x


def test_it_shows_the_frames_of_the_test_and_the_calls_in_between():
    layer = Asks()
    nn.Sequential(nn.Sequential(layer)).forward(np.ones((1, 1)), nn.Context())
    first, between, last = layer.stack
    assert re.search(r"test_hang_report\.py\", line \d+, in test_it_shows_the_fr", first)
    assert "nn.Sequential(nn.Sequential(layer)).forward(" in first
    assert between == "    in mpimesh: Sequential.forward\n"
    assert "in forward\n" in last
    assert "self.stack = pytest_plugin._stack(" in last


def test_a_thread_that_runs_nothing_of_the_tests_is_left_out():
    release = threading.Event()
    idle = threading.Thread(target=release.wait, name="an idle thread")
    idle.start()
    texts: list[str] = []
    looker = threading.Thread(target=lambda: texts.append(pytest_plugin._stacks()))
    looker.start()
    looker.join()
    release.set()
    idle.join()
    assert "an idle thread" not in texts[0]
    assert f"thread {threading.current_thread().name}:\n" in texts[0]
    assert re.search(r"looker\.(start|join)\(\)", texts[0])

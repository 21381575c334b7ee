"""TensorFlow DTensor's heartbeat."""

from __future__ import annotations

import time

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.compat.tensorflow import Heartbeat, heartbeat_enabled
from mpimesh.errors import PeerLostError
from mpimesh.runtime.watchdog import EXIT_CODE
from tests.helpers.compat_programs import beats_go_on
from tests.helpers.raises import raises


@pytest.mark.parametrize("size", [1, 2, 3])
def test_t35_beats(size):
    mm.run_virtual(size, beats_go_on, None)


@pytest.mark.parametrize(
    ("value", "enabled"), [(None, True), ("1", True), ("True", True), ("0", False), ("no", False)]
)
def test_t35_heartbeat_enabled(value, enabled, monkeypatch):
    if value is None:
        monkeypatch.delenv("DTENSOR_ENABLE_HEARTBEAT", raising=False)
    else:
        monkeypatch.setenv("DTENSOR_ENABLE_HEARTBEAT", value)
    assert heartbeat_enabled() == enabled

    def main():
        with mm.DeviceMesh("x=2") as mesh:
            heartbeat = Heartbeat(mesh, timeout_s=10)
            if enabled or mesh.rank == 0:  # else nobody waits for anybody
                heartbeat.beat()
            return heartbeat.enabled, heartbeat.beats

    assert mm.run_virtual(2, main) == [(enabled, int(enabled))] * 2


def test_t35_a_late_rank_is_a_strike_and_no_more(capsys):
    def main():
        with mm.DeviceMesh("x=3") as mesh:
            heartbeat = Heartbeat(mesh, timeout_s=0.25)
            for step in range(3):
                if mesh.rank == 2 and step == 1:
                    time.sleep(0.6)
                heartbeat.beat()
            return int(mesh.group().all_reduce(np.array([heartbeat.beats])).resolve()[0])

    assert mm.run_virtual(3, main) == [9] * 3
    lines = capsys.readouterr().err.splitlines()
    assert sorted(line.split("]")[0] for line in lines) == ["[rank 0"] * 2 + ["[rank 1"] * 2
    assert sum("heartbeat 1, strike 1 of 3" in line for line in lines) == 2
    assert sum("heartbeat 1, strike 2 of 3" in line for line in lines) == 2
    assert all("ranks [2] of group 'world' had not come" in line for line in lines)


def test_t35_three_strikes():
    def main():
        with mm.DeviceMesh("x=2") as mesh:
            heartbeat = Heartbeat(mesh, timeout_s=0.15)
            heartbeat.beat()
            if mesh.rank == 1:
                time.sleep(2)
            heartbeat.beat()

    with raises(PeerLostError, "heartbeat 1", "strike 3 of 3", "ranks [1]", "0.15 s") as caught:
        mm.run_virtual(2, main)
    assert caught.value.exit_code == EXIT_CODE

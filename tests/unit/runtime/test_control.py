"""Control messages, and the meaning of a rank's exit for a wait."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from mpimesh.runtime.call import Call
from mpimesh.runtime.control import PeerExit
from mpimesh.runtime.progress import Wait
from mpimesh.runtime.world import solo_communicator


def waiting(number: int) -> Wait:
    call = Call("reduce", "dp", rule="sum, root 0")
    call.number = number
    communicator = solo_communicator()
    communicator.family = "m"
    return Wait(call, communicator)


def test_json_can_say_an_exit():
    peer_exit = PeerExit("ended with exit code 3 \u2713", 3, "m", {"m": {"dp": 4}})
    assert PeerExit(**json.loads(json.dumps(asdict(peer_exit)))) == peer_exit


@pytest.mark.parametrize(
    ("peer_exit", "number", "ends"),
    [
        (PeerExit("left"), 3, True),
        (PeerExit("left", family="m"), 3, True),
        (PeerExit("left", family="another mesh"), 3, False),
        # It has started the third collective, or more: it did its part in it.
        (PeerExit("left", started={"m": {"dp": 3}}), 3, False),
        (PeerExit("left", started={"m": {"dp": 9}}), 3, False),
        (PeerExit("left", started={"m": {"dp": 2}}), 3, True),
        (PeerExit("left", started={"m": {"tp": 9}}), 3, True),
        (PeerExit("left", started={"another mesh": {"dp": 9}}), 3, True),
        # Messages have no number.
        (PeerExit("left", started={"m": {"dp": 9}}), 0, True),
    ],
)
def test_what_an_exit_ends(peer_exit, number, ends):
    assert peer_exit.ends(waiting(number)) is ends

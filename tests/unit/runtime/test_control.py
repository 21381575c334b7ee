"""Control messages, and the meaning of a rank's exit for a wait."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mpimesh.runtime.call import Call
from mpimesh.runtime.control import PeerExit, Survey, Tag
from mpimesh.runtime.progress import Wait
from mpimesh.runtime.world import solo_communicator


def waiting(number: int) -> Wait:
    call = Call("reduce", "dp", rule="sum, root 0")
    call.number = number
    return Wait(call, solo_communicator(), mesh="m")


def test_json_can_say_an_exit():
    peer_exit = PeerExit("ended with exit code 3 \u2713", 3, "m", {"m": {"dp": 4}})
    assert PeerExit(**json.loads(json.dumps(peer_exit._asdict()))) == peer_exit


@pytest.mark.parametrize(
    ("peer_exit", "number", "ends"),
    [
        (PeerExit("left"), 3, True),
        (PeerExit("left", mesh="m"), 3, True),
        (PeerExit("left", mesh="another mesh"), 3, False),
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


class Wires:
    """The control channel of each of a few ranks, without MPI."""

    def __init__(self, size: int) -> None:
        self.world_ranks = range(size)
        self.mail: list[tuple[int, int, Tag, str]] = []

    def of(self, rank: int) -> Any:
        def send(tag, value, ranks, *, delivery_s=0.0):
            others = [dest for dest in ranks if dest != rank]
            self.mail += [(rank, dest, tag, json.dumps(value)) for dest in others]

        def receive(tag):
            mine = [one for one in self.mail if one[1:3] == (rank, tag)]
            self.mail = [one for one in self.mail if one not in mine]
            return [(source, json.loads(text)) for source, _, _, text in mine]

        return SimpleNamespace(
            send=send, receive=receive, world_rank=rank, world_ranks=self.world_ranks
        )


def test_a_survey_asks_no_rank_that_owes_an_answer_and_takes_answers_to_its_latest_question():
    wires = Wires(3)
    channels = [wires.of(rank) for rank in range(3)]
    states = ["at work", "at work", "at work"]
    surveys = [
        Survey(
            cast(Any, [channel]),
            Tag.WATCHDOG_QUESTION,
            Tag.WATCHDOG_ANSWER,
            partial(states.__getitem__, rank),
        )
        for rank, channel in enumerate(channels)
    ]
    asker = surveys[0]
    asker.ask(channels[0])
    surveys[1].poll()
    asker.poll()
    assert (asker.answers, asker.is_answered) == ({1: "at work"}, False)
    states[1] = "waits"
    asker.ask(channels[0])
    assert [dest for _, dest, *_ in wires.mail] == [2, 1]  # one question each
    surveys[1].poll()
    surveys[2].poll()  # late: to the first question
    asker.poll()
    assert (asker.answers, asker.is_answered) == ({1: "waits"}, True)
    asker.ask(channels[0])
    surveys[1].poll()
    surveys[2].poll()
    asker.poll()
    assert asker.answers == {1: "waits", 2: "at work"}

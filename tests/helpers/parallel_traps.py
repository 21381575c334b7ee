"""Layers that fail on demand, and what must be so afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import mpimesh as mm
from mpimesh import nn
from mpimesh.errors import MpimeshError
from mpimesh.parallel import PipelineStage
from mpimesh.parallel.plans import ABORT_TAG, message_tags
from mpimesh.schedule import Action, ActionKind, Edges
from tests.helpers.parallel_models import cut


class Trap(nn.Module):
    """The identity, until it is armed: then it raises in one forward or backward of a step."""

    num_layers = 0  # the layers after it keep their numbers, and so their values

    def __init__(self) -> None:
        self.armed: tuple[str, int] | None = None
        self.error: Exception = ValueError("boom")
        self.calls = {"F": 0, "B": 0}

    def arm(self, kind: str, microbatch: int, error: Exception | None = None) -> None:
        self.armed = (kind, microbatch)
        self.error = error or ValueError("boom")
        self.calls = {"F": 0, "B": 0}

    def disarm(self) -> None:
        self.armed = None

    def forward(self, x, ctx=None):
        self._step("F")
        return x

    def backward_input(self, dy, ctx):
        self._step("B")
        return dy

    def _step(self, kind: str) -> None:
        if self.armed == (kind, self.calls[kind]):
            raise self.error
        self.calls[kind] += 1


class Reshaped(nn.Module):
    """Gives something else than the identity from call `since` on."""

    num_layers = 0

    def __init__(self, change, *, since=0, backward=False) -> None:
        self.change = change
        self.since = since
        self.in_backward = backward
        self.calls = 0

    def _changed(self, x):
        self.calls += 1
        return self.change(x) if self.calls > self.since else x

    def forward(self, x, ctx=None):
        return x if self.in_backward else self._changed(x)

    def backward_input(self, dy, ctx):
        return self._changed(dy) if self.in_backward else dy


def trapped_stages(num_stages: int) -> tuple[list[PipelineStage], list[Trap]]:
    """Stages of the common classifier with a trap at the end of each."""
    traps = [Trap() for _ in range(num_stages)]
    stages = cut(num_stages)
    for stage, trap in zip(stages, traps, strict=True):
        stage.add_layer(trap)
    return stages, traps


def error_of(call: Callable[[], object]) -> MpimeshError:
    with pytest.raises(MpimeshError) as caught:
        call()
    return caught.value


def message_tag(action: Action, edges: Edges | None = None) -> int:
    """Return the tag of a SEND or RECV; messages between neighbours need no `edges`."""
    number = (Edges(action.stage + 2) if edges is None else edges).number(action)
    return message_tags(number, action)[action.kind in (ActionKind.SEND_B, ActionKind.RECV_B)]


def assert_nothing_left(mesh: mm.DeviceMesh) -> None:
    """After a barrier no message waits anywhere."""
    mesh.barrier()
    for name in ("world", "pp"):
        if not mesh.contains_dim(name) and name != "world":
            continue
        communicator = mesh.group(name).communicator
        tags = [ABORT_TAG]
        for stage in range(4):
            tags.append(message_tag(Action(stage, ActionKind.SEND_F, 0)))
            tags.append(message_tag(Action(stage + 1, ActionKind.SEND_B, 0)))
        assert [tag for tag in tags if communicator.probe(tag)] == []
    mesh.barrier()

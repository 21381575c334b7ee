"""Jobs whose ranks are killed while they save go on from whole checkpoints, to the bit."""

from __future__ import annotations

import pytest

from tests.helpers.depth import is_deep
from tests.launch.checkpoint_kills import kill_many


@pytest.mark.scaled
def test_no_bad_checkpoint_after_kills():
    kills = 8 if is_deep() else 2
    outcome = kill_many(kills)
    assert outcome.kills == kills
    assert outcome.checkpoints > 0
    assert outcome.jobs > 0

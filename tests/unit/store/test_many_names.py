"""Names of trees are looked at once each: the time is in proportion to their number."""

from __future__ import annotations

import time

import mpimesh as mm
from mpimesh.store.trees import flatten


def test_names_with_dots_take_linear_time(tmp_path):
    """Compared pair by pair, 50,000 names take more than three minutes."""
    tree = {f"layers.{place}.weight": place for place in range(50_000)}
    start_s = time.process_time()
    flat = flatten({"model": tree})
    mm.save(tmp_path / "a", {"model": {"v": dict.fromkeys(range(2), 0), **tree}})
    back = mm.load(tmp_path / "a", {"model": dict.fromkeys(tree)})
    assert time.process_time() - start_s < 30
    assert len(flat.values) == 50_000
    assert back["model"] == tree


def test_lists_and_dicts_that_stand_for_what_is_saved_take_linear_time(tmp_path):
    mm.save(tmp_path / "a", {f"x.{place}": {"y": place} for place in range(5_000)})
    start_s = time.process_time()
    back = mm.load(tmp_path / "a", {f"x.{place}": {} for place in range(5_000)})
    assert time.process_time() - start_s < 15
    assert back["x.4999"] == {"y": 4999}

"""A manifest has the members that docs/reference/checkpoint-format.md names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

import mpimesh as mm

ROOT = Path(mm.__file__).parents[1]
PAGE = (ROOT / "docs" / "reference" / "checkpoint-format.md").read_text()


def test_the_manifest_has_the_members_that_it_names(tmp_path):
    mm.save(tmp_path / "a", {"w": np.zeros(3), "loss": float("nan")})
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    (table,) = re.findall(r"^\| member .*?\n\n", PAGE, re.M | re.S)
    told = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", table, re.M)))
    assert told == list(manifest)
    assert set(manifest["arrays"]["w"]) == {"dtype", "shape", "pieces"}
    assert manifest["values"]["loss"] == {"$float": "nan"}
    assert (
        f'"version":{re.findall(r"number of the format, ([0-9]+)", PAGE)[0]}'.encode()
        in (tmp_path / "a" / "manifest.json").read_bytes()
    )

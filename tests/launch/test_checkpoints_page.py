"""The programs of docs/how-to/checkpoints.md do what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np

import mpimesh as mm

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "checkpoints.md").read_text()
PROGRAM, *_ = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)


def test_the_training_goes_on(launch, tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace('"run"', repr(str(tmp_path / "run"))))
    first = tmp_path / "first.py"  # killed between two saves
    kill = "            if step == 25: import os; os.kill(os.getpid(), 9)\n            x = rng"
    first.write_text(program.read_text().replace("            x = rng", kill))
    whole = tmp_path / "whole.py"
    whole.write_text(PROGRAM.replace('"run"', repr(str(tmp_path / "other"))))
    assert launch(2, [str(first)]).returncode != 0
    names = [path.name for path in (tmp_path / "run").iterdir() if path.name[0] != "."]
    assert sorted(names) == ["step-00000010", "step-00000020"]
    killed, expected = launch(2, [str(program)]), launch(2, [str(whole)])
    assert killed.returncode == expected.returncode == 0, str(killed)
    assert killed.stdout == expected.stdout != ""
    assert killed.stdout.startswith("30 steps, loss 0.")
    # And in another folder on three ranks, which add up in another order.
    again = launch(3, [str(whole)])
    assert again.returncode == 0, str(again)
    assert "30 steps" in again.stdout


def test_no_mpi_is_loaded_to_read(tmp_path):
    mm.save(tmp_path / "a", {"x": np.arange(3)})
    path = str(tmp_path / "a")
    program = f"import sys, mpimesh as mm; mm.load({path!r}); print('mpi4py.MPI' in sys.modules)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

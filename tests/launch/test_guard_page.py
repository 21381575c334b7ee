"""The program of the page on jobs that come back does so, and what it names is there."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

import mpimesh as mm

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "clusters" / "jobs-that-come-back.md").read_text()
TEMPLATE = (ROOT / "slurm" / "job.sbatch").read_text()
(PROGRAM,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
SHELL = "".join(re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S))


def test_the_program_goes_on_as_if_it_had_never_stopped(launch, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def run(folder, *, left_s, ranks=2):
        end = {"SLURM_JOB_END_TIME": str(int(time.time() + left_s))}
        result = launch(ranks, [str(program), "--checkpoint", str(folder)], env=end, timeout_s=40)
        return result.returncode, result.stdout.strip(), str(result)

    folder, elsewhere, whole = (tmp_path / name for name in ("saved", "elsewhere", "whole"))
    code, said, all_said = run(folder, left_s=30)
    assert (code, said) == (85, "saved after step 1 because of the time limit"), all_said
    shutil.copytree(folder, elsewhere)
    for place, ranks in ((folder, 2), (elsewhere, 3), (whole, 2)):
        code, said, all_said = run(place, left_s=1000, ranks=ranks)
        assert (code, said) == (0, "saved after step 100"), all_said
    trees = [mm.load(place / "step-00000100") for place in (folder, elsewhere, whole)]
    for name, expected in trees[2]["model"].items():
        assert np.array_equal(trees[0]["model"][name], expected), name
        assert np.allclose(trees[1]["model"][name], expected, rtol=1e-3, atol=1e-4), name


def test_what_it_says_of_the_template():
    variables = re.findall(r"^\| `([A-Z_]+)=", PAGE, re.M)
    assert variables == re.findall(r"^\| `(\w+)=", PAGE, re.M)
    assert set(variables) == set(re.findall(r"^([A-Z_]+)=\$\{\1:-", TEMPLATE, re.M))
    rows = re.findall(r"^\| ((?:[A-Z]\w+ ?)+)(?:, \w+)? \| `(\w+)` \|", PAGE, re.M)
    assert len(rows) == 4
    for vendor, mpi_type in rows:
        assert re.search(rf"{vendor}.*\) MPI_TYPE={mpi_type} ;;", TEMPLATE), vendor
    assert "--signal=USR1@180" in TEMPLATE
    for script in re.findall(r"sbatch .*?(\S+\.sbatch)", SHELL):
        assert (ROOT / script).is_file()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`guard\.(\w+)", PAGE))))
def test_what_a_guard_has(name):
    assert hasattr(mm.store.RunGuard, name)


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert links
    assert not [link for link in links if not (ROOT / "docs" / "clusters" / link).exists()]

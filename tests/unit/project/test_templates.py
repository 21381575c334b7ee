"""Checks of the Slurm templates without a Slurm."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TEMPLATES = sorted((ROOT / "slurm").glob("*.sbatch"))
SITE = ("MODULES", "VENV", "MPI_TYPE")


def test_all_templates_are_there():
    assert [path.stem for path in TEMPLATES] == ["cpu", "gpu", "requeue"]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_bash_can_read_it(path):
    result = subprocess.run(["bash", "-n", path], capture_output=True, text=True, timeout=30)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_every_srun_kills_the_job_with_a_rank_and_names_the_mpi(path):
    text = path.read_text()
    commands = re.findall(r"^srun .*", text, re.MULTILINE)
    assert commands
    for command in commands:
        assert " -K " in command
        assert ' --mpi="$MPI_TYPE" ' in command


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_what_a_site_sets_stands_at_the_top_and_can_be_overridden(path):
    head, _, body = path.read_text().partition("set -euo pipefail")
    for name in SITE:
        assert re.search(rf"^{name}=\$\{{{name}:-.*\}}", head, re.MULTILINE), name
    assert "#SBATCH" not in body
    assert re.findall(r"^##SBATCH --(account|partition)=", head, re.MULTILINE) == [
        "account",
        "partition",
    ]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_the_default_program_is_there(path):
    (program,) = re.findall(r"\|\| set -- (\S+)", path.read_text())
    assert (ROOT / program).is_file()


def test_the_requeueing_template_keeps_its_protocol():
    text = (ROOT / "slurm" / "requeue.sbatch").read_text()
    assert re.search(r"^#SBATCH --signal=USR1@\d+$", text, re.MULTILINE)
    assert re.search(r"^#SBATCH --requeue$", text, re.MULTILINE)
    assert re.search(r"^#SBATCH --open-mode=append$", text, re.MULTILINE)
    assert "env --ignore-signal=USR1" in text
    assert '"$code" -eq 85' in text


def test_the_three_choose_the_mpi_type_alike():
    """Each template is copied alone, so they repeat this; it must not drift apart."""
    pattern = re.compile(r"if \[ -z \"\$MPI_TYPE\".*?\nfi\n", re.DOTALL)
    assert len({tuple(pattern.findall(path.read_text())) for path in TEMPLATES}) == 1


# -- run with stand-ins for Slurm's commands and for the interpreter --------------------


@pytest.fixture
def run_template(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a template where srun says what it was given and ends with CODE."""
    tools, venv = tmp_path / "tools", tmp_path / "venv" / "bin"
    for folder in (tools, venv):
        folder.mkdir(parents=True)
    for path, text in {
        tools / "srun": 'echo "srun $*"; exit ${CODE:-0}',
        tools / "scontrol": 'echo "scontrol $*"',
        tools / "sleep": ":",
        venv / "python": 'echo "${VENDOR:-MPICH}"',
    }.items():
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def run(template: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        variables = {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_JOB_ID": "7",
            "VENV": str(venv.parent),
            "BASH_FUNC_module%%": '() { echo "module $*"; }',
            **env,
        }
        return subprocess.run(
            ["bash", ROOT / "slurm" / f"{template}.sbatch", *arguments],
            env=variables,
            capture_output=True,
            text=True,
            timeout=30,
        )

    return run


@pytest.mark.parametrize("template", ["cpu", "gpu", "requeue"])
@pytest.mark.parametrize(
    ("vendor", "mpi_type"),
    [("MPICH", "pmi2"), ("Intel MPI", "pmi2"), ("MVAPICH2", "pmi2"), ("Open MPI", "pmix")],
)
def test_mpi_type_follows_the_vendor(run_template, template, vendor, mpi_type):
    result = run_template(template, "program.py", VENDOR=vendor)
    assert result.returncode == 0, result.stderr
    assert f"srun -K --mpi={mpi_type} " in result.stdout


@pytest.mark.parametrize("template", ["cpu", "gpu", "requeue"])
def test_an_unknown_vendor_needs_the_override(run_template, template):
    result = run_template(template, VENDOR="Some MPI")
    assert result.returncode == 2
    assert "set MPI_TYPE" in result.stderr
    assert "srun" not in result.stdout
    result = run_template(template, VENDOR="Some MPI", MPI_TYPE="cray_shasta")
    assert "--mpi=cray_shasta " in result.stdout


@pytest.mark.parametrize("template", ["cpu", "gpu", "requeue"])
def test_modules_program_and_exit_code(run_template, template):
    result = run_template(template, "mine.py", "--a b", MODULES="gcc mpi", CODE="3")
    assert result.returncode == 3
    assert result.stdout.splitlines()[:2] == ["module load gcc", "module load mpi"]
    assert "/bin/python mine.py --a b" in result.stdout
    assert "/bin/python examples/train_digits.py --mesh" in run_template(template).stdout


@pytest.mark.parametrize("template", ["cpu", "gpu", "requeue"])
def test_a_restart_takes_a_step_that_it_has_not_had(run_template, template):
    lines = run_template(template, "mine.py", SLURM_RESTART_COUNT="2", CODE="1").stdout.splitlines()
    assert ["mine.py" in line for line in lines] == [False, False, True]
    assert all(line.startswith("srun ") for line in lines)


def test_code_85_requeues_and_no_other_does(run_template):
    assert "scontrol requeue 7" in run_template("requeue", CODE="85").stdout
    for code in ("0", "1", "143"):
        result = run_template("requeue", CODE=code)
        assert "scontrol" not in result.stdout
        assert result.returncode == int(code)


def test_requeueing_has_an_end(run_template):
    assert "scontrol" in run_template("requeue", CODE="85", SLURM_RESTART_COUNT="99").stdout
    result = run_template("requeue", CODE="85", SLURM_RESTART_COUNT="100")
    assert "scontrol" not in result.stdout
    assert result.returncode == 85


def test_the_checkpoint_folder_stays_when_the_job_is_requeued(run_template, tmp_path):
    result = run_template("requeue", "mine.py")
    assert f"mine.py --checkpoint {tmp_path}/checkpoints/7\n" in result.stdout
    assert (tmp_path / "checkpoints" / "7").is_dir()

"""Checks of the Slurm template without a Slurm."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TEMPLATE = ROOT / "slurm" / "job.sbatch"
TEXT = TEMPLATE.read_text()
HEAD, _, BODY = TEXT.partition("set -euo pipefail")
SITE = ("MODULES", "VENV", "CONTAINER", "MPI_TYPE", "CPU_BIND", "REQUEUE", "MAX_RESTARTS")


def test_bash_can_read_it():
    result = subprocess.run(["bash", "-n", TEMPLATE], capture_output=True, text=True, timeout=30)
    assert result.returncode == 0, result.stderr


def test_there_is_one_and_a_person_can_read_it():
    assert [path.name for path in (ROOT / "slurm").iterdir()] == [TEMPLATE.name]
    lines = TEXT.splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 125


def test_srun_kills_the_job_with_a_rank_and_names_the_mpi():
    (command,) = re.findall(r"^srun .*", TEXT, re.MULTILINE)
    assert command.startswith('srun -K --mpi="$MPI_TYPE" ')


def test_what_a_site_sets_stands_at_the_top_and_can_be_overridden():
    for name in SITE:
        assert re.search(rf"^{name}=\$\{{{name}:-.*\}}", HEAD, re.MULTILINE), name
    assert "#SBATCH" not in BODY
    assert re.findall(r"^##SBATCH --(account|partition|mem)\b", HEAD, re.MULTILINE) == [
        "account",
        "partition",
        "mem",
    ]


def test_the_default_program_is_there():
    (program,) = re.findall(r"\|\| set -- (\S+)", TEXT)
    assert (ROOT / program).is_file()


def test_it_asks_slurm_for_what_the_guard_needs():
    for line in (r"--signal=USR1@\d+", "--requeue", "--open-mode=append"):
        assert re.search(f"^#SBATCH {line}$", HEAD, re.MULTILINE), line


# -- run with stand-ins for Slurm's commands and for the interpreter --------------------


@pytest.fixture
def run_template(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the template where srun says what it was given and ends with CODE."""
    tools, venv = tmp_path / "tools", tmp_path / "venv" / "bin"
    for folder in (tools, venv):
        folder.mkdir(parents=True)
    vendor = '*"get_vendor"*) echo "${VENDOR:-MPICH}"'
    for path, text in {
        tools / "srun": f'case "$*" in {vendor};; *) echo "srun $*"; exit ${{CODE:-0}};; esac',
        tools / "apptainer": f'case "$*" in {vendor};; esac',
        tools / "scontrol": 'echo "scontrol $*"',
        tools / "squeue": 'echo "2026-11-24T18:00:00"',
        tools / "sleep": ":",
        venv / "python": 'echo "${VENDOR:-MPICH}"',
    }.items():
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        variables = {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_JOB_ID": "7",
            "VENV": str(venv.parent),
            # Which uses a variable that nobody has set, as modules do.
            "BASH_FUNC_module%%": '() { echo "module $*$NOT_SET"; }',
            **env,
        }
        return subprocess.run(
            ["bash", TEMPLATE, *arguments],
            env=variables,
            capture_output=True,
            text=True,
            timeout=30,
        )

    return run


@pytest.mark.parametrize(
    ("vendor", "mpi_type"),
    [
        ("MPICH", "pmi2"),
        ("Intel MPI", "pmi2"),
        ("MVAPICH2", "pmi2"),
        ("MVAPICH", "pmi2"),
        ("Cray MPICH", "cray_shasta"),
        ("Open MPI", "pmix"),
    ],
)
def test_mpi_type_follows_the_vendor(run_template, vendor, mpi_type):
    result = run_template("program.py", VENDOR=vendor)
    assert result.returncode == 0, result.stderr
    assert f"srun -K --mpi={mpi_type} " in result.stdout


def test_an_unknown_vendor_needs_the_override(run_template):
    result = run_template(VENDOR="Some MPI")
    assert result.returncode == 2
    assert "set MPI_TYPE" in result.stderr
    assert "srun" not in result.stdout
    result = run_template(VENDOR="Some MPI", MPI_TYPE="cray_shasta")
    assert "--mpi=cray_shasta " in result.stdout


def test_modules_program_and_exit_code(run_template):
    result = run_template("mine.py", "--a b", MODULES="gcc mpi", CODE="3")
    assert result.returncode == 3
    assert result.stdout.splitlines()[:2] == ["module load gcc", "module load mpi"]
    assert "/bin/python mine.py --a b\n" in result.stdout
    assert "/bin/python examples/train_digits.py --mesh" in run_template().stdout


def test_a_module_that_is_not_there_ends_the_job(run_template):
    result = run_template("mine.py", MODULES="gcc", **{"BASH_FUNC_module%%": "() { return 4; }"})
    assert (result.returncode, result.stdout) == (4, "")


def test_ranks_are_bound_and_their_signal_is_ignored_while_they_start(run_template):
    told = run_template("mine.py", SLURM_CPUS_PER_TASK="3", CPU_BIND="sockets").stdout
    assert " --cpus-per-task=3 --cpu-bind=sockets " in told
    assert """ sh -c trap "" USR1; exec "$@" sh /""" in told
    assert "--distribution" not in told
    assert "--distribution=block:block" in run_template("mine.py", SLURM_GPUS_ON_NODE="2").stdout


def test_apptainer_runs_an_image_file(run_template, tmp_path):
    gpus = {"SLURM_GPUS_ON_NODE": "2"}
    told = run_template("mine.py", CONTAINER="a.sif", REQUEUE="1", VENDOR="Open MPI", **gpus).stdout
    folder = tmp_path / "checkpoints" / "7"
    images = f"--nv --bind {tmp_path} --bind {folder} a.sif python3 mine.py --checkpoint {folder}\n"
    assert f"apptainer exec {images}" in told
    assert "--mpi=pmix" in told
    assert f"apptainer exec --bind {tmp_path} a.sif" in run_template(CONTAINER="a.sif").stdout


def test_pyxis_runs_an_image_of_a_registry(run_template, tmp_path):
    told = run_template("mine.py", CONTAINER="nvcr.io#a/b", VENDOR="Open MPI").stdout
    assert f"--container-image=nvcr.io#a/b --container-workdir={tmp_path} " in told
    assert f"--container-mounts={tmp_path}:{tmp_path} sh -c" in told
    assert told.endswith(" sh python3 mine.py\n")
    assert "--mpi=pmix" in told


def test_a_restart_takes_a_step_that_it_has_not_had(run_template):
    lines = run_template("mine.py", SLURM_RESTART_COUNT="2", CODE="1").stdout.splitlines()
    assert ["mine.py" in line for line in lines] == [False, False, True]
    assert all(line.startswith("srun ") for line in lines)


def test_code_85_requeues_and_no_other_does(run_template):
    assert "scontrol requeue 7\n" in run_template(REQUEUE="1", CODE="85").stdout
    for code in ("0", "1", "143"):
        result = run_template(REQUEUE="1", CODE=code)
        assert "scontrol" not in result.stdout
        assert result.returncode == int(code)
    result = run_template(CODE="85")
    assert "scontrol" not in result.stdout, "nobody has asked for it"
    assert result.returncode == 85


def test_requeueing_has_an_end(run_template):
    options = {"REQUEUE": "1", "CODE": "85"}
    assert "scontrol" in run_template(SLURM_RESTART_COUNT="99", **options).stdout
    result = run_template(SLURM_RESTART_COUNT="100", **options)
    assert "scontrol" not in result.stdout
    assert result.returncode == 85


def test_the_checkpoint_folder_stays_when_the_job_is_requeued(run_template, tmp_path):
    result = run_template("mine.py", REQUEUE="1")
    assert f"mine.py --checkpoint {tmp_path}/checkpoints/7\n" in result.stdout
    assert (tmp_path / "checkpoints" / "7").is_dir()
    assert "--checkpoint" not in run_template("mine.py").stdout


def test_tasks_of_an_array_have_folders_and_requeues_of_their_own(run_template, tmp_path):
    # Of the last task the job's number is that of the array.
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "REQUEUE": "1", "CODE": "85"}
    told = run_template("mine.py", **array).stdout
    assert f"--checkpoint {tmp_path}/checkpoints/7/3\n" in told
    assert "scontrol requeue 7_3\n" in told
    told = run_template("mine.py", CHECKPOINT="saved", **array).stdout
    assert f"--checkpoint {tmp_path}/saved/3\n" in told


def test_the_end_of_the_job_is_asked_for_where_slurm_does_not_say_it(run_template, tmp_path):
    (tmp_path / "tools" / "srun").write_text("#!/bin/bash\necho end $SLURM_JOB_END_TIME\n")
    assert run_template("mine.py", TZ="UTC").stdout == "end 1795543200\n"
    assert run_template("mine.py", SLURM_JOB_END_TIME="12").stdout == "end 12\n"

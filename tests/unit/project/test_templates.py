"""Checks of the templates for Slurm and PBS without either."""

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
SITE = (
    "MODULES",
    "VENV",
    "CONTAINER",
    "MPI_TYPE",
    "CPU_BIND",
    "SRUN_OPTIONS",
    "REQUEUE",
    "MAX_RESTARTS",
)


def test_bash_can_read_it():
    result = subprocess.run(["bash", "-n", TEMPLATE], capture_output=True, text=True, timeout=30)
    assert result.returncode == 0, result.stderr


def test_there_is_one_and_a_person_can_read_it():
    assert [path.name for path in (ROOT / "slurm").iterdir()] == [TEMPLATE.name]
    lines = TEXT.splitlines()
    assert len(lines) <= 145
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
    result = run_template("program.py", VENDOR=vendor, I_MPI_PMI_LIBRARY="/usr/lib/libpmi2.so")
    assert result.returncode == 0, result.stderr
    assert f"srun -K --mpi={mpi_type} " in result.stdout


def test_an_unknown_vendor_needs_the_override(run_template):
    result = run_template(VENDOR="Some MPI")
    assert result.returncode == 2
    assert "set MPI_TYPE" in result.stderr
    assert "srun" not in result.stdout
    result = run_template(VENDOR="Some MPI", MPI_TYPE="cray_shasta")
    assert "--mpi=cray_shasta " in result.stdout


def test_intel_mpi_needs_the_library_of_slurm(run_template):
    """Without it, each rank is a world of its own."""
    if [*Path("/usr").glob("lib*/**/libpmi2.so"), *Path("/opt/slurm").glob("lib*/libpmi2.so")]:
        pytest.skip("this machine has it")
    result = run_template("mine.py", VENDOR="Intel MPI")
    assert result.returncode == 2
    assert "I_MPI_PMI_LIBRARY" in result.stderr
    assert "srun" not in result.stdout
    assert "--mpi=pmix " in run_template("mine.py", VENDOR="Intel MPI", MPI_TYPE="pmix").stdout


def test_more_options_for_srun(run_template):
    told = run_template("mine.py", SRUN_OPTIONS="--network=single_node_vni  --overlap").stdout
    assert " --network=single_node_vni --overlap sh -c " in told


def test_one_gpu_for_each_task_is_told(run_template):
    result = run_template("mine.py", SLURM_GPUS_ON_NODE="4", SLURM_GPUS_PER_TASK="1")
    assert result.returncode == 0
    assert "--gpus-per-node" in result.stderr
    assert "gpu" not in run_template("mine.py", SLURM_GPUS_ON_NODE="4").stderr


def test_the_components_of_a_heterogeneous_job_are_one_world(run_template):
    cpus = {f"SLURM_CPUS_PER_TASK_HET_GROUP_{group}": str(n) for group, n in enumerate((4, 2, 3))}
    told = run_template("mine.py", "--x", SLURM_HET_SIZE="3", SRUN_OPTIONS="--exact", **cpus).stdout
    components = told.strip().removeprefix("srun ").split(" : ")
    assert len(components) == 3
    for group, (component, threads) in enumerate(zip(components, (4, 2, 3), strict=True)):
        assert component.startswith(f"-K --mpi=pmi2 --het-group={group} --cpus-per-task={threads} ")
        assert " --exact " in component
        assert component.endswith(" mine.py --x")
        assert group == 0 or f" OMP_NUM_THREADS={threads} " in component
    assert "het-group" not in run_template("mine.py").stdout


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


# -- PBS ---------------------------------------------------------------------------------

PBS = ROOT / "pbs" / "job.pbs"


@pytest.fixture
def run_pbs(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the template on three nodes where mpiexec says what it was given and ends with CODE."""
    tools, venv = tmp_path / "tools", tmp_path / "venv" / "bin"
    for path, text in {
        tools / "mpiexec": 'echo "mpiexec $* threads $OMP_NUM_THREADS"; exit ${CODE:-0}',
        venv / "python": 'echo "${VENDOR:-MPICH}"',
    }.items():
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    # As some sites have it, a line for each rank.
    (tmp_path / "nodes").write_text("a\na\nb\nb\nc\nc\n")

    def run(**env: str) -> subprocess.CompletedProcess[str]:
        variables = {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "PBS_O_WORKDIR": str(tmp_path),
            "PBS_NODEFILE": str(tmp_path / "nodes"),
            "TMPDIR": str(tmp_path),
            "VENV": str(venv.parent),
            **env,
        }
        return subprocess.run(
            ["bash", PBS], env=variables, capture_output=True, text=True, timeout=30
        )

    return run


@pytest.mark.parametrize(
    ("vendor", "options"),
    [
        ("Cray MPICH", "--ppn 4 --depth 8 --cpu-bind depth"),
        ("Open MPI", r"--hostfile \S+ --map-by ppr:4:node:PE=8 --bind-to core"),
        ("MPICH", r"-hostfile \S+ -ppn 4 -bind-to core:8"),
        ("Intel MPI", r"-hostfile \S+ -ppn 4"),
    ],
)
def test_pbs_starts_a_world_over_all_nodes(run_pbs, vendor, options):
    result = run_pbs(
        PROGRAM="mine.py --a", RANKS_PER_NODE="4", DEPTH="8", VENDOR=vendor, MPIEXEC_OPTIONS="--x"
    )
    assert result.returncode == 0, result.stderr
    found = re.fullmatch(
        rf"mpiexec -n 12 {options} --x \S+/bin/python mine.py --a threads 8\n", result.stdout
    )
    assert found, result.stdout


def test_pbs_ends_with_the_code_of_the_program_and_leaves_nothing(run_pbs, tmp_path):
    before = sorted(tmp_path.iterdir())
    assert run_pbs(CODE="3").returncode == 3
    assert sorted(tmp_path.iterdir()) == before
    assert run_pbs(MPIEXEC="/nowhere/mpiexec").returncode == 127


def test_a_person_can_read_that_of_pbs():
    text = PBS.read_text()
    assert max(map(len, text.splitlines())) <= 125
    (program,) = re.findall(r"^PROGRAM=\$\{PROGRAM:-(\S+)", text, re.MULTILINE)
    assert (ROOT / program).is_file()

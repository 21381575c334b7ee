"""Errors that all ranks share, errors that are caught, and hooks that others have set."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path

import pytest

from tests.helpers.depth import deep
from tests.helpers.raises import names
from tests.launch.failure_programs import PRELUDE, program
from tests.launch.test_failure_exits import LIMIT_S, failed

CHECKS = {"MPIMESH_CHECKS": "1"}


def run(launch, text, nprocs=3, **options):
    return launch(nprocs, PRELUDE + textwrap.dedent(text), timeout_s=LIMIT_S, **options)


def test_a_world_that_does_not_fit_is_told_once(launch):
    text = """
    print("rank 1 goes at", time.time(), flush=True)
    mm.DeviceMesh("dp=2,pp=2")
    """
    result = run(launch, text)
    failed(result, code=1)  # 2 s on a machine that does nothing else
    assert result.stderr.count("WorldSizeError:") == 1, str(result)
    assert "[rank 0] mpimesh.errors.WorldSizeError: " in result.stderr
    assert "bort" not in result.stderr, str(result)


@pytest.mark.parametrize("within", [False, *deep(True)], ids=["open", "within"])
def test_a_mismatch_of_all_ranks_is_told_once(launch, within):
    way, wait = "mesh.group().barrier()", "mesh.group().all_reduce(np.ones(3)).resolve()"
    result = launch(3, program(way, wait, within=within), env=CHECKS, timeout_s=LIMIT_S)
    failed(result, code=1)
    assert result.stderr.count("MismatchError:") == 1, str(result)


def test_a_rank_that_waits_while_the_others_end_the_block_is_told_without_checks(launch):
    text = """
    with mm.DeviceMesh("dp=-1") as mesh:
        x = mm.distribute(np.ones((8, 8)), mesh, "dp=S0")
        print("rank 1 goes at", time.time(), flush=True)
        if mesh.rank == 0:
            x.full()
    """
    result = run(launch, text)
    failed(result, code=1)
    told = "MismatchError", "rank 0: redistribute(", "close() of the mesh", "x.full()"
    names(result.stderr, *told)


def test_ranks_of_other_groups_learn_that_a_rank_waits_for_one_that_ends_the_block(launch):
    text = """
    try:
        with mm.DeviceMesh("dp=2,tp=2") as mesh:
            if mesh.rank == 0:
                mesh.group("tp").all_reduce(np.ones(3)).resolve()
    except mm.errors.MpimeshError as error:
        print(f"{type(error).__name__} on {RANK}: {error}", flush=True)
    """
    result = run(launch, text, nprocs=4)
    found = "rank 0: all_reduce(shape (3,), float64, sum); rank 1: close() of the mesh"
    kinds = ["MismatchError"] * 2 + ["PeerLostError"] * 2
    for rank, kind in enumerate(kinds):
        names(result.stdout, f"{kind} on {rank}")
    assert result.stdout.count(found) == 4, str(result)
    assert result.stdout.count("left the mesh by MismatchError") == 2, str(result)


@pytest.mark.parametrize("before", ["", *deep("from mpi4py import MPI")])
def test_a_setting_that_cannot_be_is_told_once(launch, before):
    text = f"{before}\nimport mpimesh as mm\nmm.DeviceMesh('dp=-1')"
    result = launch(4, text, env={"MPIMESH_CHECKS": "on"}, timeout_s=LIMIT_S)
    assert result.returncode == 1, str(result)
    assert result.stderr.count("SettingsError: MPIMESH_CHECKS must be") == 1, str(result)
    assert result.stderr.count("Traceback") == 1, str(result)
    # Of rank 0, of several, or of another that came to it much sooner.
    assert re.search(r"\[ranks? \d\S*\] mpimesh.errors.SettingsError: ", result.stderr), str(result)
    assert not result.timed_out, str(result)


@pytest.mark.deep
def test_a_variable_that_is_no_setting_is_told_once(launch):
    text = "import mpimesh as mm\nfor _ in range(2): mm.DeviceMesh('dp=-1').close()"
    result = launch(4, text, env={"MPIMESH_CHEKCS": "1"}, timeout_s=LIMIT_S)
    assert result.returncode == 0, str(result)
    assert result.stderr.count("MPIMESH_CHEKCS is no setting") == 1, str(result)


@pytest.mark.parametrize("stage", [*deep(0), 1])
def test_a_stage_that_fails_is_told_once_and_without_frames_of_mpimesh(launch, stage):
    text = """
    class Bad(mm.nn.Module):
        def forward(self, x, ctx=None):
            raise ValueError("a scale of 3")

    mesh = mm.DeviceMesh("pp=2")
    stages = [mm.PipelineStage(0), mm.PipelineStage(1)]
    stages[{stage}].add_layer(Bad())
    pipe = mm.PipelineParallel(stages, num_microbatches=2, mesh=mesh)
    pipe.train_step(np.ones((4, 2)), np.ones((4, 2)), loss=mm.nn.mse_loss)
    """
    result = run(launch, text.replace("{stage}", str(stage)), nprocs=2)
    assert result.returncode == 1, str(result)
    told = result.stderr
    (headline,) = [line for line in told.splitlines() if f"({stage}F0)" in line]
    names(headline, f"stage {stage}", f"rank {stage}", "forward", "microbatch 0", "ValueError")
    assert told.count("ValueError: a scale of 3") == 2, str(result)  # and below the traceback
    # Where the program called train_step, and where its layer raised.
    assert told.count("  File ") == 2, str(result)
    assert ", in forward" in told, str(result)


@pytest.mark.deep
@pytest.mark.parametrize("within", [False, True], ids=["open", "within"])
def test_a_mismatch_in_a_part_of_the_mesh_ends_the_job(launch, within):
    """Two of four ranks agree on an error that the others, who wait for them, know nothing of."""
    text = """
    mesh = mm.DeviceMesh("dp=2,pp=2")
    {open}
        if mesh.coord("dp") == 1:
            print("rank 1 goes at", time.time(), flush=True)
            group = mesh.group("pp")
            (group.barrier if group.rank else group.start_barrier)(label=str(group.rank))
            group.all_reduce(np.ones(2 + group.rank)).resolve()
        mesh.group().all_reduce(np.ones(2)).resolve()
    """
    text = text.replace("{open}", "with mesh:" if within else "if True:")
    result = run(launch, text, nprocs=4, env=CHECKS)
    failed(result)
    assert "MismatchError: " in result.stderr or "left the mesh by MismatchError" in result.stderr


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ("os.environ['MPIMESH_CHECKS'] = 'abc'", "SettingsError: MPIMESH_CHECKS must be"),
        *deep(("comm = 'all'", "MeshError: comm must be")),
    ],
    ids=["environment", "comm"],
)
def test_an_error_of_one_rank_before_the_first_mesh(launch, change, error):
    text = f"""
    comm = None
    if RANK == 1:
        print("rank 1 goes at", time.time(), flush=True)
        {change}
    mm.DeviceMesh("dp=-1", comm)
    """
    result = run(launch, text)
    failed(result)
    assert f"[rank 1] mpimesh.errors.{error}" in result.stderr, str(result)


@pytest.mark.deep
def test_an_error_caught_outside_of_the_mesh_still_reaches_the_others(launch):
    text = """
    try:
        with mm.DeviceMesh("dp=-1") as mesh:
            if RANK == 1:
                print("rank 1 goes at", time.time(), flush=True)
                raise ValueError("the cause")
            mesh.group().all_reduce(np.ones(2)).resolve()
    except ValueError:
        time.sleep(100)
    """
    result = run(launch, text)
    failed(result, code=1)
    assert re.search(r"\brank 1\b.* ValueError: the cause", result.stderr), str(result)


def test_a_lost_peer_can_be_caught(launch):
    text = """
    from mpimesh.errors import PeerLostError
    mesh = mm.DeviceMesh("dp=-1")
    if RANK != 1:
        try:
            mesh.group().barrier()
        except PeerLostError as error:
            print(f"caught: {error}", flush=True)
    """
    result = run(launch, text)
    assert result.returncode == 0, str(result)
    assert result.stdout.count("caught: this rank waits in barrier()") == 2
    assert "[rank" not in result.stderr


HOOKS = {
    "before, chained by us": (
        "before",
        "def hook(*args): sys.stderr.write('the hook was called\\n')",
    ),
    "after, calling ours": (
        "after",
        "ours = sys.excepthook\n"
        "def hook(*args): sys.stderr.write('the hook was called\\n'); ours(*args)",
    ),
    "after, in place of ours": (
        "after",
        "def hook(*args): sys.stderr.write('the hook was called\\n')",
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize("kind", HOOKS)
def test_other_excepthooks(launch, kind):
    place, definition = HOOKS[kind]
    setting = f"{definition}\nsys.excepthook = hook\n"
    text = (
        (setting if place == "before" else "")
        + 'mesh = mm.DeviceMesh("dp=-1")\n'
        + (setting if place == "after" else "")
        + 'if RANK == 1:\n    print("rank 1 goes at", time.time(), flush=True)\n    1 / 0\n'
        + "MPI.COMM_WORLD.Barrier()\n"
    )
    result = run(launch, text)
    failed(result, code=1)
    assert result.stderr.count("the hook was called") == 1, str(result)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("way", "wait", "code"),
    [
        ("sys.exit(3)", "MPI.COMM_WORLD.Barrier()", 3),
        ("1 / 0", "MPI.COMM_WORLD.Barrier()", 1),
        ("raise SystemExit(3)", "mesh.group().barrier()", 1),
    ],
)
def test_a_program_started_with_m(launch, tmp_path, way, wait, code):
    """Of a bare SystemExit nobody knows the code there, but that the rank has left."""
    (tmp_path / "the_program.py").write_text(program(way, wait))
    result = launch(3, ["-m", "the_program"], env={"PYTHONPATH": path(tmp_path)}, timeout_s=LIMIT_S)
    failed(result, code=code)


def path(folder: Path) -> str:
    return os.pathsep.join([str(folder), str(Path(__file__).resolve().parents[2])])


@pytest.mark.deep
def test_long_output_is_not_lost(launch):
    text = """
    mesh = mm.DeviceMesh("dp=-1")
    if RANK == 1:
        print("rank 1 goes at", time.time(), flush=True)
        sys.stdout.write("".join(f"line {number}\\n" for number in range(20_000)))
        raise ValueError("the cause")
    mesh.group().barrier()
    """
    result = run(launch, text)
    failed(result, code=1)
    assert "line 19999\n" in result.stdout
    assert "[rank 1] ValueError: the cause" in result.stderr

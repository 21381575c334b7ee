"""Ends that are no failure stay what they are: no delay, no output, the program's own exit code."""

from __future__ import annotations

import re

import pytest

from mpimesh.testing import LaunchResult
from tests.helpers.depth import deep
from tests.launch.failure_programs import PRELUDE, notices_after, program

LIMIT_S = 40.0


def quiet(result: LaunchResult, *, code: int = 0) -> None:
    assert not result.timed_out, str(result)
    assert result.returncode == code, str(result)
    assert "[rank" not in result.stderr, str(result)
    assert "Traceback" not in result.stderr, str(result)
    assert "bort" not in result.stderr, str(result)


MESHES = """
for _ in range(3):
    with mm.DeviceMesh("dp=-1") as mesh:
        mesh.group().all_reduce(np.ones(3)).resolve()
first, second = mm.DeviceMesh("dp=-1"), mm.DeviceMesh({"a": -1, "b": 1})
second.group().barrier()
"""


@pytest.mark.parametrize(
    ("last", "code"),
    [
        ("", 0),
        *deep(("sys.exit()", 0), ("sys.exit(0)", 0), ("raise SystemExit(0)", 0)),
        ("sys.exit(3)", 3),
        *deep(("raise SystemExit(3)", 3), ("second.close(); sys.exit(3)", 3)),
    ],
)
def test_all_ranks_end_alike(launch, last, code):
    quiet(launch(3, PRELUDE + MESHES + last, timeout_s=LIMIT_S), code=code)


@pytest.mark.deep
def test_the_hooks_cost_no_time_at_the_end(launch):
    """Measured from the last statement to the exit of each process, against MPI alone."""
    end = "import atexit; MPI.COMM_WORLD.Barrier(); start_s = time.time()\n"
    # Registered first, so called last: after the hooks, just before MPI is finalized.
    early = "import atexit; atexit.register(lambda: print(f'took {time.time() - start_s}'))\n"
    result = launch(3, PRELUDE + early + MESHES + end, timeout_s=LIMIT_S)
    quiet(result)
    took = [float(number) for number in re.findall(r"took (.+)", result.stdout)]
    assert len(took) == 3
    assert max(took) < 3.0


@pytest.mark.deep
@pytest.mark.parametrize("within", [False, True], ids=["open", "within"])
def test_a_caught_exit_is_no_exit(launch, within):
    text = """
    saved = []
    def main():
        try:
            sys.exit(3)
        except SystemExit as error:
            saved.append(error)
        try:
            raise SystemExit(4)
        except SystemExit:
            pass
    main()
    """
    body = MESHES + "\n".join(line[4:] for line in text.splitlines())
    if within:
        body += "\nwith mm.DeviceMesh('dp=-1') as mesh:\n    main()\n"
    quiet(launch(2, PRELUDE + body, timeout_s=LIMIT_S))


@pytest.mark.deep
def test_a_rank_may_leave_while_others_compute(launch):
    text = program("pass", "time.sleep(2); print('done', flush=True)")
    result = launch(3, text, timeout_s=LIMIT_S)
    quiet(result)
    assert result.stdout.count("done") == 2
    assert result.seconds > 2


@pytest.mark.deep
def test_a_rank_that_waits_long_at_its_end_says_so_once(launch):
    text = notices_after(2) + program("pass", "time.sleep(4)")
    result = launch(3, text, timeout_s=LIMIT_S)
    assert result.returncode == 0, str(result)
    notices = [line for line in result.stderr.splitlines() if "mpimesh" in line]
    assert notices == ["[rank 1] mpimesh: ended 2 s ago and waits for ranks that have not"]


def test_a_rank_may_leave_when_it_has_done_its_part(launch):
    """Rank 1 gives its share of a reduction and leaves; rank 0 waits on for the slow rank 2."""
    share = "mesh.group().reduce(np.full(2, 1.0 + RANK), root=0).resolve()"
    slow = f"""
    if RANK == 2: time.sleep(2)
    total = {share}
    if RANK == 0: print(total, flush=True)
    """
    result = launch(3, program(share, slow), timeout_s=LIMIT_S, env={"MPIMESH_CHECKS": "0"})
    quiet(result)
    assert "[6. 6.]" in result.stdout


@pytest.mark.deep
def test_a_message_of_a_rank_that_left_still_comes(launch):
    send = "mesh.group().send(np.arange(3.0), 0).resolve()"
    receive = """
    time.sleep(1)
    if RANK == 0: print(mesh.group().recv(1).resolve(), flush=True)
    if RANK == 2: mesh.group().send(np.arange(2.0), 0, tag=7).resolve()
    if RANK == 0: print(mesh.group().recv(2, tag=7).resolve(), flush=True)
    """
    result = launch(3, program(send, receive), timeout_s=LIMIT_S)
    quiet(result)
    assert "[0. 1. 2.]" in result.stdout


@pytest.mark.deep
def test_a_forked_child_has_no_part_in_it(launch):
    text = """
    child = os.fork()
    if child == 0:
        try:
            raise ValueError("the child's own")
        except ValueError:
            sys.excepthook(*sys.exc_info())
            os._exit(7)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(f"child {code}", flush=True)
    """
    body = "\n".join(line[4:] for line in text.splitlines())
    result = launch(2, PRELUDE + MESHES + body, timeout_s=LIMIT_S)
    assert result.returncode == 0, str(result)
    assert result.stdout.count("child 7") == 2
    assert "[rank" not in result.stderr


@pytest.mark.parametrize("code", [*deep(0), 85])
def test_exit_all(launch, code):
    text = f"""
    import atexit
    from mpimesh.runtime import exit_all
    atexit.register(lambda: print(f"exit function {{RANK}}", flush=True))
    if RANK == 1: time.sleep(0.5)
    sys.stdout.write("written out\\n")
    exit_all({code})
    print("not reached")
    """
    body = "\n".join(line[4:] for line in text.splitlines())
    result = launch(3, PRELUDE + MESHES + body, timeout_s=LIMIT_S)
    quiet(result, code=code)
    assert result.stdout.count("written out") == 3
    assert result.stdout.count("exit function") == 3
    assert "not reached" not in result.stdout


@pytest.mark.deep
def test_exit_all_needs_no_mesh_nor_mpi(launch):
    text = "from mpimesh.runtime import exit_all; exit_all(85)"
    assert launch(1, ["-c", text], launcher=["env"]).returncode == 85


@pytest.mark.deep
@pytest.mark.parametrize("code", ["256", "-1", "'x'", "True", "1.0"])
def test_exit_all_refuses_what_is_no_exit_code(launch, code):
    text = f"import mpimesh as mm\ntry: mm.exit_all({code})\nexcept ValueError: print('refused')"
    result = launch(1, ["-c", text], launcher=["env"])
    assert (result.returncode, result.stdout) == (0, "refused\n"), str(result)


@pytest.mark.parametrize(
    ("last", "status"),
    [*deep(("", 0)), ("sys.exit(3)", 3), *deep(("raise SystemExit(4)", 4), ("1 / 0", 1))],
)
def test_a_forked_child_ends_without_its_parents_mpi(launch, last, status):
    """It would finalize what the parent uses: messages were lost, and jobs hung or crashed."""
    program = f"""
import os
mesh = mm.DeviceMesh("dp=-1")
group = mesh.group()
group.all_reduce(np.ones(3)).resolve()
child = os.fork() if mesh.rank == 1 else -1
if child == 0:
    {last or "pass"}
else:
    for _ in range(200):
        group.all_reduce(np.ones(3)).resolve()
        group.broadcast(np.ones(10_000), root=1).resolve()
    if mesh.rank == 1:
        print("the child's status:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    mesh.close()
"""
    result = launch(3, PRELUDE + program, timeout_s=LIMIT_S)
    assert not result.timed_out, str(result)
    assert result.returncode == 0, str(result)
    assert f"the child's status: {status}" in result.stdout, str(result)
    assert "inalize" not in result.stderr, str(result)

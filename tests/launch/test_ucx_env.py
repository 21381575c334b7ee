"""``python -m mpimesh ucx-env`` and then a job, on a machine that needs no GPU.

The MPI at hand runs on the UCX of a wheel; and where there is a C compiler, memory that UCX alone
can reach stands in for a GPU's.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from mpimesh.cli.ucx_env import find_wheel
from mpimesh.comm.cuda_probe import ProbeResult, probe_in_children
from mpimesh.testing.launch import mpiexec_environment
from tests.launch.test_cuda_probe import STAND_IN, finish

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libucx") is None,
    reason="no UCX from a wheel is installed: pip install libucx-cu13 (43 MB)",
)


@pytest.fixture(scope="module")
def chosen() -> dict[str, str]:
    """A shell's variables after the command, as far as they differ."""
    python = shlex.quote(sys.executable)
    script = f'eval "$({python} -m mpimesh ucx-env)"; {python} -c "'
    script += 'import json, os; print(json.dumps(dict(os.environ)))"'
    run = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert "takes UCX" in run.stderr
    told = json.loads(run.stdout)
    return {name: told[name] for name in told if told[name] != os.environ.get(name)}


PROGRAM = """
import json, os, subprocess, sys
import numpy as np
import mpimesh as mm
from mpimesh.comm.cuda_probe import key_facts
from mpimesh.comm.mpi_environment import clean_environment, loaded_ucx

told = {"key": key_facts(), "path": loaded_ucx().path}
with mm.DeviceMesh("ranks=-1") as mesh:
    group, peer = mesh.group("world"), 1 - mesh.rank
    for size in (1, 1 << 13, 1 << 20):
        mine = np.arange(size) + mesh.rank
        total = group.all_reduce(mine).resolve()
        assert (total == 2 * np.arange(size) + 1).all()
        sent = group.send(mine, peer)
        assert (group.recv(peer).resolve() == np.arange(size) + peer).all()
        sent.resolve()
    # As the proof's child processes are started.
    ask = "import mpi4py.MPI, mpimesh.comm.mpi_environment as e; print(e.loaded_ucx().path)"
    environment = clean_environment(os.environ)
    child = subprocess.check_output([sys.executable, "-c", ask], env=environment, text=True)
    told["child"] = child.strip()
    if mesh.rank == 0:
        print(json.dumps(told))
"""


def test_a_job_and_its_proof_run_on_the_ucx_of_the_wheel(chosen, launch, tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    results = [launch(2, PROGRAM, env=env), launch(2, PROGRAM, env=env | chosen)]
    assert [result.returncode for result in results] == [0, 0], "\n".join(map(str, results))
    own, wheel = (json.loads(result.stdout) for result in results)
    folder = chosen["LD_LIBRARY_PATH"].split(os.pathsep)[0]
    assert Path(wheel["path"]).parent.samefile(folder)
    assert wheel["child"] == wheel["path"]
    assert own["child"] == own["path"] != wheel["path"]
    # Answers of the one are none of the other's.
    assert "CUDA transports" in wheel["key"]["ucx"]
    assert own["key"]["ucx"] != wheel["key"]["ucx"]
    assert own["key"]["tuning"] != wheel["key"]["tuning"]


@pytest.fixture(scope="module")
def only_ucx(tmp_path_factory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: it makes the memory that UCX alone can reach")
    headers = find_wheel().folder.with_name("include")
    library: Path = tmp_path_factory.mktemp("only_ucx") / "only_ucx.so"
    options = ["-shared", "-fPIC", "-Wno-deprecated-declarations", f"-I{headers}"]
    source = str(STAND_IN / "only_ucx.c")
    subprocess.run([compiler, *options, "-o", str(library), source, "-ldl"], check=True)
    return library


def probe(
    operations: Sequence[str], library: Path, variables: Mapping[str, str]
) -> dict[str, ProbeResult]:
    environment = {
        **os.environ,
        **mpiexec_environment(),
        "PYTHONPATH": str(STAND_IN),
        "LD_PRELOAD": str(library),
        "STAND_IN": "ucx",
        **variables,
    }
    return finish(probe_in_children(operations, environment=environment))


def test_messages_and_broadcasts_are_handed_to_ucx_untouched(chosen, only_ucx):
    found = probe(["messages", "broadcast"], only_ucx, chosen)
    right = "two ranks under mpiexec moved 8 B, 32 KiB and 4 MiB right"
    assert {*found.values()} == {ProbeResult(True, right)}


def test_another_ucx_alone_is_not_enough(chosen, only_ucx):
    """Without the other variables, messages inside a node are MPI's own, which copies them."""
    path = {"LD_LIBRARY_PATH": chosen["LD_LIBRARY_PATH"]}
    found = probe(["messages"], only_ucx, path)
    assert "killed by signal 11" in found["messages"].reason

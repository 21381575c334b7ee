"""Probe whether MPI accepts device pointers.

An MPI that cannot take a device pointer crashes on it, and none says reliably
whether it can. So each operation is tried once in child processes with a time
limit (see `cuda_probe_child.py`), and the results are kept for later jobs.

A trial shows no more than what it did. MPI goes one way between ranks of a node,
through memory that they share or by CUDA IPC, and another way between nodes, so
each is tried where ranks need it: the second one by two ranks of a node whose MPI
is told to use its network alone. Where ranks of a node use several GPUs, the two
ranks must see two of them. What cannot be tried is a no.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpimesh.arrays.namespace import HostArray
from mpimesh.comm.base import Communicator
from mpimesh.comm.cuda_probe_child import OPERATIONS, TRIAL_BYTES
from mpimesh.comm.device_strategy import gpu_key, node_key
from mpimesh.comm.engine import ProgressEngine, Steps
from mpimesh.comm.mpi_environment import (
    cache_folder,
    clean_environment,
    digest,
    find_mpiexec,
    loaded_ucx,
    network_environment,
    processes_with,
    tuning,
    write_json,
)
from mpimesh.settings import Settings

__all__ = [
    "BETWEEN_NODES",
    "IN_NODE",
    "KNOWN",
    "PROCESS_PROBE",
    "ChildProcess",
    "ChildResult",
    "CudaAwareProbe",
    "ProbeResult",
    "has_cupy",
    "key_facts",
    "needed_ways",
    "pair_is_proven",
    "probe_in_children",
    "read_results",
    "write_results",
]

_SETTING = "MPIMESH_CUDA_AWARE"
_LIMIT_S = 60.0
"""For one child: CuPy and CUDA take some seconds to start where files are far away."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Answer to whether something may be used, such as device memory with MPI for one operation.

    Attributes:
        usable: Whether it may.
        reason: Why, for a person.
        lasting: False if the same trial may end otherwise tomorrow, as after a limit.
    """

    usable: bool
    reason: str
    lasting: bool = True

    def __str__(self) -> str:
        """Say it in one line."""
        return f"{'yes' if self.usable else 'no'}: {self.reason}"


class CudaAwareProbe:
    """Finds out for which operations this process's MPI takes device memory.

    Args:
        folder: Where results are kept; None for mpimesh's own place.
        limit_s: Limit for one child process.

    Attributes:
        notes: What did not go as it should when results were read and written, for a person.
    """

    def __init__(self, folder: Path | None = None, *, limit_s: float = _LIMIT_S) -> None:
        self._folder = cache_folder() if folder is None else folder
        self._limit_s = limit_s
        self._key: dict[str, str] = {}
        self._found_here: dict[str, dict[str, ProbeResult]] = {}
        self._agreed: dict[str, ProbeResult] = {}
        """About messages, by way; other ranks may have tried it."""
        self.notes: list[str] = []

    def steps(
        self,
        communicator: Communicator,
        operations: Sequence[str] = OPERATIONS,
        *,
        fresh: bool = False,
    ) -> Steps:
        """Collective: find the results that all ranks of `communicator` share, as the steps' value.

        Of all ranks with the same MPI and GPU the first one looks into the cache and, if need be,
        tries. The result is yes where it is yes for all of them, in all ways that these ranks
        need, and the same on all ranks. ``MPIMESH_CUDA_AWARE`` says otherwise.

        Args:
            communicator: All ranks that will use it.
            operations: Of :data:`~mpimesh.comm.cuda_probe_child.OPERATIONS`.
            fresh: Try anew, whatever is kept.

        Cost:
            Three small all-gathers; where nothing is kept, a few seconds in a child process.
        """
        forced = _forced()
        if forced is not None:
            return dict.fromkeys(operations, forced)
        if communicator.kind != "mpi":
            threads = ProbeResult(False, "these ranks are threads, not MPI's")
            return dict.fromkeys(operations, threads)
        # Neither the MPI nor the GPUs of a process change.
        key = self._key = self._key or key_facts()
        mine = np.array([int(digest(*key.values()), 16) >> 1, *_place()], np.int64)
        facts = np.empty((communicator.size, mine.size), np.int64)
        yield communicator.all_gather(mine, facts.reshape(-1), [mine.size] * communicator.size)
        ways, why_not = needed_ways(facts[:, 1:].tolist())
        if why_not:
            return dict.fromkeys(operations, ProbeResult(False, why_not, lasting=False))
        leaders = np.unique(facts[:, 0], return_index=True)[1].tolist()
        own: dict[str, dict[str, ProbeResult]] = {}
        for way in ways if communicator.rank in leaders else ():
            own[way] = yield from self._find(key, operations, way, fresh=fresh)
        fields = {way: _to_fields(results) for way, results in own.items()}
        texts = yield from _gather_texts(communicator, json.dumps(fields))
        found = [json.loads(texts[rank]) for rank in leaders]
        shared: dict[str, ProbeResult] = {}
        for way in ways:
            each = [_from_fields(of_leader[way]) for of_leader in found]
            results = {name: _first_no(*(one[name] for one in each)) for name in operations}
            if "messages" in results:
                self._agreed[way] = results["messages"]
            shared = {name: _first_no(shared.get(name, r), r) for name, r in results.items()}
        return shared

    def known(self) -> HostArray:
        """Return a :data:`KNOWN`: what this process knows about messages. Local; tries nothing."""
        known, forced = np.zeros(1, KNOWN), _forced()
        if forced is None:
            self._key = self._key or key_facts()
        known["place"], known["forced"] = _place(), forced is not None
        for column, way in enumerate((IN_NODE, BETWEEN_NODES)):
            result = forced or self._agreed.get(way)
            if result is None:
                result = read_results(self._key, way, self._folder)[0].get("messages")
            known["usable"][0, column] = result is not None and result.usable
        return known

    def run(
        self,
        communicator: Communicator,
        operations: Sequence[str] = OPERATIONS,
        *,
        fresh: bool = False,
    ) -> dict[str, ProbeResult]:
        """Collective: as :meth:`steps`, and wait for it. Nothing else moves meanwhile."""
        steps = self.steps(communicator, operations, fresh=fresh)
        request = ProgressEngine().stage("probe", steps)
        communicator.wait(request.test, what="the proof of CUDA-aware MPI")
        results: dict[str, ProbeResult] = request.value
        return results

    def _find(
        self, key: dict[str, str], operations: Sequence[str], way: str, *, fresh: bool
    ) -> Steps:
        if not has_cupy():
            return dict.fromkeys(operations, ProbeResult(False, "CuPy is not installed"))
        known, note = ({}, "") if fresh else read_results(key, way, self._folder)
        if not fresh:
            known |= self._found_here.get(way, {})
        unknown = [operation for operation in operations if operation not in known]
        if unknown:
            try:
                known |= yield from probe_in_children(unknown, way, limit_s=self._limit_s)
            except OSError as error:
                reason = f"no child process could be started: {error}"
                return known | dict.fromkeys(unknown, ProbeResult(False, reason, lasting=False))
            self.notes += filter(None, [note, write_results(key, way, known, self._folder)])
        self._found_here[way] = known
        return known


PROCESS_PROBE = CudaAwareProbe()
"""The probe of this process, which has one MPI."""


def _forced() -> ProbeResult | None:
    setting = Settings.from_environment().cuda_aware
    if setting == "auto":
        return None
    return ProbeResult(setting == "yes", f"{_SETTING}={setting}")


IN_NODE, BETWEEN_NODES = "in a node", "between nodes"
"""Ways of MPI: through memory that ranks share, or by its network."""


KNOWN = np.dtype([("place", np.int64, 3), ("usable", np.bool_, 2), ("forced", np.bool_)])
"""The facts of a process about messages of device memory by MPI: its node, its GPU and how many it
sees; whether the proof is there in a node, and between nodes; whether both are the user's word."""


def pair_is_proven(mine: Any, theirs: Any) -> bool:
    """Tell of two processes whether they may send each other device memory by MPI.

    Args:
        mine: A :data:`KNOWN`.
        theirs: Another process's.
    """
    both = mine["usable"] & theirs["usable"]
    if mine["forced"] and theirs["forced"]:
        return bool(both.all())
    ways, why_not = needed_ways([mine["place"].tolist(), theirs["place"].tolist()])
    return not why_not and all(both[(IN_NODE, BETWEEN_NODES).index(way)] for way in ways)


def _first_no(*results: ProbeResult) -> ProbeResult:
    """Return the first no, else the first yes."""
    return min(results, key=lambda result: result.usable)


def needed_ways(places: Sequence[Sequence[int]]) -> tuple[list[str], str]:
    """Return by which ways of MPI ranks reach each other, and why that cannot be tried, if so.

    Args:
        places: Of each rank its node, its GPU, and how many GPUs it sees.
    """
    gpus: dict[int, set[int]] = {}
    for node, gpu, _ in places:
        gpus.setdefault(node, set()).add(gpu)
    for rank, (node, _, seen) in enumerate(places):
        if len(gpus[node]) > 1 and seen < 2:
            return [], (
                f"rank {rank} sees one GPU only, of {len(gpus[node])} that ranks of its node use, "
                "and so cannot try what goes between two; let each rank see all GPUs of its node "
                "(Slurm: --gpus-per-node, not --gpus-per-task; --gpu-bind=none), or set "
                f"{_SETTING}=yes if you know that this MPI does it"
            )
    ways = [IN_NODE] if len(gpus) < len(places) or len(places) == 1 else []
    return (ways if len(gpus) == 1 else [*ways, BETWEEN_NODES]), ""


def _place() -> list[int]:
    """Return this rank's node, its GPU, and how many GPUs it sees; zeros if there is none."""
    with contextlib.suppress(Exception):  # as in the key
        return [node_key(), gpu_key(), int(sys.modules["cupy"].cuda.runtime.getDeviceCount())]
    return [node_key(), 0, 0]


def _gather_texts(communicator: Communicator, text: str) -> Steps:
    mine: HostArray = np.frombuffer(text.encode(), np.uint8).copy()
    sizes = np.empty(communicator.size, np.int64)
    yield communicator.all_gather(np.array([mine.size]), sizes, [1] * communicator.size)
    texts = np.empty(int(sizes.sum()), np.uint8)
    yield communicator.all_gather(mine, texts, sizes.tolist())
    return [bytes(part).decode() for part in np.split(texts, np.cumsum(sizes)[:-1])]


def _to_fields(results: Mapping[str, ProbeResult]) -> dict[str, dict[str, object]]:
    return {operation: asdict(result) for operation, result in results.items()}


def _from_fields(fields: Mapping[str, Mapping[str, Any]]) -> dict[str, ProbeResult]:
    return {operation: ProbeResult(**result) for operation, result in fields.items()}


# -- the cache -----------------------------------------------------------------------------
#
# One small file for each combination of MPI, UCX, driver, GPU and MPI settings. One that cannot be
# read is as good as none.

_SECONDS_OF_A_DAY = 86400.0


def has_cupy() -> bool:
    """Tell whether CuPy is installed, without importing it."""
    return "cupy" in sys.modules or importlib.util.find_spec("cupy") is not None


def key_facts() -> dict[str, str]:
    """Return what a result depends on. Starts MPI, and imports CuPy if it is installed."""
    from mpi4py import MPI

    own_version = ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        own_version = importlib.metadata.version("mpimesh")
    vendor, version = MPI.get_vendor()
    return {
        "mpimesh": own_version,
        "mpi": f"{vendor} {'.'.join(map(str, version))}",
        "mpi_library": digest(MPI.Get_library_version()),
        # With and without its CUDA transports, the same version gives other results.
        "ucx": str(loaded_ucx()),
        **_cuda_facts(),
        "tuning": digest(*tuning(os.environ)),
    }


def _cuda_facts() -> dict[str, str]:
    facts = {"cuda_runtime": "", "cuda_driver": "", "gpu": "", "cupy": ""}
    if not has_cupy():
        return facts
    # Whatever is wrong with CUDA here, it is not for the key to say.
    with contextlib.suppress(Exception):
        import cupy

        facts["cupy"] = str(cupy.__version__)
        facts["cuda_runtime"] = str(cupy.cuda.runtime.runtimeGetVersion())
        facts["cuda_driver"] = str(cupy.cuda.runtime.driverGetVersion())
        count = cupy.cuda.runtime.getDeviceCount()
        names = {cupy.cuda.runtime.getDeviceProperties(i)["name"].decode() for i in range(count)}
        # One GPU and several are different proofs: between two, data goes another way.
        facts["gpu"] = f"{min(count, 2)} of {', '.join(sorted(names))}"
    return facts


def read_results(
    key: Mapping[str, str], way: str, folder: Path | None
) -> tuple[dict[str, ProbeResult], str]:
    """Return the results that are kept for `key`, by operation, and a note if there is a problem.

    Results that need not last are good for a day.
    """
    if folder is None:
        return {}, ""
    path = _path(key, way, folder)
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        young = 0 <= time.time() - content["at_s"] < _SECONDS_OF_A_DAY
        results = _from_fields(content["answers"])
        if content["key"] != dict(key):
            return {}, ""
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, f"{path} cannot be read and is ignored: {type(error).__name__}: {error}"
    return {name: result for name, result in results.items() if result.lasting or young}, ""


def write_results(
    key: Mapping[str, str], way: str, results: Mapping[str, ProbeResult], folder: Path | None
) -> str:
    """Keep `results` for `key`; return a note if that cannot be done."""
    if folder is None:
        return "answers cannot be kept: this user has no home, and XDG_CACHE_HOME is not set"
    content = {
        "key": dict(key),
        "way": way,
        "at_s": time.time(),
        "answers": _to_fields(results),
    }
    try:
        write_json(_path(key, way, folder), content)
    except OSError as error:
        return f"answers cannot be kept in {folder}: {error}"
    return ""


def _path(key: Mapping[str, str], way: str, folder: Path) -> Path:
    name = digest(way, *(f"{name}={text}" for name, text in sorted(key.items())))
    return folder / f"cuda_aware-{name}.json"


# -- the trials ----------------------------------------------------------------------------


def probe_in_children(
    operations: Sequence[str] = OPERATIONS,
    way: str = IN_NODE,
    *,
    environment: Mapping[str, str] | None = None,
    mpiexec: str | None = "",
    limit_s: float = _LIMIT_S,
) -> Generator[ChildProcess, None, dict[str, ProbeResult]]:
    """Try `operations` in child processes; yields each child, to be waited for.

    One child, of two ranks, tries all. What ends it, by a crash, its limit or wrong data, is the
    result for the operation that it was at, and another child tries the rest. But where messages
    crash or anything takes too long, nothing else is tried.

    Args:
        operations: As for :meth:`CudaAwareProbe.steps`.
        way: :data:`IN_NODE`, or :data:`BETWEEN_NODES`.
        environment: Of the job at hand; the process's own if None.
        mpiexec: Starts the two ranks; "" looks for it, None for none.
        limit_s: Limit for each child in seconds.

    Returns:
        The result for each operation.
    """
    from mpi4py import MPI

    vendor, trial = MPI.get_vendor()[0], "two ranks under mpiexec"
    job = clean_environment(os.environ if environment is None else environment)
    launcher = find_mpiexec(job) if mpiexec == "" else mpiexec
    variables: dict[str, str] | None = job
    if way == BETWEEN_NODES:
        variables, trial = network_environment(job, vendor), f"{trial}, by the network alone,"
    if launcher is None or variables is None:
        reason = "there is no mpiexec beside this Python or on PATH to try it with"
        if launcher:
            reason = f"how {vendor} is told to use its network alone is not known"
        reason += f"; set {_SETTING}=yes if you know that this MPI does it"
        return dict.fromkeys(operations, ProbeResult(False, reason, lasting=False))
    left, results = [*operations], dict[str, ProbeResult]()
    while left:
        log, end = yield from _run_child(launcher, left, variables, limit_s)
        reason = log.no_device
        if not log.world_size:
            reason = f"MPI did not start in a child process: {end}"
        elif log.world_size != 2:
            reason = f"under {launcher} MPI did not start two ranks, so nothing was tried: {end}"
        elif way == BETWEEN_NODES and vendor != "Open MPI" and log.sharing > 1:
            # Open MPI does not tell: it calls the ranks of a node so, whatever way they go.
            reason = f"{vendor} did not let its ranks use the network alone"
        if reason:
            return results | dict.fromkeys(left, ProbeResult(False, reason, lasting=False))
        for operation in [operation for operation in left if operation in log.passed]:
            results[operation] = ProbeResult(True, f"{trial} moved {_sizes()} right")
            left.remove(operation)
        if left:
            operation = left.pop(0)
            reason = f"{log.problems.get(operation, end)}; {trial.rstrip(',')}"
            results[operation] = ProbeResult(False, reason, lasting=not end.timed_out)
            if end.timed_out or (operation == "messages" and operation not in log.problems):
                return results | dict.fromkeys(left, results[operation])
    return {operation: results[operation] for operation in operations}


def _sizes() -> str:
    texts = [f"{n} B" if n < 1024 else f"{n >> 10} KiB" for n in TRIAL_BYTES]
    return f"{', '.join(texts[:-1])} and {TRIAL_BYTES[-1] >> 20} MiB"


def _run_child(
    launcher: str, operations: list[str], environment: dict[str, str], limit_s: float
) -> Generator[ChildProcess, None, tuple[_ChildLog, ChildResult]]:
    program = [sys.executable, "-m", "mpimesh.comm.cuda_probe_child", "{folder}", *operations]
    command = [launcher, "-n", "2", *program]
    child = ChildProcess(command, environment=environment, limit_s=limit_s)
    try:
        yield child
        while not child.test():
            yield child
        log = _ChildLog(child.folder)
    finally:
        child.close()
    if child.result is None:
        raise RuntimeError("the child process was closed before its end")
    return log, child.result


class _ChildLog:
    """The lines that the ranks of a child have written.

    Attributes:
        world_size: 2; 1 under a launcher of another MPI; 0 if MPI did not start.
        sharing: How many of them are ranks of one node to MPI.
        no_device: Why there is no device to try it with, where there is none.
        passed: The operations that all ranks ended well.
        problems: What was wrong, by operation.
    """

    def __init__(self, folder: Path) -> None:
        ranks = [list(_events(path)) for path in sorted(folder.glob("rank*"))]
        lines = [line for rank in ranks for line in rank]
        self.world_size: int = max((line.get("size", 0) for line in lines), default=0)
        self.sharing: int = max((line.get("sharing", 0) for line in lines), default=0)
        self.problems: dict[str, str] = {
            line["operation"]: line["problem"] for line in lines if line["event"] == "failed"
        }
        self.no_device = self.problems.pop("device", "")
        each = [{line["operation"] for line in rank if line["event"] == "passed"} for rank in ranks]
        whole = len(ranks) == self.world_size
        self.passed: set[str] = set.intersection(*each) if each and whole else set()


def _events(path: Path) -> Generator[dict[str, Any], None, None]:
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return  # its process died while it wrote


# -- child processes -------------------------------------------------------------------------

_MARK = "CHILD_PROCESS_MARK"
_GRACE_S = 2.0
# MPICH: "Segmentation fault (signal 11)"; Open MPI: "exited on\nsignal 11 (Segmentation fault)".
_SIGNAL = re.compile(r"\(signal (\d+)\)|exited on\s+signal (\d+)")
_SIGNALS = {int(number) for number in signal.Signals}


@dataclass(frozen=True, slots=True)
class ChildResult:
    """The end of a child process.

    Attributes:
        returncode: As :mod:`subprocess` has it: negative if a signal ended it.
        timed_out: True if it was ended at its limit.
        limit_s: The limit.
        output: What it wrote, errors too.
    """

    returncode: int
    timed_out: bool
    limit_s: float
    output: str

    @property
    def signal(self) -> int:
        """The signal that ended it or, under a launcher, one of its ranks; 0 if none did."""
        if self.returncode < 0:
            return -self.returncode
        named = _SIGNAL.search(self.output)
        if named:
            return int(named[1] or named[2])
        return self.returncode - 128 if 128 < self.returncode < 160 else 0

    def __str__(self) -> str:
        """Say it for a person."""
        if self.timed_out:
            return f"the child process did not end within {self.limit_s:g} s"
        if self.signal:
            name = signal.Signals(self.signal).name if self.signal in _SIGNALS else "unknown"
            return f"the child process was killed by signal {self.signal} ({name})"
        last = [line.strip() for line in self.output.splitlines() if line.strip()][-1:]
        return ": ".join([f"the child process ended with exit code {self.returncode}", *last])


class ChildProcess:
    """A program under way that is ended at a time limit.

    It is a :class:`~mpimesh.comm.Request`: whoever waits for it tests it, and between the
    tests everything else goes on. At its limit the program and all that it started are ended, also
    what has a session of its own, as the ranks under some launchers have: all of them carry a mark
    in their environment.

    Args:
        command: The program and its arguments; "{folder}" in one stands for :attr:`folder`.
        environment: All its variables.
        limit_s: Seconds after which it is ended.

    Attributes:
        folder: An empty folder of its own: where it works, and keeps its temporary files.
        result: How it ended; None before.

    Raises:
        OSError: If it cannot be started.
    """

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], limit_s: float
    ) -> None:
        self.result: ChildResult | None = None
        self.folder = Path(tempfile.mkdtemp(prefix="mpimesh-"))
        self._mark = uuid.uuid4().hex
        self._limit_s = limit_s
        variables = {**environment, _MARK: self._mark, "TMPDIR": str(self.folder)}
        words = [word.replace("{folder}", str(self.folder)) for word in command]
        try:
            # To a file: a pipe that nobody reads while it fills would stop the program.
            with (self.folder / "output").open("wb") as output:
                self._process = subprocess.Popen(
                    words,
                    cwd=self.folder,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        now_s = time.monotonic()
        self._term_at_s, self._kill_at_s = now_s + limit_s, now_s + limit_s + _GRACE_S
        self._terminated = False

    def test(self) -> bool:
        """Tell whether it has ended, and end it if its time is over."""
        if self.result is not None:
            return True
        now_s = time.monotonic()
        if self._process.poll() is None and now_s < self._kill_at_s:
            if now_s >= self._term_at_s and not self._terminated:
                # The launcher is asked first: it knows how to clean up after its ranks.
                self._terminated = True
                self._process.terminate()
            return False
        self._kill_all()
        output = (self.folder / "output").read_text(errors="replace")
        self.result = ChildResult(self._process.returncode, self._terminated, self._limit_s, output)
        return True

    def close(self) -> None:
        """End it if it still runs, and remove its folder. A second call does nothing."""
        self._kill_all()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _kill_all(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        for pid in processes_with(f"{_MARK}={self._mark}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

"""The page that a person reads, and the object that a program reads."""

from __future__ import annotations

import io
import json
import re
from typing import Any

from rich.console import Console

from mpimesh.arguments import size_text
from mpimesh.cli.console import rate_text, seconds_text
from mpimesh.cli.doctor import find_findings, show
from mpimesh.cli.facts import Capability, Cuda, Finding, Measurement, Mpi
from mpimesh.comm.algorithms import Algorithms, Row
from tests.helpers.cli_diagnoses import diagnosis, rank

GPU = {"gpu": "0: H200", "gpu_id": "GPU-a"}
RICH = diagnosis(
    rank(0, cores=(0, 1), **GPU),
    rank(1, cores=(0, 1), **GPU),
    rank(2, cores=(0, 1), gpu="1: H200", gpu_id="GPU-b"),
    rank(3, node="n1"),
    cuda=Cuda(installed=True, cupy="14.0", runtime="13.0", driver="13.1", nccl="2.27.3", gpus=2),
    capabilities=(
        Capability("mpi", "*", "host", True, "a world of 4 ranks"),
        Capability("mpi_cuda", "messages", "device", False, "signal 11"),
        Capability("mpi_cuda", "broadcast", "device", False, "signal 11"),
        Capability("mpi_cuda", "gather", "device", True, "moved right"),
    ),
    measurements=(
        Measurement("within a node", "MPI messages", (0, 1), 1.5e-6, 12.34e9),
        Measurement("within a node", "shared memory, in place", (0, 1), problem="no memory"),
    ),
    algorithms=tuple(
        Algorithms(
            [
                Row("*", "host", 0, "mpi", "small"),
                Row("all_reduce", "host", 32768, "two_levels", "measured"),
            ]
        )
    ),
)


def page(facts, findings=None, **options) -> str:
    out = io.StringIO()
    console = Console(file=out, **{"width": 100, "highlight": False, **options})
    show(facts, find_findings(facts) if findings is None else findings, console)
    return out.getvalue()


def lines_with(text: str, word: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if word in line]


def test_a_page_in_a_file_is_plain_and_fits():
    text = page(RICH)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 100
    assert not [line for line in text.splitlines() if line != line.rstrip()]
    assert len(text.splitlines()) < 70


def test_the_first_line_says_how_it_is():
    assert page(diagnosis()).startswith(
        "mpimesh doctor: all is well; 4 ranks on 1 node, started by mpiexec (MPICH)\n"
    )
    found = [Finding("error", "a"), Finding("warning", "b"), Finding("warning", "c")]
    assert "1 error, 2 warnings; 4 ranks" in page(diagnosis(), found).splitlines()[0]


def test_who_shares_what_is_marked():
    rows = page(RICH).splitlines()
    (first,) = [row for row in rows if row.split()[:2] == ["0", "n0"]]
    assert "0-1 (with 2 more)" in first
    assert "0: H200 (with 1 more)" in first
    (third,) = [row for row in rows if row.split()[:2] == ["2", "n0"]]
    assert third.rstrip().endswith("1: H200")


def test_operations_of_one_answer_share_a_line():
    text = page(RICH, [])
    assert lines_with(text, "signal 11") == [
        ["mpi_cuda", "messages,", "broadcast", "device", "no", "signal", "11"]
    ]
    assert lines_with(text, "moved right") == [
        ["mpi_cuda", "gather", "device", "yes", "moved", "right"]
    ]


def test_speeds_and_algorithms_have_their_lines():
    text = page(RICH)
    assert "MPI messages" in text
    assert "1.5 us   12.3 GB/s" in text
    assert "no memory" in text
    assert lines_with(text, "measured") == [
        ["all_reduce", "from", "32", "KiB", "host", "two_levels", "measured"]
    ]


def test_each_line_of_algorithms_has_its_own():
    """Also in a narrow window, and where several operations go one way for one reason."""
    rows = [Row("*", "host", 0, "mpi", "MPI's own collective")]
    why = "faster, as measured on this machine before"
    for name in ("all_reduce", "broadcast", "all_gather"):
        rows += [Row(name, "host", 1 << 14, "node", why)]
    facts = diagnosis(algorithms=tuple(Algorithms(rows)))
    text = page(facts, width=80).split("moves them\n")[1].split("\n\n")[0]
    lines = [line for line in text.splitlines()[1:] if line[:3].strip()]
    assert len(lines) == len(facts.algorithms)
    for line, row in zip(lines, facts.algorithms, strict=True):
        assert line.split("  ")[1:2] == [row.subject]
        assert row.algorithm in line
    assert re.search(r"^  everything else, smaller arrays included +mpi ", text, re.M)


def test_a_finding_stands_above_its_cure():
    text = page(diagnosis(), [Finding("error", "it is broken", "mend it")])
    assert text.endswith("  error  it is broken\n         -> mend it\n")
    assert page(diagnosis()).endswith("What is wrong\n  nothing\n")


def test_a_machine_without_mpi_has_a_page():
    facts = diagnosis(rank(0), mpi=Mpi(problem="no MPI library could be loaded"))
    assert "no MPI library could be loaded" in page(facts)


def test_the_ucx_that_mpi_got_has_its_own_line():
    def ucx(**fields: Any) -> list[list[str]]:
        return lines_with(page(diagnosis(mpi=Mpi(vendor="MPICH", **fields))), "UCX")

    assert ucx() == []
    (row,) = ucx(ucx="1.20.1", ucx_path="/lib/libucp.so.0")
    assert " ".join(row) == "UCX 1.20.1, no CUDA transports, /lib/libucp.so.0"
    (row,) = ucx(ucx="1.22.0", ucx_path="/lib/libucp.so.0", ucx_cuda="loaded")
    assert " ".join(row) == "UCX 1.22.0, CUDA transports loaded, /lib/libucp.so.0"


def test_many_ranks_are_cut_off():
    text = page(diagnosis(*(rank(r) for r in range(40))))
    assert "24 more: see --json" in text


def test_a_terminal_gets_colours():
    assert "\x1b[" in page(RICH, force_terminal=True)


def test_everything_is_in_the_json():
    fields = json.loads(json.dumps(RICH.to_fields(find_findings(RICH))))
    assert fields["healthy"] is True
    assert fields["nodes"] == [{"name": "n0", "ranks": [0, 1, 2]}, {"name": "n1", "ranks": [3]}]
    assert fields["ranks"][2]["gpu_id"] == "GPU-b"
    assert fields["capabilities"][3] == {
        "transport": "mpi_cuda",
        "operation": "gather",
        "memory": "device",
        "usable": True,
        "proof": "moved right",
    }
    assert {one["severity"] for one in fields["findings"]} == {"warning", "note"}
    assert RICH.to_fields([Finding("error", "x")])["healthy"] is False


def test_numbers_are_short():
    assert [size_text(n) for n in (0, 1023, 1024, 1.5 * 2**30, 1000 * 2**20)] == [
        *("0 B", "1023 B", "1 KiB", "1.5 GiB", "1000 MiB"),
    ]
    assert [rate_text(x) for x in (0, 1e9, 123.4e9)] == ["", "1 GB/s", "123 GB/s"]
    assert [seconds_text(x) for x in (0, 1.25e-6, 0.5)] == ["", "1.25 us", "500 ms"]

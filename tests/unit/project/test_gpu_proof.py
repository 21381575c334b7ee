"""`make test-gpu` without a GPU: what it says of programs that end in this way or that."""

from __future__ import annotations

import sys

import pytest

from tests.gpu.prove import PARTS, Proof, prove


def told(proof):
    return (proof.folder / "report.txt").read_text()


def test_what_ends_badly_is_not_right_and_the_rest_goes_on(tmp_path):
    proof = Proof(tmp_path)
    python = [sys.executable, "-c"]
    proof.run("good", [*python, "print('3 passed'); print('of no matter')"], limit_s=20)
    proof.run("bad", [*python, "raise SystemExit(3)"], limit_s=20)
    proof.run("long", ["sh", "-c", "echo here; exec sleep 60"], limit_s=2)
    proof.run("absent", ["/nowhere/program"], limit_s=20)
    assert proof.failed == ["bad", "long", "absent"]
    report = told(proof)
    assert "== good: exit 0, " in report
    assert "3 passed" in report
    assert "of no matter" not in report
    assert "== bad: exit 3, " in report
    assert "ended after 2 s" in report
    assert "\nhere\n" in report
    assert (tmp_path / "good.log").read_text() == "3 passed\nof no matter\n"


def test_where_no_test_ran_nothing_is_proven(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Proof, "run", lambda self, name, *_, **options: "38 skipped in 0.9s")
    assert prove(["tests"], tmp_path) == 1
    assert "NOT RIGHT: tests-1: nothing ran" in (tmp_path / "report.txt").read_text()
    monkeypatch.setattr(
        Proof, "run", lambda self, name, *_, **options: "30 passed, 8 skipped in 9s"
    )
    assert prove(["tests"], tmp_path) == 0
    assert "all of it was right" in capsys.readouterr().out


@pytest.mark.parametrize("part", [*PARTS, "ucx"])
def test_every_part_runs_something(part, tmp_path, monkeypatch):
    names: list[str] = []

    def run(self, name, *_, **options):
        names.append(name)
        return "1 passed"

    monkeypatch.setattr(Proof, "run", run)
    assert prove([part], tmp_path) == 0
    assert names

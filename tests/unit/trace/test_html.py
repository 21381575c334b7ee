"""What notebooks show: well-formed, escaped, and right about who has what."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.schedule import make_schedule, simulate


def parsed(thing) -> ElementTree.Element:
    text = re.sub("<svg xmlns=[^ ]*", "<svg", thing._repr_html_())
    return ElementTree.fromstring(f"<div>{text}</div>")


@pytest.mark.parametrize("dims", ["dp=2,tp=3", "x=2,y=2,z=2", "dp=4", {}])
def test_a_mesh_is_a_grid_of_its_ranks(dims):
    mesh = mm.Mesh(dims, name="<b> & c")
    shown = parsed(mesh)
    assert [cell.text for cell in shown.iter("td")] == ([*map(str, mesh.ids)] if dims else [])
    assert shown[0].text == repr(mesh)


@pytest.mark.parametrize(
    ("layout", "labels"),
    [
        ("dp=S0, tp=S1", ["rank 0", "rank 1", "rank 2", "rank 3", "rank 4", "rank 5"]),
        ("tp=S0", ["ranks 0,3", "ranks 1,4", "ranks 2,5"]),
        ("dp=P", ["ranks 0-5"]),
        ("dp=S1(1,3)", ["ranks 0-2", "ranks 3-5"]),
    ],
)
def test_a_layout_shows_who_has_which_block(layout, labels):
    shown = parsed(mm.Layout(mm.Mesh("dp=2,tp=3"), layout))
    assert [text.text for text in shown.iter("text")] == labels
    areas = [float(r.get("width", "")) * float(r.get("height", "")) for r in shown.iter("rect")]
    assert len(areas) == len(labels)
    shares = [1 / 4, 3 / 4] if "(" in layout else [1 / len(labels)] * len(labels)
    assert np.allclose(np.array(areas) / sum(areas), shares, atol=0.01)


def test_more_axes_many_blocks_and_no_elements_are_text():
    wide = mm.Layout(mm.Mesh("dp=100"), "dp=S0")
    assert "..." in "".join(parsed(wide).itertext())
    assert "[0:1, 0:1, 0:1] rank 0" in "".join(parsed(mm.Layout(mm.Mesh("a=2"), "a=S2")).itertext())

    def main():
        with mm.DeviceMesh("dp=2") as mesh:
            assert [cell.text for cell in parsed(mesh).iter("td")] == ["0", "1"]
            x = mm.zeros((0, 3), mesh, "dp=S0")
            assert "shape (0, 3), float64" in "".join(parsed(x).itertext())
            assert not list(parsed(x).iter("svg"))
            x = mm.zeros((4, 3), mesh, "dp=S0")
            assert len(list(parsed(x).iter("rect"))) == 2
            assert str(x.plan("R")) in "".join(parsed(x.plan("R")).itertext())

    mm.run_virtual(2, main)


def test_schedules_and_timetables():
    schedule = make_schedule("1f1b", 2, 3)
    assert "1B2" in "".join(parsed(schedule).itertext())
    assert "1f1b" in simulate(schedule, forward_s=1, backward_s=2)._repr_html_()  # type: ignore[attr-defined]


def test_a_mesh_of_a_million_ranks_is_shown_at_once():
    layout = mm.Layout(mm.Mesh("a=1000,b=1000"), "S0, R")
    assert "".join(parsed(layout).itertext()) == str(layout)
    assert len("".join(parsed(layout.mesh).itertext())) < 100

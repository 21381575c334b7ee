"""Layouts of arrays on meshes, and ways from one layout to another: values and arithmetic."""

from __future__ import annotations

from mpimesh.layout.axis_layout import AxisLayout
from mpimesh.layout.axis_specs import MATCH, UNSHARDED
from mpimesh.layout.boxes import Box
from mpimesh.layout.collectives import Collective
from mpimesh.layout.dtensor_type import DTensorType
from mpimesh.layout.halo import HaloPlan, plan_halo
from mpimesh.layout.layout import BoxLayout, Layout, layout_of_runs
from mpimesh.layout.links import ASSUMED_LINKS, Link, Links
from mpimesh.layout.phase import Phase
from mpimesh.layout.placement import Placement, PlacementLike
from mpimesh.layout.plan import RedistributionPlan, Stage, plan_redistribution
from mpimesh.layout.regions import Give, Part, Regions, Take
from mpimesh.layout.rule import Operand, OpRule, cheapest
from mpimesh.layout.spec import PARTIAL_OPS, Partial, PlacementSpec, Replicate, Shard
from mpimesh.layout.tiling import Tiling
from mpimesh.layout.two_levels import Exchange

__all__ = [
    "ASSUMED_LINKS",
    "MATCH",
    "PARTIAL_OPS",
    "UNSHARDED",
    "AxisLayout",
    "Box",
    "BoxLayout",
    "Collective",
    "DTensorType",
    "Exchange",
    "Give",
    "HaloPlan",
    "Layout",
    "Link",
    "Links",
    "OpRule",
    "Operand",
    "Part",
    "Partial",
    "Phase",
    "Placement",
    "PlacementLike",
    "PlacementSpec",
    "RedistributionPlan",
    "Regions",
    "Replicate",
    "Shard",
    "Stage",
    "Take",
    "Tiling",
    "cheapest",
    "layout_of_runs",
    "plan_halo",
    "plan_redistribution",
]

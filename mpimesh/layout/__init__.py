"""Layouts of arrays on meshes, and ways from one layout to another: values and arithmetic."""

from __future__ import annotations

from mpimesh.layout.boxes import Box, Give, Part, Regions, Take
from mpimesh.layout.layout import BoxLayout, Layout, layout_of_runs
from mpimesh.layout.op_rules import Operand, OpRule, cheapest
from mpimesh.layout.phase import Phase
from mpimesh.layout.placement import (
    PARTIAL_OPS,
    Partial,
    Placement,
    PlacementLike,
    PlacementSpec,
    Replicate,
    Shard,
)
from mpimesh.layout.reads import HaloPlan, plan_halo
from mpimesh.layout.redistribution import RedistributionPlan, Stage, plan_redistribution
from mpimesh.layout.strategies import DEFAULT_LINK_COSTS, LinkCost, LinkCosts, MeshCollective
from mpimesh.layout.tiling import Tiling
from mpimesh.layout.two_levels import Exchange

__all__ = [
    "DEFAULT_LINK_COSTS",
    "PARTIAL_OPS",
    "Box",
    "BoxLayout",
    "Exchange",
    "Give",
    "HaloPlan",
    "Layout",
    "LinkCost",
    "LinkCosts",
    "MeshCollective",
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

"""A redistribution plan as a person reads it."""

from __future__ import annotations

from mpimesh.layout.links import Link, Links
from mpimesh.layout.plan import RedistributionPlan
from mpimesh.layout.two_levels import Fetching, Sharing
from mpimesh.layout.ways import Exchange

__all__ = ["plan_text"]


def plan_text(plan: RedistributionPlan) -> str:
    """Return a few lines: from where to where, what moves, what it costs."""
    shape = " x ".join(map(str, plan.shape)) or "a scalar"
    nbytes, messages = plan.traffic()
    lines = [
        f"{shape}, {plan.itemsize} bytes each: {plan.source} -> {plan.target}",
        *(
            f"  {number}. {_phase_line(phase, plan.itemsize)}"
            for number, phase in enumerate(plan.phases, 1)
        ),
    ]
    if nbytes.any():
        most = int(nbytes.argmax())
        rank = plan.target.mesh.rank_of(most)
        lines.append(
            f"  all ranks receive {_size(int(nbytes.sum()))} in {int(messages.sum())} messages; "
            f"rank {rank} the most: {_size(int(nbytes[most]))} in {int(messages[most])}"
        )
        lines.append(
            f"  peak memory of rank {rank}: {_size(plan.peak_bytes(rank))}; "
            f"about {_seconds(plan.predicted_s())} at {_speeds(plan.links)}"
        )
        lines += _over_nodes(plan)
    else:
        lines.append("  nothing moves between ranks")
    return "\n".join(lines)


def _phase_line(phase: Exchange, itemsize: int) -> str:
    elements, messages = phase.received()
    if not elements.any():
        return "each rank keeps or cuts what it has"
    what = f"{_size(int(elements.sum()) * itemsize)} in {int(messages.sum())} messages"
    if phase.nodes and (far := int(phase.crossing()[0].sum())):
        what += f", {_size(far * itemsize)} of it between nodes"
    if phase.op:
        dims = ", ".join(phase.source.mesh.dim_names[dim] for dim in phase.partial)
        return f"reduce ({phase.op}) over {dims} on the way: {what}"
    if isinstance(phase, Fetching):
        return f"each rank takes what is near, and a part of what its node lacks: {what}"
    if isinstance(phase, Sharing):
        return f"ranks of a node read these parts of each other: {what}"
    return f"each rank takes what it lacks: {what}"


def _over_nodes(plan: RedistributionPlan) -> list[str]:
    """Say which way was taken over nodes, if there was a choice."""
    if len(plan.ways) < 2:
        return []
    (name, name_s), (other, other_s), *_ = plan.ways
    why = ", whose own way is measured" if other_s < name_s else ""
    return [f"  done {name}{why}; {other} it would take about {_seconds(other_s)}"]


def _speeds(links: Links) -> str:
    how = "as measured" if links.measured else "as assumed"
    if links.near == links.far:
        return f"{_speed(links.near)}, {how}"
    return f"{_speed(links.near)} in a node, {_speed(links.far)} between nodes, {how}"


def _speed(link: Link) -> str:
    return f"{link.latency_s * 1e6:.3g} us a message and {link.bytes_per_s / 1e9:.3g} GB/s"


def _size(nbytes: int) -> str:
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _seconds(value: float) -> str:
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if value * factor >= 1:
            return f"{value * factor:.1f} {unit}"
    return f"{value * 1e6:.1f} us"

"""Numbers as a person reads them."""

from __future__ import annotations

__all__ = ["bytes_text", "rate_text", "seconds_text"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_text(nbytes: float) -> str:
    """Write ``1.5 GiB``; three digits are enough."""
    value, unit = float(nbytes), 0
    while value >= 1023.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.3g} {_UNITS[unit]}" if value < 999.5 else f"{value:.0f} {_UNITS[unit]}"


def rate_text(bytes_per_s: float) -> str:
    """Write ``12.3 GB/s``, as network and memory vendors do; "" for 0."""
    return f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s else ""


def seconds_text(seconds: float) -> str:
    """Write ``1.2 us``; "" for 0."""
    if not seconds:
        return ""
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"

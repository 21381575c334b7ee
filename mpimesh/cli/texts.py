"""Numbers as a person reads them."""

from __future__ import annotations

__all__ = ["rate_text", "seconds_text"]


def rate_text(bytes_per_s: float) -> str:
    """Write ``12.3 GB/s``, as network and memory vendors do; "" for 0."""
    return f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s else ""


def seconds_text(seconds: float) -> str:
    """Write ``1.2 us``; "" for 0."""
    if not seconds:
        return ""
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"

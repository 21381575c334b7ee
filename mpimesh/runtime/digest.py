"""Short digests of texts and data: equal on two ranks only if what they digest is."""

from __future__ import annotations

__all__ = ["digest_bits", "digest_text"]

_BYTES = 8


def digest_bits(data: bytes | memoryview, bits: int) -> int:
    """Return a digest of `data` as a number of at most 64 bits."""
    return int.from_bytes(_digest(data), "little") >> (8 * _BYTES - bits)


def digest_text(data: bytes | memoryview) -> str:
    """Return a digest of `data` as sixteen hexadecimal digits."""
    return _digest(data).hex()


def _digest(data: bytes | memoryview) -> bytes:
    from hashlib import blake2b  # late: it loads OpenSSL, which importing mpimesh need not

    return blake2b(data, digest_size=_BYTES).digest()

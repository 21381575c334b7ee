"""Comparison of what the ranks of a node start: name, reduction, root, dtype, shape.

A call has a *signature*, which is equal on two ranks if they start the same. The ranks of a node
compare the digests of their signatures in a window of :mod:`mpimesh.core`: a collective that goes
by the window posts its own with its contribution; what goes by other ways posts one that moves
nothing (:meth:`Window.post`) before the transport hears of it. Each rank also posts a total of all
digests so far, so what differs once differs from there on. Nobody waits for another rank's digest
where the operation does not: who starts one, waits, or takes a result looks at what is there.

Who finds a difference starts nothing more there, and says so to the others; MPI would end the job
where bytes come that are no whole number of elements, and would match what comes after a mismatch
with what went before. So that it can be told in words, each rank leaves the texts of its last 64
signatures beside its digests. Two signatures have one digest by chance once in 2**32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from mpimesh.arguments import digest_bits, rank_names
from mpimesh.core.node import Operation, Window
from mpimesh.errors import MismatchError, MpimeshError

if TYPE_CHECKING:
    from mpimesh.comm.base import Communicator

__all__ = ["Signature", "digest_of", "explained", "last_started", "mismatch", "signature_text"]

Signature: TypeAlias = tuple[str, object, object, object]
"""Operation; what must agree beside shape and dtype, as reduction, root, axis; what must agree of
the shape; dtype."""

_TEXT_BYTES = 255
_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
_UNKNOWN = "what is not known any more"


def digest_of(window: Window, signature: Signature, text: str = "") -> int:
    """Return the digest of a signature, which the other ranks can look up from now on.

    Args:
        window: The ranks that compare it.
        signature: The signature.
        text: What messages show for it; by default the signature in words. For what is one
            signature in several calls, which compare themselves by other means.
    """
    digests, texts = window.digests, window.texts
    digest = digests.get(signature, 0)
    if digest and (not text or texts[digest] == text):
        return digest
    if not digest:
        words = signature_text(signature)
        text = text or words
        digest = digest_bits(words.encode(errors="backslashreplace"), 32) or 1
        digests[signature] = digest
    texts[digest] = text
    window.tell(digest, _shortened(text))
    return digest


def mismatch(window: Window, ranks: Sequence[int], group: str) -> MismatchError:
    """Return the error that names what each rank has started where they first differ.

    Args:
        window: The ranks, which are known to differ.
        ranks: Their numbers in the group.
        group: Names it in the message.
    """
    number, digests = window.difference or (0, ())
    started: dict[str, list[int]] = {}
    for place, digest in enumerate(digests):
        if digest:
            started.setdefault(_text(window, place, digest), []).append(ranks[place])
    rows = "; ".join(f"{rank_names(who)}: {text}" for text, who in started.items())
    return MismatchError(
        f"the ranks of group {group!r} started different collectives, or with different arrays, as "
        f"its operation {number or '(not known)'}: {rows or _UNKNOWN}; "
        "the group starts nothing more"
    )


def explained(
    communicator: Communicator, group: str, error: Exception, operation: Operation | None
) -> Exception:
    """Return the mismatch that is behind an error of the ranks of a group, if one is known.

    Args:
        communicator: The ranks.
        group: Names them in the message.
        error: The error.
        operation: What has failed, as they compare it; None if it was not started.
    """
    node = communicator.node
    if node is None or not ((operation is not None and operation.differs()) or node.difference):
        return error
    found = mismatch(node, communicator.node_ranks, group)
    found.agreed = isinstance(error, MpimeshError) and error.agreed
    return found


def last_started(window: Window) -> list[tuple[int, str]]:
    """Return the number and text of each rank's last call; 0 for none. Never waits."""
    calls = [window.last_call(place) for place in range(window.size)]
    return [
        (number, _text(window, place, digest) if number else "")
        for place, (number, digest) in enumerate(calls)
    ]


def _text(window: Window, place: int, digest: int) -> str:
    own: str | None = window.texts.get(digest) if place == window.rank else None
    if own is not None:
        return own
    told = window.told(place, digest)
    return _UNKNOWN if told is None else told.decode(errors="replace")


def signature_text(signature: Signature) -> str:
    """Return a signature in words, which are equal on two ranks only if they start the same."""
    name, rule, compared, dtype = signature
    shape = f"shape {compared}" if isinstance(compared, tuple) else ""
    dims = f"{compared}-d" if isinstance(compared, int) else ""
    if name in _REDUCTIONS and isinstance(dtype, np.dtype):
        dtype = dtype.newbyteorder("=")  # they convert it; the others move bytes
    parts = (shape, dims, str(dtype), str(rule))
    return f"{name}({', '.join(part for part in parts if part)})"


def _shortened(text: str) -> bytes:
    encoded = text.encode(errors="backslashreplace")
    return encoded if len(encoded) <= _TEXT_BYTES else encoded[: _TEXT_BYTES - 4] + b" ..."

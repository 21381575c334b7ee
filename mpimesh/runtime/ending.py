"""The end of meshes and groups: together, and only when nothing is left that was started."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mpimesh.comm import Communicator
from mpimesh.errors import MismatchError, UnresolvedError, on_all_ranks
from mpimesh.runtime.agreement import agree
from mpimesh.runtime.call import Call
from mpimesh.runtime.context import MeshContext
from mpimesh.runtime.deadlock import Mail
from mpimesh.runtime.group import ProcessGroup

__all__ = ["counts", "part_together", "refuse_unreceived", "refuse_unresolved"]


def part_together(
    group: ProcessGroup, communicator: Communicator, context: MeshContext, *, last: bool
) -> bool:
    """Collective: return when all ranks of a group may drop it.

    Args:
        group: The group.
        communicator: Its communicator.
        context: That of its mesh.
        last: Whether no other group has the communicator, alike on all its ranks.

    Returns:
        Whether something may yet be under way, alike on all ranks.

    Raises:
        UnresolvedError: On every rank, if any has operations of the group that are not resolved.
        MismatchError: On every rank, if they close different groups; with checks on, if `last` and
            a message was sent that nobody has received.
    """
    call = Call("close", group.name)
    mine = [str(work._call) for work in context.open_work.all() if work._group is group._core]
    told = agree(group, call, [mine, context.unended, communicator.unread])
    refused = f"group {group.name!r} cannot be closed"
    refuse_unresolved(refused, [texts for texts, *_ in told], group.ranks)
    if not last:
        return False
    if communicator.mail is not None:
        mails = [(tuple(group.ranks), communicator.name, communicator.mail)]
        rows_of_all = agree(group, call, counts(mails, context.rank))
        refuse_unreceived(refused, rows_of_all)
    # Of what nobody receives any more the mesh need not know: the communicator is kept for it.
    context.unread -= communicator.unread
    return any(unended for *_, unended, _ in told) or sum(unread for *_, unread in told) != 0


def refuse_unresolved(
    refused: str, everyone: Sequence[Sequence[str]], ranks: Sequence[int] | None = None
) -> None:
    """Raise if any rank has operations that are not resolved.

    Args:
        refused: What cannot be done, as a sentence.
        everyone: The operations of each rank.
        ranks: The ranks; counted from 0 if None.

    Raises:
        UnresolvedError: On every rank.
    """
    if not any(everyone):
        return
    rows = "\n".join(
        f"  rank {rank}: {text}"
        for rank, texts in zip(ranks or range(len(everyone)), everyone, strict=True)
        for text in texts[:8]
    )
    raise on_all_ranks(
        UnresolvedError(
            f"{refused}: these operations were started and never resolved; "
            f"keep what they return and call resolve() on it before:\n{rows}"
        )
    )


def counts(mails: Iterable[tuple[tuple[int, ...], str, Mail]], rank: int) -> list[Any]:
    """Return what this rank has sent and received, for :func:`refuse_unreceived`. Local.

    Args:
        mails: Ranks, name and messages of each communicator.
        rank: This rank.
    """
    sent, received = [], []
    for ranks, name, mail in mails:
        for (peer, tag), count in mail.sent.items():
            text = str(mail.calls[peer, tag])
            sent.append([[name, rank, ranks[peer], tag], count, text])
        received += [
            [[name, ranks[peer], rank, tag], count] for (peer, tag), count in mail.received.items()
        ]
    return [sent, received]


def refuse_unreceived(refused: str, everyone: Sequence[Sequence[Any]]) -> None:
    """Raise if a message was sent that nobody has received.

    Args:
        refused: What cannot be done, as a sentence.
        everyone: What :func:`counts` gives on each rank.

    Raises:
        MismatchError: On every rank.
    """
    taken = {tuple(key): count for _, received in everyone for key, count in received}
    rows = "\n".join(
        f"  {count - taken.get(tuple(key), 0)} of {count} from rank {key[1]} to rank {key[2]}, "
        f"the last by {text}"
        for sends, _ in everyone
        for key, count, text in sends
        if taken.get(tuple(key), 0) < count
    )
    if rows:
        raise on_all_ranks(
            MismatchError(
                f"{refused}: these messages were sent, and nobody has called "
                f"recv() for them, with the same tag on the same group:\n{rows}"
            )
        )

"""In which order a rank's messages go: one order over all ranks, so that nobody waits in a circle.

Messages are ordered by *turn*, in which source i sends to target (i + turn) of all, then by their place in the
stream. At any time each sender has one receiver, and each receiver one sender. Every rank starts its own messages
in this order, a few at a time; the first of all that has not arrived is always under way at both ends.
"""

from __future__ import annotations

from typing import NamedTuple

from vescale_fsdp.checkpoint.transfer.planning.rank_transfers import RankTransfers
from vescale_fsdp.checkpoint.transfer.planning.shares import Share
from vescale_fsdp.checkpoint.transfer.planning.transfer_plan import TransferPlan


class Message(NamedTuple):
    """Bytes that go from one rank to another in one piece.

    Attributes:
        peer: the other rank.
        is_sent: whether this rank is the sender.
        number: how many go before it from the one to the other.
        shares: what they are.
        nbytes: of all of them.
        lies_whole: whether the bytes lie in this rank's state as they travel.
    """

    peer: int
    is_sent: bool
    number: int
    shares: tuple[Share, ...]
    nbytes: int
    lies_whole: bool


def messages_of(transfers: RankTransfers) -> list[Message]:
    """A rank's messages in the order in which it starts them."""
    plan = transfers.plan
    sources = {rank: place for place, rank in enumerate(plan.source.all_ranks)}
    targets = {rank: place for place, rank in enumerate(plan.target.all_ranks)}
    turns = max(len(sources), len(targets))
    found: list[tuple[tuple[int, int, int], Message]] = []
    for is_sent, streams in ((True, transfers.sends), (False, transfers.receives)):
        for peer, stream in streams.items():
            sender, taker = (transfers.rank, peer) if is_sent else (peer, transfers.rank)
            turn = (targets[taker] - sources[sender]) % turns
            for number, shares in enumerate(stream.messages(plan.message_bytes)):
                nbytes = sum(share.nbytes for share in shares)
                message = Message(peer, is_sent, number, shares, nbytes, _lies_whole(plan, shares, is_sent))
                found.append(((turn, number, sources[sender]), message))
    found.sort(key=lambda item: item[0])
    return [message for _, message in found]


def _lies_whole(plan: TransferPlan, shares: tuple[Share, ...], is_sent: bool) -> bool:
    """Whether shares follow each other in one tensor as they do on the wire, under the dtype they have there."""
    placed = plan.leaves[shares[0].leaf]
    if placed.narrowed or placed.source.codec is not None if is_sent else placed.widened:
        return False
    stop: int | None = None
    for share in shares:
        start = share.source if is_sent else share.target
        is_run = share.is_source_run if is_sent else share.is_target_run
        if not is_run or share.leaf != shares[0].leaf or start != (start if stop is None else stop):
            return False
        stop = start + share.numel
    return True

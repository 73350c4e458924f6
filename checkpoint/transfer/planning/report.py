"""What a plan moves: totals of all ranks, who sends what to whom, and a picture of both. No rank needs to exist.

The picture draws one square per pair of ranks, the darker the more bytes, senders as rows and receivers as columns,
and beside each row and under each column a bar with the rank's total. Of many ranks the first are drawn, and it says
so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vescale_fsdp.checkpoint.transfer.planning.transfer_plan import TransferPlan
from vescale_fsdp.layout.pictures import PAPER, Canvas

_MAX_RANKS = 32  # drawn on either side
_CELL_PX, _LEFT_PX, _TOP_PX, _BAR_PX = 22, 90, 140, 200
_FILL, _QUIET, _RULE = "#2e6fdb", "#667085", "#d0d5dd"


@dataclass(frozen=True)
class TransferReport:
    """Totals of a plan.

    Args:
        sent, received, kept: bytes by rank; a rank keeps what it holds of both sides.
        pairs: bytes from the first ranks that send to the first that receive, by (sender, receiver).
        unused: tensors of the source that nothing takes.
        message_bytes: the most that a message carries.

    Examples:
        >>> import torch
        >>> from vescale_fsdp import describe_states, plan_transfer
        >>> report = transfer_report(plan_transfer(*describe_states({"w": torch.ones(4)}, {"w": torch.zeros(4)})))
        >>> report.total_bytes, dict(report.kept)
        (0, {0: 16})
    """

    sent: Mapping[int, int]
    received: Mapping[int, int]
    kept: Mapping[int, int]
    pairs: Mapping[tuple[int, int], int]
    unused: tuple[str, ...]
    message_bytes: int

    @property
    def total_bytes(self) -> int:
        """All that travels."""
        return sum(self.sent.values())

    @property
    def imbalance(self) -> float:
        """What the busiest sender sends, over what all would send if they shared evenly; 1.0 where nothing travels."""
        return (
            max(self.sent.values(), default=0) * len(self.sent) / self.total_bytes
            if self.total_bytes
            else 1.0
        )

    def __str__(self) -> str:
        takers = sum(nbytes > 0 for nbytes in self.received.values())
        moved = f"{_size(self.total_bytes)} from {len(self.sent)} ranks to {takers}"
        sender, taker = (_size(max(by_rank.values(), default=0)) for by_rank in (self.sent, self.received))
        lines = [
            f"{moved}, {_size(sum(self.kept.values()))} stay where they are",
            f"busiest sender {sender} (x {self.imbalance:.2f} of an even share), busiest receiver {taker}",
            f"messages of at most {_size(self.message_bytes)}",
        ]
        if self.unused:
            shown = ", ".join(self.unused[:4]) + (" .." if len(self.unused) > 4 else "")
            lines.append(f"not asked for: {len(self.unused)} tensors of the source ({shown})")
        return "\n".join(lines)

    def to_svg(self, title: str = "transfer") -> str:
        """The picture as an SVG document."""
        senders, takers = list(self.sent)[:_MAX_RANKS], list(self.received)[:_MAX_RANKS]
        right, bottom = _LEFT_PX + len(takers) * _CELL_PX, _TOP_PX + len(senders) * _CELL_PX
        canvas = Canvas(title, max(right + _BAR_PX + 120, 620), bottom + _BAR_PX + 60)
        canvas.text(20, 32, title, size=18, bold=True)
        for number, line in enumerate(str(self).splitlines()):
            canvas.text(20, 52 + 16 * number, line, size=12, color=_QUIET)
        most = max(self.pairs.values(), default=0)
        for row, sender in enumerate(senders):
            y = _TOP_PX + row * _CELL_PX
            canvas.text(_LEFT_PX - 8, y + 15, f"rank {sender}", anchor="end")
            for column, taker in enumerate(takers):
                nbytes = self.pairs.get((sender, taker), 0)
                tip = f"rank {sender} to rank {taker}: {_size(nbytes)}"
                x = _LEFT_PX + column * _CELL_PX
                canvas.rect(x, y, _CELL_PX - 2, _CELL_PX - 2, _shade(nbytes, most), stroke=_RULE, tip=tip)
            self._bar(canvas, (right + 10, y), self.sent[sender], max(self.sent.values()), across=True)
        for column, taker in enumerate(takers):
            x = _LEFT_PX + column * _CELL_PX
            canvas.text(x + 10, _TOP_PX - 6, str(taker), anchor="middle")
            self._bar(
                canvas, (x, bottom + 10), self.received[taker], max(self.received.values()), across=False
            )
        left_out = len(self.sent) - len(senders), len(self.received) - len(takers)
        if any(left_out):
            canvas.text(
                20, bottom + _BAR_PX + 40, f"not drawn: {left_out[0]} senders, {left_out[1]} receivers"
            )
        return canvas.svg()

    def _bar(self, canvas: Canvas, at: tuple[float, float], nbytes: int, most: int, *, across: bool) -> None:
        """A bar as long as its share of the largest."""
        length = (_BAR_PX - 40) * nbytes / max(most, 1)
        width, height = (length, _CELL_PX - 2) if across else (_CELL_PX - 2, length)
        canvas.rect(*at, width, height, _FILL, tip=_size(nbytes))
        if across:
            canvas.text(at[0] + length + 6, at[1] + 15, _size(nbytes), size=10, color=_QUIET)


def transfer_report(plan: TransferPlan) -> TransferReport:
    """Totals of all ranks of a plan, and its first pairs.

    Examples:
        >>> import torch
        >>> from vescale_fsdp import describe_states, plan_transfer
        >>> plan = plan_transfer(*describe_states({"w": torch.ones(4)}, {"w": torch.zeros(4)}))
        >>> transfer_report(plan).total_bytes  # a rank sends itself nothing
        0
    """
    demand = plan.demand
    sent = dict.fromkeys(plan.source.all_ranks, 0)
    for ranks in demand.sets:
        for rank, nbytes in zip(ranks, plan.all_shares[ranks], strict=True):
            sent[rank] += nbytes
    received = dict(zip(demand.targets, demand.sent.sum(0).tolist(), strict=True))
    kept = {rank: int(nbytes) for rank, nbytes in zip(demand.targets, demand.kept, strict=True) if nbytes}
    return TransferReport(sent, received, kept, _pairs(plan), plan.unused, plan.message_bytes)


def _pairs(plan: TransferPlan) -> dict[tuple[int, int], int]:
    """Bytes between the ranks that a picture shows."""
    senders, takers = set(plan.source.all_ranks[:_MAX_RANKS]), plan.demand.targets[:_MAX_RANKS]
    found: dict[tuple[int, int], int] = {}
    for row, ranks in enumerate(plan.demand.sets):
        for taker in np.flatnonzero(plan.demand.sent[row, : len(takers)]).tolist():
            for sender in senders.intersection(ranks):
                low, high = plan.stretch(ranks, sender, takers[taker])
                if low < high:
                    pair = sender, takers[taker]
                    found[pair] = found.get(pair, 0) + high - low
    return found


def _shade(nbytes: int, most: int) -> str:
    """White for nothing, the darker the more."""
    if not nbytes:
        return PAPER
    share = 0.15 + 0.85 * nbytes / most
    mixed = (round(255 + (int(_FILL[at : at + 2], 16) - 255) * share) for at in (1, 3, 5))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _size(nbytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes} B"

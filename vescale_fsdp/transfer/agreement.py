"""Compare what a transfer has stored with its source, by byte sums, before the target gets its new version.

Each sender adds the sums of its source items at their places in the target tensors, and each receiver subtracts those
of the items that it has stored. Over all ranks the difference is 0 for every tensor whose items are only moved. Tensors
that are cast or quantized are not compared.

Sums are linear: after a patch, those of a target are those that it had, and those of the changed items.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from vescale_fsdp.byte_sums import bytes_sums, copies_sums, region_sums
from vescale_fsdp.checkpoint.manifest.torch_dtypes import bytes_of
from vescale_fsdp.errors import CheckpointError, some
from vescale_fsdp.layout.geometry import contiguous_strides
from vescale_fsdp.layout.region import Copy, Region, whole_region
from vescale_fsdp.transfer.patches import indices_in
from vescale_fsdp.transfer.plan import TransferPlan
from vescale_fsdp.transfer.rank_transfers import copies_between

Sums = dict[int, torch.Tensor]  # the two byte sums of this rank's region of each target tensor, by its number
FlatOf = Callable[[int], torch.Tensor]
"""Returns the items of a tensor of this rank, by its number in a description, in the order of the rank's region."""


class SumAgreement:
    """This rank's part of the comparison, planned once.

    Args:
        rank: the rank's number in the plan's descriptions.
        regions: the regions of the target that this rank stores, by tensor number.
    """

    def __init__(self, plan: TransferPlan, rank: int, regions: Mapping[int, Region]) -> None:
        self._entries = plan.target.entries
        changed = {
            each.target
            for each in plan.leaves
            if each.narrowed or each.widened or each.source.codec is not None
        }
        self._sent: list[tuple[int, int, list[Copy]]] = []  # (source number, target number, copies)
        for placed in plan.leaves:
            position = placed.source.holders.position(rank)
            # The first replica alone: another one that sends other values is noticed.
            if placed.target not in changed and position is not None and position[1] == 0:
                target = whole_region(self._entries[placed.target].shape)
                # The tensor is the copies' source, as `copies_sums` needs it.
                copies = [
                    Copy(each.sizes, each.target, each.target_strides, each.source, each.source_strides)
                    for each in copies_between(placed.source.regions(position[0]), target, placed.leaf)
                ]
                if copies:  # else this rank may store no items of the tensor
                    self._sent.append((placed.source.number, placed.target, copies))
        self._regions = regions
        self._weights: dict[int, int] = {}  # by target number, of the tensors that are compared
        for number in regions:
            position = plan.target.holders_of(number).position(rank)
            if number not in changed and position is not None:
                _, replica, replicas = position
                # The weights of all replicas add up to 1, so equal replicas count once. All but the first are odd.
                weight = 2 * replica + 1 if replica else 1 - sum(2 * each + 1 for each in range(1, replicas))
                self._weights[number] = weight

    def stored_sums(self, target: FlatOf) -> Sums:
        """Return the sums of this rank's target, also of tensors that are not compared with the source."""
        return {
            number: region_sums(bytes_of(target(number)), region, entry.shape, entry.itemsize)
            for number, region in self._regions.items()
            for entry in (self._entries[number],)
        }

    def changed_sums(self, number: int, indices: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
        """Return what some items of a target tensor on this rank add to its sums.

        Args:
            indices: where the items are in this rank's flat memory, int64.
            bits: the items, as integers or complex128.
        """
        entry, region = self._entries[number], self._regions[number]
        strides, offsets = contiguous_strides(entry.shape), region.box.offsets
        first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
        if entry.shape:
            indices = indices_in(region.box.sizes, strides, first, indices + region.span.start)
        within = torch.arange(entry.itemsize, dtype=torch.int64, device=indices.device)
        places = (indices[:, None] * entry.itemsize + within).view(-1)
        return bytes_sums(bits.view(torch.uint8), places)

    def numbers(self, source: FlatOf, stored: Sums) -> list[int]:
        """Return what this rank adds to the difference of each target tensor: two int64 numbers per tensor.

        Args:
            stored: the sums of what this rank's target has, or will have after the commit.
        """
        found: Sums = {}
        for own, number, copies in self._sent:
            sums = copies_sums(bytes_of(source(own)), copies, self._entries[number].itemsize)
            found[number] = found[number] + sums if number in found else sums
        for number, weight in self._weights.items():
            sums = stored[number] * -weight
            found[number] = found[number] + sums if number in found else sums
        numbers = [0] * (2 * len(self._entries))
        if found:  # one device: `Transfer` takes no others
            for number, pair in zip(found, torch.stack(list(found.values())).tolist(), strict=True):
                numbers[2 * number : 2 * number + 2] = pair
        return numbers

    def check(self, total: Sequence[int]) -> None:
        """Raise if the differences, added up over all ranks, are not 0.

        Raises:
            CheckpointError: names the tensors.
        """
        differing = [
            entry.label
            for number, entry in enumerate(self._entries)
            if any(total[2 * number : 2 * number + 2])
        ]
        if differing:
            raise CheckpointError(
                "The target has stored other values than the source has.",
                expected="equal byte sums of source and target",
                got=f"{len(differing)} tensors that differ",
                where=some(differing),
                todo="save the source with check_replicas='all' to compare its replicas; if they are equal, test the "
                "memory of the target's ranks",
            )

"""Jobs that continue when ranks are lost or join, without a restart of the others."""

from typing import TYPE_CHECKING

from vescale_fsdp.lazy import lazily_export

if TYPE_CHECKING:
    from vescale_fsdp.elastic.job import ElasticJob, TrainingState
    from vescale_fsdp.elastic.membership import Membership, Quorum
    from vescale_fsdp.elastic.store_membership import StoreMembership
    from vescale_fsdp.elastic.torchft_membership import TorchftMembership

__all__ = [
    "ElasticJob",
    "Membership",
    "Quorum",
    "StoreMembership",
    "TorchftMembership",
    "TrainingState",
]

lazily_export(
    __name__,
    {
        "vescale_fsdp.elastic.job": "ElasticJob TrainingState",
        "vescale_fsdp.elastic.membership": "Membership Quorum",
        "vescale_fsdp.elastic.store_membership": "StoreMembership",
        "vescale_fsdp.elastic.torchft_membership": "TorchftMembership",
    },
)

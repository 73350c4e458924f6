"""Transfers of a live state between running ranks: of one job to another, from one layout to another.

    plan = plan_transfer(*describe_states(state, into))      once
    Transfer(plan).run(state, into)                          every step; plans nothing

The links say what the tensors of the target are made of:

    plan_transfer(source, target, links={"qkv.weight": concatenate("q.weight", "k.weight", "v.weight")})
"""

from typing import TYPE_CHECKING

from vescale_fsdp.lazy import lazily_export

if TYPE_CHECKING:
    from vescale_fsdp.transfer.description import StateDescription, describe_states
    from vescale_fsdp.transfer.joint_ranks import joint_ranks
    from vescale_fsdp.transfer.links import codes, concatenate, index, permute, scales, slice, stack
    from vescale_fsdp.transfer.plan import TransferPlan, plan_transfer
    from vescale_fsdp.transfer.transfer import Transfer, TransferHandle

__all__ = [
    "StateDescription",
    "Transfer",
    "TransferHandle",
    "TransferPlan",
    "codes",
    "concatenate",
    "describe_states",
    "index",
    "joint_ranks",
    "permute",
    "plan_transfer",
    "scales",
    "slice",
    "stack",
]

lazily_export(
    __name__,
    {
        "vescale_fsdp.transfer.description": "StateDescription describe_states",
        "vescale_fsdp.transfer.joint_ranks": "joint_ranks",
        "vescale_fsdp.transfer.links": "codes concatenate index permute scales slice stack",
        "vescale_fsdp.transfer.plan": "TransferPlan plan_transfer",
        "vescale_fsdp.transfer.transfer": "Transfer TransferHandle",
    },
)

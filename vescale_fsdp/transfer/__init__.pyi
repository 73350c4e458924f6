"""The public names of the package. Type checkers and `vescale_fsdp.lazy` read this list."""

from vescale_fsdp.transfer.delta import Delta as Delta
from vescale_fsdp.transfer.description import (
    StateDescription as StateDescription,
    describe_states as describe_states,
)
from vescale_fsdp.transfer.joint_ranks import JointRanks as JointRanks, joint_ranks as joint_ranks
from vescale_fsdp.transfer.loader_links import (
    links_from_loader as links_from_loader,
    share_links as share_links,
)
from vescale_fsdp.transfer.plan import TransferPlan as TransferPlan, plan_transfer as plan_transfer
from vescale_fsdp.transfer.transfer import Transfer as Transfer, TransferHandle as TransferHandle

"""The public names of the package. Type checkers and `vescale_fsdp.lazy` read this list."""

from vescale_fsdp.layout.group_layout import GroupLayout as GroupLayout
from vescale_fsdp.layout.planner import TensorSpec as TensorSpec, plan_group as plan_group

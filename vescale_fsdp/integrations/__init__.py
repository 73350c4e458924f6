"""Training stacks on this package's runtime instead of torch's FSDP2. Importing it replaces nothing."""

from typing import TYPE_CHECKING

from vescale_fsdp.lazy import lazily_export

if TYPE_CHECKING:
    from vescale_fsdp.integrations.installation import BoundNamesWarning, as_fsdp2, install, uninstall
    from vescale_fsdp.integrations.tried_versions import UntriedVersionWarning

__all__ = ["BoundNamesWarning", "UntriedVersionWarning", "as_fsdp2", "install", "uninstall"]

lazily_export(
    __name__,
    {
        "vescale_fsdp.integrations.installation": "BoundNamesWarning as_fsdp2 install uninstall",
        "vescale_fsdp.integrations.tried_versions": "UntriedVersionWarning",
    },
)

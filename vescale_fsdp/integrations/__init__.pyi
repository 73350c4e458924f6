"""The public names of the package. Type checkers and `vescale_fsdp.lazy` read this list."""

from vescale_fsdp.integrations.installation import (
    Installation as Installation,
    as_fsdp2 as as_fsdp2,
    install as install,
)

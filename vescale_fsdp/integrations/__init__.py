"""Training stacks with this package's runtime in place of torch's FSDP2. Nothing is replaced by importing it."""

from vescale_fsdp.lazy import lazily_export

lazily_export(__name__)  # the names are in __init__.pyi

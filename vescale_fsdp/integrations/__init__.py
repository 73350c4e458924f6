"""Training stacks on this package's runtime instead of torch's FSDP2. Importing it replaces nothing."""

from vescale_fsdp.lazy import lazily_export

lazily_export(__name__)  # public names are in __init__.pyi

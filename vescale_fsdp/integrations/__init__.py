"""Runs training stacks (accelerate, Trainer, ..) on this package's runtime instead of torch's FSDP2.

Importing this package replaces nothing; `install` and `as_fsdp2` do.
"""

from vescale_fsdp.lazy import lazily_export

lazily_export(__name__)  # public names are in __init__.pyi

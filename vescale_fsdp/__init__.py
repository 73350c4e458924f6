"""An FSDP runtime for PyTorch with an explicit, serializable sharding layout.

Use `fully_shard` in place of ``torch.distributed.fsdp.fully_shard``. Parameters are cut into equal shards
without ever cutting a block, gathered and reduced without copies, and saved with their layout, so that any
number of ranks can load them.
"""

from vescale_fsdp.lazy import lazily_export

# pyproject.toml reads the version from this line. It is not read from importlib.metadata, whose import takes longer
# than the import of this package.
__version__ = "0.1.0"

lazily_export(__name__)  # public names are in __init__.pyi

"""Sharded checkpoints: every rank writes one file, and any number of ranks can load the result.

    save(path, state)       load(path, state)       read_state(path)       verify(path)       PerRank(value)

FORMAT.md specifies the files on disk.
"""

from vescale_fsdp.lazy import lazily_export

lazily_export(__name__)  # public names are in __init__.pyi

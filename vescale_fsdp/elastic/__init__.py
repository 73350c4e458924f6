"""Jobs that continue when ranks are lost or join, without a restart of the other ranks."""

from vescale_fsdp.lazy import lazily_export

lazily_export(__name__)  # public names are in __init__.pyi

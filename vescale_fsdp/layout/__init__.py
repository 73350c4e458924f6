"""Which rank owns which element: integers and names only. Pickles name the layout classes by this path."""

from vescale_fsdp.lazy import lazily_export

lazily_export(__name__)  # the names are in __init__.pyi

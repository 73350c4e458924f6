"""Settings files that go along with the weights: config, tokenizer, code, licence; everything but weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from vescale_fsdp.conversion.hf_layout import is_weight_file, natural_key
from vescale_fsdp.conversion.places import open_store
from vescale_fsdp.conversion.store import Store
from vescale_fsdp.errors import ConversionError, explain

__all__ = ["CONFIG_FILE", "Assets"]

CONFIG_FILE = "config.json"
_DTYPE_KEYS = ("dtype", "torch_dtype")  # transformers 5, and before


class Assets:
    """The settings files of a folder or URL; none at all for None.

    Raises:
        ConversionError: if there are none where there should be, or config.json is not JSON.
    """

    def __init__(self, url: str | None) -> None:
        self.files: tuple[str, ...] = ()
        self.config: dict[str, Any] | None = None
        self._weights_dtype: str | None = None
        if url is None:
            return
        self._store: Store = open_store(url)
        found = self._store.list_files()
        if not found:
            raise ConversionError(
                explain(
                    "there are no settings files to carry over",
                    expected="a folder with config.json, tokenizer files and so on",
                    got="an empty or missing folder",
                    where=url,
                    todo="check the path given with --assets",
                )
            )
        self.files = tuple(sorted((file for file in found if _is_asset(file)), key=natural_key))
        if CONFIG_FILE in self.files:
            self.config = self._parse_config(url)

    def _parse_config(self, url: str) -> dict[str, Any]:
        try:
            loaded = json.loads(self._store.read_file(CONFIG_FILE))
        except ValueError as error:
            loaded = f"{type(error).__name__}: {error}"
        if not isinstance(loaded, dict):
            raise ConversionError(
                explain(
                    "config.json cannot be read",
                    expected="a JSON object",
                    got=loaded,
                    where=f"{url}/{CONFIG_FILE}",
                    todo="correct the file, or leave it out of --assets",
                )
            )
        return loaded

    def set_weights_dtype(self, name: str) -> None:
        """Keep config.json in step with weights that were cast: loaders believe the config, not the files."""
        self._weights_dtype = name

    def reader(self, file: str) -> Callable[[], Iterable[bytes]]:
        """How to get a file's bytes, as they go into the result; a few MiB at a time, since some are large."""
        return lambda: self._read(file)

    def _read(self, file: str) -> Iterable[bytes]:
        if file != CONFIG_FILE or self._weights_dtype is None or self.config is None:
            return self._store.read_pieces(file)
        key = next((key for key in _DTYPE_KEYS if key in self.config), _DTYPE_KEYS[0])
        changed = {**self.config, key: self._weights_dtype}
        return [(json.dumps(changed, indent=2, ensure_ascii=False) + "\n").encode()]


def _is_asset(file: str) -> bool:
    return not is_weight_file(file) and not any(part.startswith(".") for part in file.split("/"))

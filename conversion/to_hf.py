"""Writing a Hugging Face model repository from any source, as a stream.

What goes in: the model's tensors under their own names, an index if there are several files, and every
settings file of ``assets`` (config, tokenizer, code, licence). What stays out, always reported: optimizer
state, other training state, and the twin of a tied weight.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vescale_fsdp.conversion.copying import CopyLimits, FileCopy, Progress, copy_files
from vescale_fsdp.conversion.hf_layout import (
    INDEX_FILE,
    ShardPlan,
    index_bytes,
    is_weight_file,
    natural_key,
    plan_shards,
)
from vescale_fsdp.conversion.model_names import ModelNames, find_model
from vescale_fsdp.conversion.safetensors_file import make_header
from vescale_fsdp.conversion.source import Source
from vescale_fsdp.conversion.store import Store, open_store
from vescale_fsdp.conversion.target_folder import TargetFolder
from vescale_fsdp.conversion.ties import find_tied_twins
from vescale_fsdp.conversion.view import SourceView, TensorView
from vescale_fsdp.errors import ConversionError, explain

__all__ = ["HfOptions", "HfReport", "to_hf"]

CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class HfOptions:
    """How the repository shall look.

    Args:
        assets: folder or URL whose settings files are copied through; None for none.
        model_prefix: what the model's names begin with in the source; None to detect it.
        max_shard_bytes: limit of tensor bytes per file.
        overwrite: replace the weights of a folder that has files already.
        dry_run: plan and check only, write nothing.
        limits: memory and threads.
    """

    assets: str | None = None
    model_prefix: str | None = None
    max_shard_bytes: int = 5 * 10**9
    overwrite: bool = False
    dry_run: bool = False
    limits: CopyLimits = field(default_factory=CopyLimits)


@dataclass(frozen=True)
class HfReport:
    """What a conversion did, or would do."""

    source_kind: str
    source: str
    target: str
    model_prefix: str
    shards: tuple[ShardPlan, ...]
    assets: tuple[str, ...]
    dropped_optimizer: int  # entries
    dropped_others: tuple[str, ...]
    tied: tuple[tuple[str, str], ...]  # (name left out, name that holds its bytes)
    warnings: tuple[str, ...]
    written: bool

    @property
    def nbytes(self) -> int:
        """Tensor bytes in the repository."""
        return sum(shard.nbytes for shard in self.shards)

    def to_json(self) -> dict[str, Any]:
        """Plain values for ``--json``."""
        return {
            "source": {"kind": self.source_kind, "url": self.source, "model_prefix": self.model_prefix},
            "target": self.target,
            "written": self.written,
            "total_bytes": self.nbytes,
            "files": [
                {"file": s.file, "tensors": len(s.infos), "tensor_bytes": s.nbytes} for s in self.shards
            ],
            "assets": list(self.assets),
            "dropped": {"optimizer_entries": self.dropped_optimizer, "others": list(self.dropped_others)},
            "tied": [{"left_out": twin, "same_as": kept} for twin, kept in self.tied],
            "warnings": list(self.warnings),
        }


def to_hf(
    source: Source,
    target: str,
    options: HfOptions | None = None,
    *,
    source_url: str | None = None,
    progress: Progress = lambda _: None,
) -> HfReport:
    """Write the model of ``source`` to the folder or URL ``target``.

    Args:
        source: an opened checkpoint.
        target: new or empty folder, unless ``options.overwrite``.
        options: defaults throughout if None.
        source_url: what the target must not touch; default the source's folder.
        progress: called with bytes written since the last call, from several threads.

    Raises:
        ConversionError: if the target is refused or the model cannot be expressed; nothing is left behind.
        CorruptCheckpointError: if the source turns out damaged; nothing is left behind.
    """
    chosen = options or HfOptions()
    folder = TargetFolder(target, source_url=source_url or source.url, overwrite=chosen.overwrite)
    model = find_model(source, chosen.model_prefix)
    assets = _Assets(chosen.assets)
    twins, warnings = find_tied_twins(source, model, assets.config)
    views = [SourceView(source, old, new) for old, new in model.names.items() if new not in twins]
    shards = plan_shards([view.info for view in views], chosen.max_shard_bytes)
    index = index_bytes(shards) if len(shards) > 1 else None
    report = HfReport(
        source_kind=source.kind,
        source=source.url,
        target=target,
        model_prefix=model.prefix,
        shards=shards,
        assets=tuple(assets.files),
        dropped_optimizer=len(model.optimizer),
        dropped_others=model.others,
        tied=tuple(twins.items()),
        warnings=(*warnings, *_warnings(model, assets, folder)),
        written=not chosen.dry_run,
    )
    if not chosen.dry_run:
        try:
            _write(folder, shards, views, index, assets, chosen.limits, progress)
        except BaseException:
            folder.abort()
            raise
    return report


def _write(
    folder: TargetFolder,
    shards: Sequence[ShardPlan],
    views: Sequence[TensorView],
    index: bytes | None,
    assets: _Assets,
    limits: CopyLimits,
    progress: Progress,
) -> None:
    by_name = {view.info.name: view for view in views}
    copies = []
    for shard in shards:
        header = make_header(shard.infos)
        tensors = [(offset, by_name[name]) for name, offset in header.offsets.items()]
        copies.append(FileCopy(folder.create(shard.file), header.data, tensors))
    copy_files(copies, limits, progress)
    for file in assets.files:
        folder.add_file(file, assets.read(file))
    if index is not None:
        folder.add_file(INDEX_FILE, index)
    folder.commit(is_stale=is_weight_file)


def _warnings(model: ModelNames, assets: _Assets, folder: TargetFolder) -> list[str]:
    found = []
    if assets.config is None and CONFIG_FILE not in folder.old_files:
        found.append("no config.json: transformers cannot load the result until one is added (--assets DIR)")
    return found


class _Assets:
    """Settings files to carry over: every regular file that is neither weights nor an index."""

    def __init__(self, url: str | None) -> None:
        self.files: list[str] = []
        self.config: dict[str, Any] | None = None
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
        self.files = sorted((file for file in found if _is_asset(file)), key=natural_key)
        if CONFIG_FILE in self.files:
            self.config = self._parse_config(url)

    def _parse_config(self, url: str) -> dict[str, Any]:
        try:
            loaded = json.loads(self.read(CONFIG_FILE))
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

    def read(self, file: str) -> bytes:
        return self._store.read_file(file)


def _is_asset(file: str) -> bool:
    parts = file.split("/")
    return not is_weight_file(file) and not any(part.startswith(".") for part in parts)
